"""What memd trusts its event loop with: the descriptors of everything else in the process, the log's among them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import uvloop


def test_a_connection_that_was_given_up_closes_no_file_that_was_opened_since(tmp_path: Path) -> None:
    """As when a client leaves while memd connects to the model server: aiohttp hands the loop a connected socket."""

    async def given_up(connection: socket.socket) -> None:
        connecting = asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=connection)
        task = asyncio.ensure_future(connecting)
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)  # the loop has closed the descriptor: the next file gets its number

    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        uvloop.run(given_up(connection))
    files = [os.open(tmp_path / str(number), os.O_WRONLY | os.O_CREAT) for number in range(20)]
    connection.close()  # as Python does with the last reference, whenever that goes
    for file in files:
        assert os.write(file, b"said") == 4
        os.close(file)
