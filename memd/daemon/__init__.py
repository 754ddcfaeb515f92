"""The running daemon: sockets, threads and time around the pure packages.

Rule: the only asyncio and aiohttp code. State that requests share is touched on the event loop only; native work that
can exceed a millisecond runs in threads; every disk write goes through the one writer thread.
"""
