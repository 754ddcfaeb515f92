"""`clients/typescript` as its users get it: packed by npm and installed into a project of its own.

Rule: nothing is written into the source tree; the compiler and the SDKs are those of `clients` (see
`typescript_client.py`), found through a link.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from typescript_client import CLIENTS, NPM, node

SOURCE = CLIENTS.parent.parent / "clients" / "typescript"
APP = {"name": "app", "private": True, "type": "module"}
TSCONFIG = {
    "compilerOptions": {
        "strict": True,
        "exactOptionalPropertyTypes": True,
        "noUncheckedIndexedAccess": True,
        "noPropertyAccessFromIndexSignature": True,
        "noUnusedLocals": True,
        "erasableSyntaxOnly": True,
        "verbatimModuleSyntax": True,
        "noEmit": True,
        "target": "es2023",
        "module": "nodenext",
        "types": ["node"],
        "skipLibCheck": True,  # @ai-sdk/provider's own declarations need a package that it does not name
    }
}


class TypeScriptPackage:
    """A project that uses the package; made by `installed`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.packed: list[str] = []
        """The files in the package."""

    @classmethod
    def installed(cls, folder: Path) -> TypeScriptPackage:
        """Build the package and install it into a new project in `folder`."""
        (folder / "node_modules").symlink_to(CLIENTS / "node_modules")  # below it everything finds the SDKs
        package = folder / "package"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("node_modules", "dist", "*.tgz"))
        [packed] = json.loads(node(NPM, "pack", "--json", "--silent", folder=package))
        app = cls(folder / "app")
        app.packed = sorted(file["path"] for file in packed["files"])
        shutil.copytree(package / "test", app.folder)
        app.write("package.json", json.dumps(APP))
        app.write("tsconfig.json", json.dumps(TSCONFIG))
        node(NPM, "install", "--offline", "--silent", str(package / packed["filename"]), folder=app.folder)
        return app

    def write(self, name: str, text: str) -> None:
        """Put a file into the project."""
        (self.folder / name).write_text(text)

    def check_types(self) -> None:
        """`tsc --strict` over all that is in the project; fails with the compiler's words."""
        node(str(CLIENTS / "node_modules/typescript/bin/tsc"), "--project", ".", folder=self.folder)

    def run(self, script: str, asked: object = None) -> str:
        """Run one of the scripts; what it wrote."""
        return node(script, stdin=json.dumps(asked), folder=self.folder)

    def steps(self, script: str, steps: list[dict[str, Any]], **memory: Any) -> list[dict[str, Any]]:
        """Run `steps` one after the other through one `Memory` with these options; what each told (see the script)."""
        told = json.loads(self.run(script, {"memory": memory, "steps": steps}))["steps"]
        assert isinstance(told, list) and len(told) == len(steps)
        return told


def examples() -> dict[str, str]:
    """The programs in the package's README by the heading that they stand under."""
    return dict(re.findall(r"^## (.+?)\n(?:(?!^## ).)*?^```ts\n(.*?)^```", _readme(), re.MULTILINE | re.DOTALL))


def _readme() -> str:
    return (SOURCE / "README.md").read_text()
