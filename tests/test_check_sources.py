"""`memd check` tells of each folder in `sources` whether it can be read, and how much is in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from memd.cli.check import settings as checked
from memd.cli.check.report import outcomes
from memd.cli.check.result import CheckResult

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens


def told(tmp_path: Path, *sources: object) -> list[CheckResult]:
    settings = {"listen": {"port": 0}, "upstream": {"url": NOWHERE}, "sources": list(sources)}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return [one for one in outcomes(file, {}, {}, live=False) if one.check == "sources"]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    (folder / "build").mkdir(parents=True)
    for name in ("a.md", "b.md", "build/c.md", "picture.png"):
        (folder / name).write_text("text")
    return folder


def test_a_source_is_told_with_its_files_and_its_topic(docs: Path, tmp_path: Path) -> None:
    [one] = told(tmp_path, {"path": str(docs), "topic": "auto", "exclude": ["build"]})
    assert (one.mark, one.said) == ("ok", f"{docs}: 2 files for topic docs")


def test_no_source_is_no_line(tmp_path: Path) -> None:
    assert told(tmp_path) == []


def test_a_folder_that_is_missing_or_without_a_file_that_memd_reads_is_a_warning(docs: Path, tmp_path: Path) -> None:
    missing, useless = told(tmp_path, str(tmp_path / "gone"), {"path": str(docs), "formats": ["pdf"]})
    assert missing.mark == useless.mark == "warning"
    assert missing.said.startswith(f"{tmp_path}/gone cannot be read (No such file or directory); ")
    assert useless.said == f"{docs}: 0 files for topic default" and "formats" in useless.remedy


def test_what_this_user_may_not_read_is_named(docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).endswith("b.md"))  # root may read everything
    [one] = told(tmp_path, str(docs))
    assert one.mark == "warning" and one.said.endswith("; 1 path in it cannot be read: b.md (no right to read it)")


def test_a_huge_source_is_not_counted_to_its_end(docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "FILES_COUNTED_MAX", 2)
    [one] = told(tmp_path, str(docs))
    assert (one.mark, one.said) == ("ok", f"{docs}: more than 2 files for topic default")
