"""What terminals show that are narrow, or whose encoding lacks characters."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemon_process import DaemonProcess
from rich import box
from rich.console import Console
from rich.table import Table

from memd.cli.main import main, show_what_it_can
from memd.cli.operations import fitting

SAID = "Żółć: the “spare” key hangs behind the barometer… 気圧計"


def test_commands_show_what_is_stored_where_the_terminal_lacks_its_characters(served: DaemonProcess) -> None:
    served.chat([{"role": "user", "content": SAID}])
    served.wait_stored(SAID)
    for command in (["search", "spare key"], ["log"], ["turn"], ["digest"]):
        done = CliRunner(charset="latin-1").invoke(main, [*command, "--data-dir", str(served.data_dir)])
        assert done.exit_code == 0, done.output
        assert '?ó??: the "spare" key hangs' in done.stdout, done.stdout


def test_what_stands_in_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    (folder := tmp_path / "mine[bold]").mkdir()
    told = CliRunner().invoke(main, ["stats", "--data-dir", str(folder)])
    assert told.exit_code == 0 and folder.name in told.stdout


def test_a_character_that_an_encoding_lacks_is_shown_as_one_like_it_or_as_a_question_mark() -> None:
    terminal = io.TextIOWrapper(raw := io.BytesIO(), "ascii")
    show_what_it_can(terminal)
    print("██░ Żółć — it’s “so”…", file=terminal, flush=True)
    assert raw.getvalue() == b'##. ???? - it\'s "so"...\n'


def test_a_question_in_bytes_that_the_locale_cannot_read_is_asked_as_it_was_typed(served: DaemonProcess) -> None:
    """Python gives such arguments lone surrogates in place of the bytes."""
    served.chat([{"role": "user", "content": SAID}])
    served.wait_stored(SAID)
    typed = SAID.encode().decode("ascii", errors="surrogateescape")
    where = ["--data-dir", str(served.data_dir)]
    found = CliRunner().invoke(main, ["search", typed, *where])
    assert SAID in found.stdout, found.output
    [chunk] = served.export()
    refused = CliRunner().invoke(main, ["correct", chunk["id"], "--helpful", "--reason", typed, *where])
    assert refused.exit_code == 2 and "PYTHONUTF8=1" in refused.stderr, refused.output


@pytest.mark.parametrize("width", [200, 80, 60, 40, 18])
def test_no_cell_is_cut_on_a_narrow_terminal(width: int) -> None:
    ids = ["4054ebcf959a4014", "c3573531ecab40b5"]
    table = Table(box=box.SIMPLE_HEAD, title="/data", show_footer=True)
    table.add_column("id", "all", no_wrap=True)
    table.add_column("asked")
    for name in ("tokens", "ms"):
        table.add_column(name, "9,999", no_wrap=True, justify="right")
    for id_ in ids:
        table.add_row(id_, "Where does the spare key of the old house hang now?", "1,234", "21.9")
    console = Console(file=io.StringIO(), width=width)
    console.print(fitting(table, console))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    for word in [*ids, "spare", "hang", "1,234", "21.9", "9,999", "/data"]:
        assert word in shown.split() or f"{word}," in shown.split(), shown
    assert "…" not in shown
