"""Documents: files that are added, found with where they are from, and added again for no more than what changed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from archiver_stage import Stage, live_entries
from conftest import MakeDaemon
from daemon_process import DaemonProcess
from recording_upstream import RecordingUpstream

from memd.documents import GivenDocument, GivenSection
from memd.entries import Draft
from memd.errors import BadDocument, EmbeddingError
from memd.ingest.pipeline import Drafter
from memd.ingest.sources.documents import drafts_of, known_documents, removal_of
from memd.ingest.sources.reading import FILE_BYTES_MAX, sections_of
from memd.ingest.sources.walking import files_of, is_excluded
from memd.ingest.topics import Topic
from memd.settings.model import Config

GUIDE = """Everybody here.

# Leave

Twenty-six days a year.

Sick
----

```sh
# no heading
call Marta
```

# Pay

On the 25th.
"""


# -- reading ----------------------------------------------------------------------------------------------------------


def test_markdown_is_cut_at_its_headings_and_code_is_none() -> None:
    assert [(section.heading, section.text) for section in sections_of("guide.md", GUIDE.encode())] == [
        ((), "Everybody here."),
        (("Leave",), "Twenty-six days a year."),
        (("Leave", "Sick"), "```sh\n# no heading\ncall Marta\n```"),
        (("Pay",), "On the 25th."),
    ]
    assert sections_of("guide.txt", b"\xef\xbb\xbf# one\n") == (GivenSection((), "# one\n"),)
    assert sections_of("empty.md", b" \n") == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"%PDF-1.7\0", "is no text"), (b"a\xff", "no UTF-8 text (byte 1)"), (b"x" * (FILE_BYTES_MAX + 1), "2,000,001")],
)
def test_what_is_no_text_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(BadDocument) as refused:
        sections_of("a.md", content)
    assert reason in str(refused.value)


def test_a_line_of_markdown_ends_where_markdown_ends_it() -> None:
    text = "# One\r\nfirst\x0cpage\u2028more\ralpha\n# Two\nbasil\n"
    assert [(section.heading, section.text) for section in sections_of("a.md", text.encode())] == [
        (("One",), "first\x0cpage\u2028more\ralpha"),
        (("Two",), "basil"),
    ]


def test_markdown_is_read_in_time_that_grows_with_its_length() -> None:
    began = time.thread_time()
    (section,) = sections_of("a.md", b"# [a]\n" + b"[" * 500_000)
    assert section.heading == ("[a]",) and time.thread_time() - began < 5  # else half a minute


def written(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return folder


def test_files_are_found_by_their_kind_without_what_is_hidden_excluded_ignored_or_elsewhere(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "elsewhere", "secret.md")
    root = written(
        tmp_path / "root", "b.md", "a/c.py", "a/d.bin", ".git/config.txt", "build/x.md", "rebuild/y.md", "a/keep.log",
        "a/drop.log", "README", "a/build/z.md",
    )  # fmt: skip
    (root / ".gitignore").write_text("*.log\n!keep.log\n")
    (root / "out.md").symlink_to(elsewhere / "secret.md")
    (root / "folder").symlink_to(elsewhere)
    (root / "in.md").symlink_to(root / "b.md")
    (root / "sly.md").symlink_to(root / "build" / "x.md")
    (root / "circle.md").symlink_to(root / "circle.md")
    found = [file.source for file in files_of(root, "docs", ["build"])]
    assert found == ["docs/README", "docs/a/c.py", "docs/a/keep.log", "docs/b.md", "docs/in.md", "docs/rebuild/y.md"]


@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_a_line_that_git_cannot_read_is_no_rule(tmp_path: Path) -> None:
    root = written(tmp_path, "a.md", "b.log")
    (root / ".gitignore").write_text("!\n\\\n[z-a]\n*.log\n")
    assert [file.source for file in files_of(root, "docs")] == ["docs/a.md"]


@pytest.mark.parametrize(
    ("path", "exclusion", "excluded"),
    [
        ("a/build/x.md", "build", True),
        ("a/rebuild/x.md", "build", False),
        ("a/build/x.md", "a/build/", True),
        ("a/x/build", "a/build", False),
        ("a/x.tmp", "*.tmp", True),
        ("build.md", "build", False),
    ],
)
def test_an_exclusion_matches_whole_components(path: str, exclusion: str, excluded: bool) -> None:
    assert is_excluded(path, [exclusion]) is excluded


# -- what changed -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(Config())
    yield stage
    await stage.close()


@pytest.fixture
async def topic(stage: Stage) -> Topic:
    return await stage.topics.get("talk")


async def taken(stage: Stage, topic: Topic, texts: Sequence[str], source: str = "docs/a.md", **more: str) -> list[str]:
    """Take a document of these sections; returns the texts that were embedded for it."""
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    sections = tuple(GivenSection(("Rows",), text) for text in texts)
    document = GivenDocument(source=source, hash=digest, sections=sections, **more)

    def make(drafter: Drafter) -> list[Draft]:
        return drafts_of(topic.log, document, drafter.cutter, drafter.embed_many, stage.encoder.fingerprint)

    before = len(stage.embedder.texts)
    await stage.archiver.append_drafts(topic, make)
    return stage.embedder.texts[before:]


def contents(topic: Topic) -> list[str]:
    return sorted(entry.content for entry in live_entries(topic))


def hash_of(topic: Topic) -> dict[str, str]:
    return {one.source: one.hash for one in known_documents(topic.log.snapshot())}


async def test_one_changed_line_of_500_costs_one_vector_and_takes_the_place_of_the_old_one(
    stage: Stage, topic: Topic
) -> None:
    rows = [f"Row {number} of the table." for number in range(500)]
    assert len(await taken(stage, topic, rows)) == 500
    assert await taken(stage, topic, rows) == []
    entries = topic.log.snapshot().extent.entries
    (old,) = (entry for entry in live_entries(topic) if entry.content == rows[250])
    changed = [*rows[:250], "Row 250 was wrong.", *rows[251:]]
    assert await taken(stage, topic, changed) == ["Rows\nRow 250 was wrong."]
    assert topic.log.snapshot().extent.entries == entries + 2
    (new,) = (entry for entry in live_entries(topic) if entry.content == "Row 250 was wrong.")
    assert (new.supersedes, new.reason, new.kind, new.source) == ((old.uuid,), "file changed", "document", "docs/a.md")
    assert contents(topic) == sorted(changed)


async def test_a_file_that_goes_back_to_what_it_was_is_whole_again_for_no_vector(stage: Stage, topic: Topic) -> None:
    rows = ["One.", "Two.", "Three."]
    await taken(stage, topic, rows)
    first = hash_of(topic)
    assert await taken(stage, topic, rows[:2]) == []
    assert contents(topic) == ["One.", "Two."] and hash_of(topic) != first, "it is told from the file with three"
    assert await taken(stage, topic, rows) == ["Rows\nThree."]
    assert contents(topic) == sorted(rows) and hash_of(topic) == first
    assert await taken(stage, topic, ["Two.", "One.", "Three."]) == [], "what only moved keeps its vector"
    assert len(contents(topic)) == 3


async def test_a_renamed_file_needs_no_vector_and_a_removed_one_is_taken_out(stage: Stage, topic: Topic) -> None:
    await taken(stage, topic, ["One.", "Two."])
    assert await taken(stage, topic, ["One.", "Two."], "docs/b.md", renamed_from="docs/a.md") == []
    assert {entry.source for entry in live_entries(topic)} == {"docs/b.md"} and contents(topic) == ["One.", "Two."]
    await stage.archiver.append_drafts(topic, lambda _: removal_of(topic.log, "docs/b.md"))
    assert contents(topic) == [] and hash_of(topic) == {}


async def test_a_document_whose_vectors_fail_is_left_as_it_was(stage: Stage, topic: Topic) -> None:
    await taken(stage, topic, ["One.", "Two."])
    stage.embedder.fails = True
    with pytest.raises(EmbeddingError):
        await taken(stage, topic, ["One.", "Three."])
    assert contents(topic) == ["One.", "Two."]


# -- as a user does it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [True, False])
def test_a_folder_is_added_found_added_again_renamed_and_taken_out(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path, runs: bool
) -> None:
    daemon = make_daemon(upstream.url)
    if runs:
        daemon.start()
    docs = tmp_path / "handbook"
    docs.mkdir()
    (docs / "guide.md").write_text(GUIDE)
    (docs / "tool.py").write_text("def lamp() -> str:\n    return 'second landing'\n")
    (docs / "photo.txt").write_bytes(b"\x89PNG\0")
    first = daemon.run("add", str(docs))
    assert first.returncode == 1 and "handbook/photo.txt: left out: it is no text" in first.stdout
    assert "topic default: 3 files read, 0 of them unchanged; 5 chunks written, 0 taken out" in first.stdout
    (docs / "photo.txt").unlink()
    assert said(daemon, "add", str(docs)).endswith("2 of them unchanged; 0 chunks written, 0 taken out\n")
    shown = said(daemon, "search", "When is pay day?", "--kind", "document")
    assert "document, Pay, handbook/guide.md" in shown and "On the 25th." in shown
    nowhere = daemon.run("search", "When is pay day?", "--tag", "nowhere")
    assert nowhere.returncode == 1 and "of what was chosen" in nowhere.stdout
    if runs:
        daemon.chat([{"role": "user", "content": "On which day of the month is pay day?"}])
        assert "(handbook/guide.md, Pay) On the 25th." in upstream.prompts[-1]
    (docs / "guide.md").write_text(GUIDE.replace("25th", "27th"))
    (docs / "tool.py").rename(docs / "lamp.py")
    assert said(daemon, "add", str(docs)).endswith("0 of them unchanged; 2 chunks written, 2 taken out\n")
    listed = said(daemon, "sources")
    assert "handbook/lamp.py  1 chunk" in listed and "tool.py" not in listed and "2 documents, 5 chunks" in listed
    (docs / "lamp.py").unlink()
    assert said(daemon, "add", str(docs)).endswith("1 of them unchanged; 0 chunks written, 1 taken out\n")
    other = written(tmp_path / "other" / "handbook", "x.md")
    refused = daemon.run("add", str(other))
    assert refused.returncode == 2 and "another name (--as)" in refused.stderr
    assert "1 chunk written" in said(daemon, "add", str(other), "--as", "second")
    assert "1 document taken out" in said(daemon, "sources", "--remove", "handbook")
    assert "1 document, 1 chunk" in said(daemon, "sources")
    assert json.loads(said(daemon, "sources", "--json", "--remove", "second")) == {"documents": []}
    missing = daemon.run("sources", "--remove", "handbook")
    assert missing.returncode == 1 and "there is no document 'handbook'" in missing.stderr
    assert said(daemon, "verify")


def test_folders_of_one_name_are_not_added_in_place_of_each_other(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    one, other = (written(tmp_path / name / "docs", "index.md", f"{name}.md") for name in ("one", "other"))
    refused = make_daemon(upstream.url).run("add", str(one), str(other))
    assert refused.returncode == 2 and "several PATHs are called docs" in refused.stderr


def test_a_file_whose_name_is_redacted_is_not_taken_out_when_it_is_added_again(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    root = written(tmp_path / "bank", "DE89370400440532013000.md", "b.md")
    daemon = make_daemon(upstream.url, {"ingest": {"redact": True}}).start()
    assert "2 chunks written, 0 taken out" in said(daemon, "add", str(root))
    assert "0 chunks written, 0 taken out" in said(daemon, "add", str(root))
    (root / "DE89370400440532013000.md").write_text("another text")
    assert "1 chunk written, 1 taken out" in said(daemon, "add", str(root))
    assert "bank/[redacted:iban].md  1 chunk" in said(daemon, "sources")


def test_a_name_with_a_line_break_is_shown_on_one_line(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    root = written(tmp_path / "docs", "a\ndefault  b.md")
    daemon = make_daemon(upstream.url).start()
    assert "1 chunk written" in said(daemon, "add", str(root))
    assert "docs/a\\x0adefault  b.md  1 chunk" in said(daemon, "sources")
    assert "docs/a\\x0adefault  b.md" in said(daemon, "search", "text of a")


def said(daemon: DaemonProcess, *arguments: str) -> str:
    done = daemon.run(*arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout
