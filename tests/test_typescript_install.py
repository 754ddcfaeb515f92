"""The package for TypeScript programs in an empty folder: from ESM, CommonJS and TypeScript, in every runtime.

Rule: nothing is beside the package but what its user would have.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess
from typescript_client import CLIENTS, NPM, TSC, node
from typescript_package import RUNTIMES, SOURCE, STRICT, TypeScriptPackage, run_in

from memd import __version__

MODULES = ("ai-sdk", "answer", "index", "memory", "options", "protocol", "request", "routes")
NOTE = "The spare lamp is behind the rope."
QUESTION = "Where is the spare lamp?"
REPLACEMENT = "The spare lamp is in the boat."
USED = """
const memory = new Memory({ topic: 'office', relatedTopics: ['company-wide'], mode: 'readonly', session: 'one' });
const asked: typeof globalThis.fetch = memory.fetch;
const middleware: MemoryMiddleware = memoryMiddleware;
let problem = '';
try {
  new Memory({ topic: 'the office' });
} catch (error) {
  problem = String(error);
}
console.log(typeof asked, middleware.specificationVersion, memoryHeaders({}), memoryOut(null), problem);
"""
SAID = (
    'function v3 undefined undefined TypeError: memd-client: topic cannot be "the office": use 1 to 128 letters, '
    'digits, ".", "_" or "-", beginning with a letter or digit\n'
)
IMPORTS = """
import { Memory, memoryHeaders, memoryOut } from 'memd-client';
import { memoryMiddleware, type MemoryMiddleware } from 'memd-client/ai-sdk';
"""


@pytest.fixture(scope="module")
def empty(memd_client: TypeScriptPackage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing in it but the package, installed by npm."""
    folder = tmp_path_factory.mktemp("empty")
    node(NPM, "install", "--offline", "--silent", str(memd_client.archive), folder=folder)
    return folder


def test_the_package_has_what_it_needs_and_no_more(memd_client: TypeScriptPackage) -> None:
    ends = (".d.ts", ".js")
    built = [f"dist/{build}{name}{end}" for build in ("", "cjs/") for name in MODULES for end in ends]
    assert memd_client.packed == sorted(["LICENSE", "README.md", "package.json", "dist/cjs/package.json", *built])
    assert {path.stem for path in (SOURCE / "src").iterdir()} == set(MODULES)
    described = json.loads((SOURCE / "package.json").read_text())
    assert "dependencies" not in described
    assert described["version"] == __version__
    assert (SOURCE / "LICENSE").read_text() == (SOURCE.parent.parent / "LICENSE").read_text()


def test_the_package_is_built_with_what_its_tests_use() -> None:
    wanted = json.loads((SOURCE / "package.json").read_text())["devDependencies"]
    locked = json.loads((CLIENTS / "package-lock.json").read_text())["packages"]
    assert wanted == {name: f"^{locked[f'node_modules/{name}']['version']}" for name in wanted}


def test_the_checkers_of_packages_find_nothing(memd_client: TypeScriptPackage) -> None:
    archive = str(memd_client.archive)
    found = node(str(CLIENTS / "node_modules/publint/src/cli.js"), "run", "--strict", archive)
    assert "All good!" in found
    attw = str(CLIENTS / "node_modules/@arethetypeswrong/cli/dist/index.js")
    told = json.loads(node(attw, archive, "--profile", "node16", "--format", "json"))
    resolved = told["analysis"]["entrypoints"]
    assert set(resolved) == {".", "./ai-sdk", "./package.json"}
    for entry in (".", "./ai-sdk"):
        kinds = resolved[entry]["resolutions"]
        assert [kinds[kind]["resolution"]["isTypeScript"] for kind in ("node16-cjs", "node16-esm", "bundler")] == [
            True
        ] * 3
    # What is left is about the resolution of Node before version 12, which this profile leaves aside.
    assert {problem["resolutionKind"] for problem in told["analysis"]["problems"]} <= {"node10"}


@pytest.mark.parametrize(
    ("names", "module", "resolution"),
    [
        (("use.mts", "use.cts"), "node16", "node16"),
        (("use.mts", "use.cts"), "nodenext", "nodenext"),
        (("use.mts",), "esnext", "bundler"),
        (("use.cts",), "commonjs", "bundler"),
    ],
)
@pytest.mark.parametrize("lib", [["es2023"], ["es2023", "dom"]], ids=["node", "dom"])
def test_a_typescript_program_in_an_empty_folder_compiles_and_runs(
    empty: Path, names: tuple[str, ...], module: str, resolution: str, lib: list[str]
) -> None:
    settings = {
        **STRICT,
        "noEmit": False,
        "module": module,
        "moduleResolution": resolution,
        "lib": lib,
        "types": ["node"] if "dom" not in lib else [],
        "typeRoots": [str(CLIENTS / "node_modules/@types")],
        "skipLibCheck": False,
        "rootDir": ".",
        "outDir": "built",
    }
    console = "" if "dom" in lib else "import 'node:process';\n"
    for name in names:
        (empty / name).write_text(console + IMPORTS + USED)
    (empty / "tsconfig.json").write_text(json.dumps({"compilerOptions": settings, "files": names}))
    node(str(CLIENTS / TSC), "--project", ".", folder=empty)
    for name in names:
        assert node(f"built/{name.replace('ts', 'js')}", folder=empty) == SAID


@pytest.mark.parametrize("script", ["runtime.mjs", "runtime.cjs"], ids=["ESM", "CommonJS"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_runtime_tells_asks_corrects_and_searches(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, runtime: str, script: str
) -> None:
    given = {"note": NOTE, "question": QUESTION, "replacement": REPLACEMENT}
    addresses = {"base_url": daemon.base_url, "own_url": daemon.own_url}
    app = memd_client.with_ai_sdk(6)  # the newest version that also runs in Node 20
    told: dict[str, Any] = json.loads(run_in(runtime, script, json.dumps({**given, **addresses}), app.folder))
    [note] = told.pop("ids")
    for status, shown in told.pop("asked_first"):
        assert status == "injected" and note in shown
    live = told.pop("live")
    assert REPLACEMENT in live and NOTE not in live
    assert told.pop("by_ai_sdk"), "the middleware tells what was shown"
    assert told == {
        "found": [note, NOTE],
        "thanked": ["none", []],
        "pending": 0,
        "refused": [True, 400],
        "wrong": "TypeError",
    }
