"""`clients/typescript` as its users get it: packed by npm and installed into a project of its own.

Rule: nothing is written into the source tree; the compiler and the SDKs are those of `clients` (see
`typescript_client.py`), found through a link.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typescript_client import CLIENTS, NODE, NPM, TSC, Answering, node

SOURCE = CLIENTS.parent.parent / "clients" / "typescript"
APP = {"name": "app", "private": True, "type": "module"}
STRICT = {
    "strict": True,
    "exactOptionalPropertyTypes": True,
    "noUncheckedIndexedAccess": True,
    "noPropertyAccessFromIndexSignature": True,
    "noUnusedLocals": True,
    "noEmit": True,
    "target": "es2023",
    "types": ["node"],
}
TSCONFIG = {
    "compilerOptions": {
        **STRICT,
        "erasableSyntaxOnly": True,
        "verbatimModuleSyntax": True,
        "module": "nodenext",
        "skipLibCheck": True,  # @ai-sdk/provider's own declarations need a package that it does not name
    }
}
AI_SDKS = (5, 6, 7)
"""The versions of the AI SDK that the package is for; the last is the one that all other tests use."""
AI_PACKAGES = {"ai": "ai", "@ai-sdk/openai": "openai", "@ai-sdk/openai-compatible": "openai-compatible"}
"""The AI SDK's packages, and how `clients` names their older versions, with `-` and the AI SDK's own version."""


class TypeScriptPackage:
    """A project that uses the package; made by `installed`."""

    def __init__(self, folder: Path, archive: Path, packed: list[str]) -> None:
        self.folder = folder
        self.archive = archive
        """What npm packed."""
        self.packed = packed
        """The files in the package."""
        self._answering: dict[str, Answering] = {}
        self._others: dict[int, TypeScriptPackage] = {}

    @classmethod
    def installed(cls, folder: Path) -> TypeScriptPackage:
        """Build the package and install it into a new project in `folder`."""
        (folder / "node_modules").symlink_to(CLIENTS / "node_modules")  # below it everything finds the SDKs
        package = folder / "package"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("node_modules", "dist", "*.tgz"))
        [packed] = json.loads(node(NPM, "pack", "--json", "--silent", folder=package))
        files = sorted(file["path"] for file in packed["files"])
        return cls(folder / "app", package / packed["filename"], files)._with_tests()

    def with_ai_sdk(self, version: int) -> TypeScriptPackage:
        """A project with that version of the AI SDK: this one, or one beside it."""
        if version == AI_SDKS[-1]:
            return self
        if version in self._others:
            return self._others[version]
        app = self._others[version] = TypeScriptPackage(
            self.folder.with_name(f"ai{version}"), self.archive, self.packed
        )
        app._with_tests()
        for name, alias in AI_PACKAGES.items():
            link = app.folder / "node_modules" / name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(CLIENTS / "node_modules" / f"{alias}-{version}")
        return app

    def _with_tests(self) -> TypeScriptPackage:
        shutil.copytree(SOURCE / "test", self.folder)
        self.write("package.json", json.dumps(APP))
        self.write("tsconfig.json", json.dumps(TSCONFIG))
        node(NPM, "install", "--offline", "--silent", str(self.archive), folder=self.folder)
        return self

    def write(self, name: str, text: str) -> None:
        """Put a file into the project."""
        (self.folder / name).write_text(text)

    def check_types(self) -> None:
        """`tsc --strict` over all that is in the project; fails with the compiler's words."""
        node(str(CLIENTS / TSC), "--project", ".", folder=self.folder)

    def run(self, script: str, asked: object = None) -> str:
        """Run one of the scripts; what it wrote."""
        return node(script, stdin=json.dumps(asked), folder=self.folder)

    def steps(self, script: str, steps: list[dict[str, Any]], **memory: Any) -> list[dict[str, Any]]:
        """Run `steps` one after the other through one `Memory` with these options; what each told (see the script)."""
        if script not in self._answering or self._answering[script].has_ended:
            self._end(script)
            self._answering[script] = Answering(script, self.folder)
        told = self._answering[script].ask({"memory": memory, "steps": steps})["steps"]
        assert isinstance(told, list) and len(told) == len(steps)
        return told

    def close(self) -> None:
        """End the scripts that still answer."""
        for script in list(self._answering):
            self._end(script)
        for other in self._others.values():
            other.close()

    def _end(self, script: str) -> None:
        if script in self._answering:
            self._answering.pop(script).close()


def examples() -> dict[str, str]:
    """The programs in the package's README by the heading that they stand under; the one in JavaScript is CommonJS."""
    return dict(re.findall(r"^## (.+?)\n(?:(?!^## ).)*?^```[tj]s\n(.*?)^```", _readme(), re.MULTILINE | re.DOTALL))


def _readme() -> str:
    return (SOURCE / "README.md").read_text()


# Node 20 and 22, Bun and Deno beside the tests' own Node, as npm packages of their binaries: what is installed is what
# clients/runtimes/package-lock.json says, with its checksums (half a gigabyte, once). A test is left out, with the
# reason, only where a binary cannot be had.

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
