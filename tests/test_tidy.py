"""The shape of the code: who imports whom, who may touch what, how long things are.

These are the rules that a linter does not know. Docstrings of public things, line length and names are ruff's.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import forked_memd
import pytest
from daemon_process import clean_environment

ROOT = Path(__file__).parent.parent

WORDS = {"caching", "clock", "errors", "entries", "messages", "notes", "principals", "selection", "wording", "settings"}
"""The words every layer speaks."""
LOWER = WORDS | {"assets", "wire", "embedding", "store", "telemetry"}
MIDDLE = LOWER | {"conversation", "recall", "ingest"}
FLOOR = MIDDLE | {"access", "receipts"}
"""Below the two that answer requests: `admin` those to memd, `proxy` those to the model."""

MAY_IMPORT = {
    "errors": set[str](),
    "entries": {"errors"},
    "messages": {"caching", "errors"},
    "notes": {"errors", "messages", "selection"},
    "selection": {"entries"},
    "wording": set[str](),
    "clock": set[str](),
    "caching": set[str](),
    "principals": {"errors"},
    "settings": {"errors", "principals", "assets", "wording"},
    "assets": set[str](),
    "wire": WORDS,
    "embedding": WORDS | {"assets"},
    "store": WORDS | {"assets"},
    "telemetry": WORDS | {"wire"},
    "conversation": WORDS,
    "recall": LOWER,
    "ingest": LOWER | {"conversation"},
    "access": WORDS | {"telemetry", "wire"},
    "receipts": LOWER | {"recall", "ingest"},
    "admin": FLOOR,
    "proxy": FLOOR,
    "daemon": FLOOR | {"admin", "proxy"},
    "demo": MIDDLE | {"daemon"},
    "cli": FLOOR | {"admin", "proxy", "daemon", "demo"},
    "__main__": {"cli"},
}
"""For each folder or module right below `memd`: what it may import besides itself and `memd` (the version)."""

PURE = {
    *("entries", "caching", "messages", "notes", "principals", "errors", "selection", "wording", "wire"),
    *("conversation", "ingest.redaction"),
    "admin.oauth.protocol",
    *("ingest.chunking", "ingest.readers.text", "recall.question", "recall.block", "recall.untrusted", "recall.times"),
}
"""Modules, and folders with all that is in them, that do no I/O and ask neither clock nor chance."""
# A lock (threading) and an object's size (sys) are neither I/O nor clock nor chance.
IMPURE_MODULES = {
    *("aiohttp", "asyncio", "concurrent", "fastembed", "fcntl", "glob", "hnswlib", "http", "io", "logging", "mmap"),
    *("multiprocessing", "onnxruntime", "os", "pathlib", "random", "secrets", "select", "shutil", "signal", "socket"),
    *("ssl", "subprocess", "tempfile", "time", "urllib.request", "uuid", "uvloop"),
}
IMPURE_CALLS = {"open", "print", "input"}
IMPURE_METHODS = {"now", "utcnow", "today", "default_rng", "fromfile", "tofile", "memmap", "Thread", "Timer"}

EVENT_LOOP = {"asyncio", "aiohttp", "uvloop"}
EVENT_LOOP_USERS = {
    *("embedding", "telemetry", "recall", "ingest", "access", "receipts", "admin", "proxy", "daemon", "demo", "cli"),
}

DISK_MODULES = {"os", "fcntl", "io", "mmap", "shutil", "tempfile", "glob"}
DISK_METHODS = {
    *("read_bytes", "read_text", "write_bytes", "write_text", "touch", "unlink", "mkdir", "rmdir", "rename", "iterdir"),
    *("glob", "rglob", "stat", "exists", "is_file", "is_dir", "fromfile", "tofile", "memmap"),
}
DISK_SEAM = {"store.disk"}

TASK_STARTER = "telemetry.tasks"
VAGUE = {"util", "utils", "helper", "helpers", "manager", "managers", "core", "common", "misc"}


class Module:
    """One file of the package, parsed."""

    def __init__(self, path: Path) -> None:
        parts = path.relative_to(ROOT / "memd").with_suffix("").parts
        self.path = path
        self.name = ".".join(part for part in parts if part != "__init__")
        """Without the leading `memd.`: `store.log`; empty for the package itself."""
        self.unit = parts[0] if parts != ("__init__",) else ""
        self.text = path.read_text()

    @cached_property  # whoever only collects the tests, as each worker does, parses nothing
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def _type_only(self) -> set[int]:
        tests = ((node, node.test) for node in self.nodes if isinstance(node, ast.If))
        of_types = (node for node, test in tests if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING")
        return {id(inner) for node in of_types for inner in ast.walk(node)}

    def imports(self, *, when_run: bool = False) -> Iterator[str]:
        """Absolute names; `from a import b` gives both `a` and `a.b`, as `b` may be a module.

        `when_run` leaves out what only the type checker imports.
        """
        for node in self.nodes:
            if when_run and id(node) in self._type_only:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name} imports relatively"
                yield node.module or ""
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def calls(self, names: set[str] | None = None) -> Iterator[tuple[str, str, int]]:
        """Receiver (source text, empty for a plain name), name and line of every call, or of those of some names."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if names is None or node.func.attr in names:
                    yield ast.unparse(node.func.value), node.func.attr, node.lineno
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                yield "", node.func.id, node.lineno


MODULES = [Module(path) for path in sorted((ROOT / "memd").rglob("*.py"))]
NAMES = {module.name for module in MODULES}


def is_in(module: Module, places: set[str]) -> bool:
    """Whether the module is one of these, or below one of these folders."""
    return any(module.name == place or module.name.startswith(place + ".") for place in places)


def imported_modules(module: Module, *, when_run: bool = False) -> set[str]:
    """The modules of memd that this one imports, also inside functions."""
    imported = module.imports(when_run=when_run)
    own = {name.removeprefix("memd").lstrip(".") for name in imported if re.match(r"memd(\.|$)", name)}
    return {name for name in own if name in NAMES} - {module.name}


def test_imports_point_one_way() -> None:
    for module in MODULES:
        units = {name.partition(".")[0] for name in imported_modules(module)} - {"", module.unit}
        assert module.unit or not units, "the package itself imports nothing of its own"
        assert not module.unit or module.unit in MAY_IMPORT, f"say in MAY_IMPORT what memd.{module.unit} may import"
        assert not module.unit or units <= MAY_IMPORT[module.unit], module.name


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({module.name: imported_modules(module, when_run=True) for module in MODULES}).prepare()
    except CycleError as circle:
        pytest.fail(" → ".join(circle.args[1]))


def test_what_is_pure_does_no_io_and_knows_neither_clock_nor_chance() -> None:
    pure = [module for module in MODULES if is_in(module, PURE)]
    assert {place for place in PURE if not any(is_in(module, {place}) for module in pure)} == set()
    for module in pure:
        imported = set(module.imports())
        impure = {name for name in imported if name in IMPURE_MODULES or name.partition(".")[0] in IMPURE_MODULES}
        assert not impure, f"{module.name} imports {impure}"
        for receiver, name, line in module.calls():
            called = name in IMPURE_METHODS if receiver else name in IMPURE_CALLS
            assert not called and ".random" not in receiver, f"{module.name}:{line}: {receiver}.{name}()"


def test_wire_store_and_conversation_know_no_event_loop() -> None:
    for module in MODULES:
        if module.unit not in EVENT_LOOP_USERS:
            used = {name.partition(".")[0] for name in module.imports()} & EVENT_LOOP
            assert not used, f"{module.name} uses {used}"


def test_the_store_touches_the_disk_in_one_place() -> None:
    for module in MODULES:
        if module.unit != "store" or module.name in DISK_SEAM:
            continue
        used = {name.partition(".")[0] for name in module.imports()} & DISK_MODULES
        assert not used, f"{module.name} imports {used}"
        for receiver, name, line in module.calls(DISK_METHODS):
            through_seam = receiver.endswith("files")
            touches_disk = name == "open" if not receiver else name in DISK_METHODS and not through_seam
            assert not touches_disk, f"{module.name}:{line}: {receiver}.{name}() goes around {DISK_SEAM}"


def test_tasks_are_started_where_somebody_holds_on_to_them() -> None:
    # The event loop keeps only a weak reference: a bare task can vanish in mid-flight, and its exception unseen.
    for module in MODULES:
        if module.name == TASK_STARTER:
            continue
        for receiver, name, line in module.calls({"create_task", "ensure_future"}):
            bare = name in {"create_task", "ensure_future"} and (not receiver or re.search(r"asyncio|loop", receiver))
            assert not bare, f"{module.name}:{line}: start it through memd.{TASK_STARTER}"


def test_names_say_what_a_thing_is() -> None:
    for module in MODULES:
        assert not set(module.name.split(".")) & VAGUE
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                assert not re.search(r"(Manager|Helper|Util|Utils)$", node.name), f"{module.name}: {node.name}"


def test_a_class_name_means_one_thing() -> None:
    names = [node.name for module in MODULES for node in module.nodes if isinstance(node, ast.ClassDef)]
    assert not sorted({name for name in names if names.count(name) > 1})


def test_docstrings_name_the_thing_and_do_not_open_with_what() -> None:
    strings = [
        (module.name, node.value.value)
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    riddles = [f"{name}: {text.splitlines()[0]}" for name, text in strings if text.startswith("What ")]
    assert not riddles, "\n".join(riddles)


def test_a_module_opens_with_what_it_is_for_and_its_rule() -> None:
    for module in MODULES:
        docstring = ast.get_docstring(module.tree)
        assert docstring, f"{module.path} has no docstring"
        is_folder = module.path.name == "__init__.py"
        assert is_folder or re.search(r"\bRules?\b", docstring), f"{module.name} does not state its rule"


def texts() -> Iterator[Path]:
    """The text files that people read, without what tools wrote."""
    for folder in ("memd", "tests", "docs", "bench", "clients", "packaging", ".ci"):
        yield from (ROOT / folder).rglob("*")
    yield from (path for path in ROOT.glob("*.*") if path.name != ".git")  # a worktree's is a file with its place
    yield ROOT / "Makefile"


def written() -> Iterator[tuple[Path, bytes]]:
    """What people wrote, not what was installed or made by tools."""
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".ts", ".txt", ".sh", ".svg", ".service", ".plist", ""}
    generated = {"node_modules", "__pycache__", "dist"}
    for path in texts():
        if path.is_file() and path.suffix in suffixes and not generated & set(path.parts):
            yield path.relative_to(ROOT), path.read_bytes()


def test_nothing_is_tied_to_the_machine_it_was_written_on() -> None:
    machine = re.compile(rb"(?<![\w.~-])/(?:wo" + rb"rk|ro" + rb"ot|home/[a-z]+)/")
    for path, data in written():
        found = machine.search(data)
        assert not found, f"{path} names {found and found.group().decode()}"


def test_a_test_that_starts_a_process_without_saying_so_fails() -> None:
    with pytest.raises(AssertionError, match=r"mark it with pytest\.mark\.process"):
        subprocess.run(["true"], check=True)
    with pytest.raises(AssertionError, match=r"mark it with pytest\.mark\.process"):
        forked_memd.run(["python", "-m", "memd", "--help"], {})


def test_no_import_changes_the_environment_so_that_every_daemon_of_the_tests_would_start_anew() -> None:
    __import__("memd.daemon.app")
    assert forked_memd.can_fork(clean_environment())


def test_no_merge_was_left_half_done() -> None:
    marks = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
    assert not [path for path, data in written() if marks.search(data)]
