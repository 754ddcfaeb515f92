"""The audit's chain says which line is missing, changed, moved or put in; a head that was kept says the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError

from memd.store.audit import Act, AuditBook, Checked, Head, KnownHead, encoded, head_from, read_book
from memd.store.disk import LocalDisk
from memd.store.layout import AuditLayout

NOVEMBER, DECEMBER, JANUARY = (
    int(datetime(*day, tzinfo=UTC).timestamp() * 1e6) for day in ((2026, 11, 5), (2026, 12, 5), (2027, 1, 5))
)


def act(number: int, at: int = NOVEMBER) -> Act:
    return Act(at=at + number, act="search", who="ann", source="10.0.0.7", topics=("work",), count=number)


def read(data_dir: Path, *known: KnownHead) -> Checked:
    found = read_book(LocalDisk(), data_dir, lambda _: True, known)
    assert found is not None
    return found


@pytest.fixture
def month(tmp_path: Path) -> Path:
    """A file with lines 1 (its beginning) to 7."""
    AuditBook(LocalDisk(), tmp_path).append([act(number) for number in range(2, 8)])
    return tmp_path / "memd.audit" / "2026-11.jsonl"


def _hash(line: bytes) -> str:
    return line.split(b'"hash":"')[1][:64].decode()


def _forged(lines: list[bytes]) -> bytes:
    """A line that follows the third."""
    return encoded(act(99), Head(3, _hash(lines[2])))[0]


Lines = list[bytes]
AMONG_TWO = "there is another line 4: one of the two was put in"
TAMPERED: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "removed": (lambda ls: ls[:3] + ls[4:], "4: line 4 is missing before it"),
    "three removed": (lambda ls: ls[:2] + ls[5:], "3: lines 3 to 5 are missing before it"),
    "first removed": (lambda ls: ls[1:], "1: line 1 is missing before it"),
    "changed": (
        lambda ls: [*ls[:3], ls[3].replace(b'"ann"', b'"bob"'), *ls[4:]],
        "4: line 4 does not follow line 3: one of the two was changed",
    ),
    "changed with its hash": (
        lambda ls: [*ls[:3], _forged(ls), *ls[4:]],
        "5: line 5 does not follow line 4: one of the two was changed",
    ),
    "first changed": (lambda ls: [ls[0].replace(b'"memd"', b'"root"'), *ls[1:]], "1: line 1 was changed"),
    "swapped": (lambda ls: [*ls[:3], ls[4], ls[3], *ls[5:]], "5: line 4 stands behind line 5"),
    "put in": (lambda ls: [*ls[:3], _forged(ls), *ls[3:]], f"5: {AMONG_TWO}"),
    "doubled": (lambda ls: [*ls[:4], ls[3], *ls[4:]], f"5: {AMONG_TWO}"),
    "emptied": (lambda ls: [*ls[:3], b"{}\n", *ls[4:]], "4 cannot be read"),
    "rubbish put in": (lambda ls: [*ls[:3], b"\xff\x00\n", *ls[3:]], "4 cannot be read"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_line_is_named(month: Path, name: str) -> None:
    tamper, says = TAMPERED[name]
    month.write_bytes(b"".join(tamper(month.read_bytes().splitlines(keepends=True))))
    assert read(month.parent.parent).findings == (f"2026-11.jsonl:{says}",), "one deed is one finding"


def test_the_end_is_missed_by_whoever_kept_the_head(month: Path) -> None:
    data_dir = month.parent.parent
    head = AuditBook(LocalDisk(), data_dir).append([act(8)])
    whole = month.read_bytes()
    month.write_bytes(b"".join(whole.splitlines(keepends=True)[:6]))
    assert read(data_dir).findings == (), "the rest hangs together: by itself a chain does not show a cut end"
    kept = KnownHead(head_from(f"{head}\n"), "the note of Monday")
    assert read(data_dir, kept).findings == ("lines 7 to 8 are missing at the end: the note of Monday has line 8",)
    month.write_bytes(whole)
    assert read(data_dir, kept).findings == ()


def test_what_was_written_anew_is_not_what_the_kept_head_says(month: Path) -> None:
    data_dir = month.parent.parent
    kept = KnownHead(read(data_dir).head, "the backup")
    lines = month.read_bytes().splitlines(keepends=True)
    head = Head(3, _hash(lines[2]))
    forged = []
    for number in range(40, 44):
        line, head = encoded(act(number), head)
        forged.append(line)
    month.write_bytes(b"".join([*lines[:3], *forged]))
    assert read(data_dir).findings == ()
    [said] = read(data_dir, kept).findings
    assert said == "line 7 is not the one that the backup has: what stands before it was written anew"


def test_the_kept_head_of_the_folder_shows_a_cut_end_and_the_gap_stays(month: Path) -> None:
    data_dir = month.parent.parent
    AuditBook(LocalDisk(), data_dir).keep_head()
    month.write_bytes(b"".join(month.read_bytes().splitlines(keepends=True)[:5]))
    [said] = read(data_dir).findings
    assert said == f"lines 6 to 7 are missing at the end: {AuditLayout(data_dir).head} has line 7"
    AuditBook(LocalDisk(), data_dir).append([act(8)])
    found = read(data_dir)
    assert found.findings == ("2026-11.jsonl:6: lines 6 to 7 are missing before it",)
    assert found.head.n == 8


def test_old_months_are_removed_as_the_settings_say_and_that_is_no_gap(tmp_path: Path) -> None:
    for at in (NOVEMBER, DECEMBER, JANUARY):
        AuditBook(LocalDisk(), tmp_path, keep_months=2).append([act(1, at)])
    assert AuditLayout(tmp_path).names(LocalDisk()) == ["2026-12.jsonl", "2027-01.jsonl"]
    found = read(tmp_path)
    assert found.findings == ()
    assert found.notices == ("lines 1 to 2 are not kept any more (audit.keep_months)",)
    assert [one.upto for _, one in found.acts if one.act == "removed"] == [2]


def test_a_line_that_was_not_finished_is_taken_out_and_a_line_says_so(month: Path) -> None:
    data_dir = month.parent.parent
    with month.open("ab") as file:
        file.write(b'{"n":8,"at":17')
    found = read(data_dir)
    assert (found.findings, found.notices) == (
        (),
        ("the last 14 bytes of 2026-11.jsonl are of a line that was not finished",),
    )
    AuditBook(LocalDisk(), data_dir).append([act(9)])
    found = read(data_dir)
    assert (found.findings, found.notices) == ((), ())
    assert [(n, one.act, one.count) for n, one in found.acts[-2:]] == [(8, "recovered", 14), (9, "search", 9)]


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_a_power_cut_leaves_what_was_appended_is_there_and_the_chain_is_whole(loss: Loss) -> None:
    for cut_after in range(40):
        files = CrashFiles()
        files.make_directory(Path("/data"))
        files.sync_directory(Path("/"))
        files.cut_after = files.operations + cut_after
        acknowledged = 0
        try:
            book = AuditBook(files, Path("/data"))
            for number, at in enumerate((NOVEMBER, NOVEMBER, DECEMBER, DECEMBER), 1):
                book.append([act(number, at), act(number, at)])
                acknowledged = number
                book.keep_head()
        except PowerCutError:
            pass
        again = files.after_power_cut(loss)
        AuditBook(again, Path("/data")).append([act(9, DECEMBER)])
        found = read_book(again, Path("/data"), lambda one: one.act == "search")
        assert found is not None and found.findings == (), f"after {cut_after}: {found}"
        kept = {one.count for _, one in found.acts}
        assert kept >= {*range(1, acknowledged + 1), 9}, f"after {cut_after}"


def test_several_processes_append_to_one_chain(tmp_path: Path) -> None:
    books = [AuditBook(LocalDisk(), tmp_path) for _ in range(3)]  # each knows nothing of what the others do

    def work(book: AuditBook) -> None:
        for number in range(10):
            book.append([act(number)])

    threads = [threading.Thread(target=work, args=(book,)) for book in books]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(tmp_path)
    assert found.findings == () and found.head.n == 31
