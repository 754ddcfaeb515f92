"""A pytest plugin for runs of llama.cpp's server tests: which ones run, and what became of each, as a file.

Rule: it runs among tests that are not ours, so it changes nothing in them. Only what they do before the first of them,
which is to download all models by starting a server with each, is left out where there is nothing to download.
"""

import importlib
import json
import os
from pathlib import Path

import pytest

REPORT = "LLAMACPP_REPORT"
"""Environment variable: the file that gets a line of JSON for each test."""
ONLY = "LLAMACPP_ONLY"
"""Environment variable: a JSON file with the ids of the tests that run; all do where it is not set."""

NO_DOWNLOADS = "LLAMACPP_NO_DOWNLOADS"
"""Environment variable: set if the models are there already."""


def pytest_sessionstart() -> None:
    """Here the tests' own modules can be imported."""
    if NO_DOWNLOADS in os.environ:
        importlib.import_module("utils").ServerPreset.load_all = staticmethod(lambda: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for."""
    if ONLY in os.environ:
        wanted = set(json.loads(Path(os.environ[ONLY]).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what a test came to; a test that fails and then fails to clean up writes twice."""
    if report.when == "call" or report.outcome != "passed":
        lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        entry = {"id": report.nodeid, "outcome": report.outcome, "reason": (lines or [""])[0]}
        with Path(os.environ[REPORT]).open("a") as file:
            file.write(json.dumps(entry) + "\n")
