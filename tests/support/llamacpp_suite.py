"""llama.cpp's own server tests, run against memd: what passes directly must pass through memd.

Rule: the tests are llama.cpp's, unchanged, and memd is as anybody starts it, with memory on. They run twice: against
llama-server, and against llama-server behind memd. What passes the first time and not the second is a fault of memd,
unless `PURPOSE` says why it is what memd is for.

    python tests/support/llamacpp_suite.py [unit/test_basic.py ...] [-k EXPRESSION]
        [--server PROGRAM] [--source FOLDER] [--real-models]

Without a llama-server the one from `llamacpp_binary` is used, without a checkout of llama.cpp the tests come from
`llamacpp_sources`, and the models that the tests download are replaced by those of `llamacpp_models`.
"""

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import llamacpp_binary
import llamacpp_models
import llamacpp_report
import llamacpp_sources

TEST_SECONDS_MAX = 120
PORTS = 40  # from the first one on; the tests count up where they start a second server
HERE = Path(__file__).parent
TESTS = Path("tools", "server", "tests")

Way = Literal["directly", "through memd"]

_FITS = "the messages that do not fit into the window leave the prompt: that is what memd is for"
PURPOSE: dict[str, str] = {
    "unit/test_basic.py::test_server_multiple_addresses": "the address is memd's own, and memd listens on one",
    "unit/test_chat_completion.py::test_chat_completion_cached_tokens": (
        "it counts the tokens of one conversation after another, and what was said in one is recalled in the next"
    ),
    "unit/test_chat_completion.py::test_context_size_exceeded": _FITS,
    "unit/test_chat_completion.py::test_context_size_exceeded_stream": _FITS,
}
"""Test → why it cannot pass through memd, and should not."""


@dataclass(frozen=True)
class Outcome:
    """What one test came to."""

    result: str
    reason: str


@dataclass(frozen=True)
class Setting:
    """What the tests are, and what they run against.

    Attributes:
        tests: llama.cpp's folder `tools/server/tests`.
        server: The program `llama-server`.
        real_models: Whether the tests download their models; else they get stand-ins.
        select: What pytest is called with to select tests.
    """

    tests: Path
    server: Path
    real_models: bool
    select: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Both ways side by side; the keys are the tests' ids."""

    directly: Mapping[str, Outcome]
    through_memd: Mapping[str, Outcome]

    def passed_directly(self) -> list[str]:
        return [test for test, outcome in self.directly.items() if outcome.result == "passed"]

    def lost(self) -> list[str]:
        """What passes directly and not through memd."""
        return [test for test in self.passed_directly() if self.of(test).result != "passed"]

    def faults(self) -> list[str]:
        """What of that is not memd's purpose."""
        return [test for test in self.lost() if test not in PURPOSE]

    def of(self, test: str) -> Outcome:
        """What the test came to through memd."""
        return self.through_memd.get(test, Outcome("missing", "it did not run"))

    def table(self) -> str:
        """Per file: tests, passed directly, of these passed through memd."""
        lines = [f"{'':34}{'tests':>8}{'directly':>10}{'of these through memd':>24}"]
        files = sorted({_file(test) for test in self.directly})
        for file in [*files, ""]:
            ran = [test for test in self.directly if _file(test) == file or not file]
            passed = [test for test in ran if self.directly[test].result == "passed"]
            kept = [test for test in passed if self.of(test).result == "passed"]
            lines.append(f"{file or 'together':34}{len(ran):8}{len(passed):10}{len(kept):24}")
        return "\n".join(lines)


def _file(test: str) -> str:
    return Path(test.partition("::")[0]).stem


def compare(setting: Setting) -> Comparison:
    """Run the tests both ways; what was lost on the way through memd runs both ways once more, alone.

    Raises:
        llamacpp_binary.CannotBuild: if there is no server to test with.
    """
    directly = _run(setting, "directly", None)
    passed = [test for test, outcome in directly.items() if outcome.result == "passed"]
    first = Comparison(directly, _run(setting, "through memd", passed) if passed else {})
    if not first.lost():
        return first
    again = {way: _run(setting, way, first.lost()) for way in ("directly", "through memd")}
    return Comparison({**directly, **again["directly"]}, {**first.through_memd, **again["through memd"]})


def _run(setting: Setting, way: Way, only: Sequence[str] | None) -> dict[str, Outcome]:
    """Run the tests one way, in a copy of their folder, and give what became of each."""
    print(f"\n{way}:", flush=True)
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        tests = folder / TESTS
        shutil.copytree(setting.tests, tests, ignore=shutil.ignore_patterns("tmp", "__pycache__"))
        (tests / "tmp").mkdir()
        (folder / "models").mkdir()
        (folder / "models" / "templates").symlink_to(setting.tests.parents[2] / "models" / "templates")
        report = folder / "report"
        report.touch()
        environment = _environment(setting, way, folder)
        environment[llamacpp_report.REPORT] = str(report)
        if only is not None:
            (folder / "only").write_text(json.dumps(only))
            environment[llamacpp_report.ONLY] = str(folder / "only")
        options = ["-q", "--tb=no", "--no-header", "--no-summary", "-p", "llamacpp_report", "-p", "no:cacheprovider"]
        options += ["-p", "no:asyncio", f"--timeout={TEST_SECONDS_MAX}", "-m", "not slow", *setting.select]
        subprocess.run([sys.executable, "-m", "pytest", *options], cwd=tests, env=environment, check=False)
        return _outcomes(report.read_text().splitlines())


def _outcomes(lines: Iterable[str]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for entry in map(json.loads, lines):
        if outcomes.get(entry["id"], Outcome("passed", "")).result == "passed":
            outcomes[entry["id"]] = Outcome(entry["outcome"], entry["reason"])
    return outcomes


def _environment(setting: Setting, way: Way, folder: Path) -> dict[str, str]:
    """What the tests find in their environment: where the server is, and stand-ins for the models."""
    command = [str(setting.server)]
    if way == "through memd":
        command = [sys.executable, str(HERE / "llamacpp_proxied.py"), *command]
    if not setting.real_models:
        command.append("--offline")
        llamacpp_models.write_hub(folder / "hub")
        llamacpp_models.write_downloads(folder / TESTS / "tmp")
    program = folder / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MEMD_", "PYTEST_", "LLAMA_"))},
        **({} if setting.real_models else {"LLAMA_CACHE": str(folder / "hub"), llamacpp_report.NO_DOWNLOADS: "1"}),
        "LLAMA_ARG_THREADS": "1",  # several wait for each other by turning, which takes a core from memd
        "LLAMA_SERVER_BIN_PATH": str(program),
        "PORT": str(_free_ports()),
        "PYTHONPATH": str(HERE),
    }


def _free_ports() -> int:
    """The first of so many free ports."""
    for first in range(18_080, 60_000, PORTS):
        try:
            for port in range(first, first + PORTS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise OSError(f"there are no {PORTS} free ports in a row; end what listens on so many")


def main() -> int:
    """The command; its exit code is 1 if something is lost on the way through memd that should not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=["unit"], help="which of the tests, as pytest takes them")
    parser.add_argument("-k", metavar="EXPRESSION", help="which of the tests, as pytest's -k")
    parser.add_argument("--server", type=Path, metavar="PROGRAM", help="a llama-server, instead of the one built here")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="a checkout of llama.cpp, for other tests")
    parser.add_argument("--real-models", action="store_true", help="let the tests download their models")
    asked = parser.parse_args()
    tests = asked.source / TESTS if asked.source else llamacpp_sources.server_tests()
    if tests is None or not tests.is_dir():
        where = tests or llamacpp_sources.folder()
        sys.exit(f"there are no server tests in {where}; without --source `make llama-tests` fetches them")
    try:
        server = asked.server.resolve() if asked.server else llamacpp_binary.build()
    except llamacpp_binary.CannotBuild as why:
        sys.exit(str(why))
    select = (*asked.files, *(["-k", asked.k] if asked.k else []))
    found = compare(Setting(tests.resolve(), server, asked.real_models, select))
    _print(found)
    if not found.passed_directly():
        sys.exit("nothing passed directly, so nothing was compared; what pytest said stands above")
    return 1 if found.faults() else 0


def _print(found: Comparison) -> None:
    print(f"\n{found.table()}")
    for title, tests in (
        ("Lost through memd, on purpose", [test for test in found.lost() if test in PURPOSE]),
        ("LOST THROUGH MEMD", found.faults()),
    ):
        if tests:
            print(f"\n{title}:")
        for test in tests:
            print(f"  {test}\n      {found.of(test).reason}")
            if test in PURPOSE:
                print(f"      because: {PURPOSE[test]}")


if __name__ == "__main__":
    sys.exit(main())
