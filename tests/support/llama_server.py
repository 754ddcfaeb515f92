"""llama.cpp's real HTTP server in a process of its own, for as long as whoever started it is there.

Rule: run as a script (`python llama_server.py MODEL ...`) it prints one line `LISTEN URL` and stays up until its
standard input closes: a pytest that dies, however it dies, takes its server with it. A line that it reads before that,
`{"model": PATH, "chat_template": JINJA, "alias": NAME}`, puts a new server in the place of the old one and prints a new
`LISTEN URL`: to start a process for each of many templates would take longer than to test them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Llama:
    """A server that is up, and may be another one behind the next address."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._asked: IO[bytes] = process.stdin
        self._told: IO[bytes] = process.stdout
        self._log = log
        self._process = process
        self.url = self._listening()
        """Without `/v1`."""

    def replace(self, model: Path, chat_template: str, alias: str = "tiny") -> None:
        """End the server and start one on `model`, with `chat_template` instead of the model's own; at a new `url`."""
        wanted = {"model": str(model), "chat_template": chat_template, "alias": alias}
        self._asked.write(json.dumps(wanted).encode() + b"\n")
        self._asked.flush()
        self.url = self._listening()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the server's process; who kills it waits for its end."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def _listening(self) -> str:
        for line in self._told:  # llama.cpp writes here too; ends with the process
            if line.startswith(b"LISTEN "):
                return line.split()[1].decode()
        raise AssertionError(f"llama.cpp did not start:\n{self._log.read_text(errors='replace')[-4000:]}")


@contextmanager
def running_llama(
    model: Path, *, context: int, log: Path, parallel: int = 1, port: int = 0, settings: Sequence[str] = ()
) -> Iterator[str]:
    """Start the server on `model` and give its base URL (without `/v1`); see `replaceable_llama`."""
    with replaceable_llama(model, context=context, log=log, parallel=parallel, port=port, settings=settings) as llama:
        yield llama.url


@contextmanager
def replaceable_llama(
    model: Path, *, context: int, log: Path, parallel: int = 1, port: int = 0, settings: Sequence[str] = ()
) -> Iterator[Llama]:
    """Start the server on `model`.

    Args:
        model: A GGUF file.
        context: Tokens of the whole cache; a slot's window is `context / parallel`.
        log: Where the server's own words go; shown if it does not start.
        parallel: How many requests it works on at once.
        port: 0 takes a free one.
        settings: More of the server's own, as `name=number` after xllamacpp's `CommonParams`.
    """
    command = [sys.executable, __file__, str(model), f"--context={context}", f"--parallel={parallel}", f"--port={port}"]
    command += [f"--set={setting}" for setting in settings]
    with (
        log.open("wb") as err,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err) as process,
    ):
        try:
            yield Llama(process, log)
        finally:
            process.kill()


def _serve() -> None:
    import xllamacpp  # here: the tests that import this module must not load the native library into pytest

    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for name in ("context", "parallel", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--set", action="append", default=[])
    asked = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.hostnames = asked.model, asked.port, ["127.0.0.1"]
    params.n_ctx, params.n_parallel, params.kv_unified = asked.context, asked.parallel, False
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.fit_params, params.n_gpu_layers = False, False, 0
    params.use_jinja, params.endpoint_slots, params.endpoint_metrics, params.ui = True, True, True, False
    params.sampling.temp = 0.0
    params.verbosity = 1
    params.model_alias = {"tiny"}
    for setting in asked.set:
        name, _, value = setting.partition("=")
        setattr(params, name, type(getattr(params, name))(int(value)))  # an unknown name fails here
    server = xllamacpp.Server(params)
    print("LISTEN", server.listening_address, flush=True)
    for line in sys.stdin.buffer:
        wanted = json.loads(line)
        # A server that is ended before its loop turns never ends; this is answered by the loop.
        urllib.request.urlopen(f"{server.listening_address}/slots").close()
        del server
        params.model.path, params.chat_template = wanted["model"], wanted["chat_template"]
        params.model_alias = {wanted["alias"]}
        server = xllamacpp.Server(params)
        print("LISTEN", server.listening_address, flush=True)
    os._exit(0)  # the server's threads would go on


if __name__ == "__main__":
    _serve()
