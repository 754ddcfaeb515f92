"""A llama.cpp server that memd runs in a child process (`memd serve --model FILE.gguf`).

Rule: the child never outlives memd. It exits when its standard input closes, which happens however memd ends, even by
`kill -9`. This file is both sides: `llama_child` in memd, and the child's program when run with `python -m`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import aiohttp

from memd.errors import UpstreamError
from memd.wording import pip_install

READY_SECONDS_MAX = 600.0
"""Limit on loading; a large model on a slow disk takes minutes."""
END_SECONDS = 5.0
LISTENING = "LISTENING "


@asynccontextmanager
async def llama_child(model: Path) -> AsyncIterator[str]:
    """Start llama.cpp with a model and yield its address once it is ready; it ends with the block. Raises
    UpstreamError: the `llama` extra is missing, or the model could not be loaded."""
    if find_spec("xllamacpp") is None:
        needed = pip_install("memd-proxy[llama]")
        raise UpstreamError(f"--model needs llama.cpp: {needed} (or start llama-server and use --upstream)")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "memd.proxy.upstream.llama_child",
        str(model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # memd handles Ctrl-C: replies in flight still need the model
    )
    try:
        url = await asyncio.wait_for(_listening(process, model), READY_SECONDS_MAX)
        await asyncio.wait_for(_ready(url, process, model), READY_SECONDS_MAX)
        yield url
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _listening(process: asyncio.subprocess.Process, model: Path) -> str:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        text = line.decode(errors="replace").strip()
        if text.startswith(LISTENING):
            return text.removeprefix(LISTENING)
    code = await process.wait()
    raise UpstreamError(f"llama.cpp could not serve {model} (exit code {code}); its own message stands above")


async def _ready(url: str, process: asyncio.subprocess.Process, model: Path) -> None:
    async with aiohttp.ClientSession() as session:
        while process.returncode is None:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # not listening yet
            await asyncio.sleep(0.1)
    raise UpstreamError(f"llama.cpp ended while loading {model}; its own message stands above")


def _serve(model: str) -> None:
    """Run the child."""
    import xllamacpp

    threading.Thread(target=_end_with_parent, daemon=True).start()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.use_jinja = True
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = True
    parameters.ui = False
    parameters.model_alias = {Path(model).stem}
    parameters.verbosity = 1  # errors only: the terminal belongs to memd
    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError:
        sys.exit(1)  # llama.cpp has printed the reason
    sys.stdout.write(f"{LISTENING}{server.listening_address}\n")
    sys.stdout.flush()
    threading.Event().wait()


def _end_with_parent() -> None:
    # Unbuffered: a buffered read would hold the lock of sys.stdin that the interpreter needs to exit.
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
