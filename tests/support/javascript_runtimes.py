"""Node 20 and 22, Bun and Deno beside the tests' own Node, as npm packages of their binaries.

Rule: what is installed is what `clients/runtimes/package-lock.json` says, with its checksums, beside the virtual
environment's packages (half a gigabyte, once). A test is left out, with the reason, only where a binary cannot be had.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typescript_client import CLIENTS, NODE, NPM, node

WANTED = CLIENTS / "runtimes"
FOLDER = Path(sys.prefix) / "javascript-runtimes"
BINARIES = {
    "node20": "node-20-*/bin/node",
    "node22": "node-22-*/bin/node",
    "bun": "@oven/bun-*/bin/bun",
    "deno": "@deno/*/deno",
}
RUNTIMES = ("node20", "node22", "node24", "bun", "deno")
OWN = "node24"
"""The one that comes with the tests' packages."""
_UNREACHABLE = re.compile(r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT|ERR_SOCKET_TIMEOUT")


def run_in(runtime: str, script: str, argument: str, folder: Path) -> str:
    """Run a script of `folder` in a runtime; what it wrote to stdout."""
    command = [NODE] if runtime == OWN else [_binary(runtime)]
    if runtime == "deno":
        command += ["run", "--allow-all", "--quiet"]
    environment = {**os.environ, "DENO_NO_UPDATE_CHECK": "1", "DENO_DIR": str(folder / ".deno")}
    done = subprocess.run(
        [*command, script, argument], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, f"{runtime} {script}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _binary(runtime: str) -> str:
    """The program of a runtime; the test is left out where npm has none for this machine or cannot be reached."""
    wanted = hashlib.sha256((WANTED / "package-lock.json").read_bytes()).hexdigest()
    FOLDER.mkdir(exist_ok=True)
    stamp = FOLDER / ".installed-lock"
    with (FOLDER / ".lock").open("w") as one_at_a_time:  # tests run in several processes
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(WANTED / name, FOLDER / name)
            try:
                node(NPM, "ci", folder=FOLDER)
            except AssertionError as error:
                if _UNREACHABLE.search(str(error)) is None:
                    raise
                pytest.skip(f"{runtime} could not be fetched from npm: {error}")
            stamp.write_text(wanted)
    found = next((FOLDER / "node_modules").glob(BINARIES[runtime]), None) or shutil.which(runtime)
    if found is None:
        pytest.skip(f"{runtime}: clients/runtimes names no binary of it for this machine, and PATH has none")
    return str(found)
