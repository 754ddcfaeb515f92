"""What `memd import` makes of other programs' files: who said what, when, after what, and what is named as wrong.

The files in tests/exports have the shapes of the real ones; each reader's docstring says where those are described.
"""

import json
import re
import time
import zipfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from effort import SECONDS_MAX
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from memd.ingest.imports.exports import NO_PARENT, Dating, Node, Thread, thread_of
from memd.ingest.imports.files import NAMES, Found, files_of, format_in, found_in, items, read
from memd.ingest.imports.parts import stretches, topic_of_folder
from memd.messages import Message, stored_text

EXPORTS = Path(__file__).parent / "exports"


def found_at(path: Path, wanted: str | None = None) -> list[Found]:
    return [found for file in files_of([path]) for _, found in read(file, Dating(), wanted, lambda _: None)]


def threads_of(found: Iterable[Found]) -> list[Thread]:
    return [one.thread for one in found if one.thread is not None]


def problems_of(found: Iterable[Found]) -> list[str]:
    return [f"{one.place}: {one.problem}" for one in found if one.problem]


def spoken(thread: Thread) -> list[str]:
    """Each message as memd stores it, behind its role; `<n` where it follows message n and not the one before it."""
    lines = []
    for place, (message, parent) in enumerate(zip(thread.messages, thread.parents, strict=True)):
        jump = "" if parent == place - 1 else f"<{parent} "
        lines.append(f"{jump}{message.role}: {stored_text(message)}")
    return lines


def days(thread: Thread) -> list[str]:
    return [
        "" if one.said_at is UNSET else f"{datetime.fromtimestamp(one.said_at / 1e6, UTC):%Y-%m-%dT%H:%M:%S}"
        for one in thread.messages
    ]


def test_chatgpt() -> None:
    found = found_at(EXPORTS / "chatgpt.json")
    bowl, bread = threads_of(found)
    assert spoken(bowl) == [
        "user: [image]\nAt what cone do I fire the celadon bowl?\n[file: bowl.jpg]",
        'assistant: [call web.run search("celadon cone")]',
        "tool: Celadon: cone 9 to 10, reduction",
        "assistant: Cone 9, in reduction.",
        "user: And how long does it cool?",
        "<0 assistant: Fire it to cone 6.",
    ]
    assert bowl.source == "chatgpt:6b0f0d9c-0000-4000-8000-00000000000a"
    assert bowl.branches == 1
    assert days(bowl)[0] == "2025-08-24T01:46:41"
    assert days(bread) == ["2025-08-24T02:03:20"] * 2, "the conversation's, where its messages have none"
    assert spoken(bread) == ["user: How sour should the starter be?", "assistant: Until it smells of yoghurt."]
    [problem] = problems_of(found)
    assert problem.startswith("element 2 (byte ") and "mapping" in problem


def test_claude() -> None:
    found = found_at(EXPORTS / "claude.json")
    [tides] = threads_of(found)
    assert spoken(tides) == [
        "user: When is high water at the quay?\n[file: tides.csv]\n06:12,4.1\n[file: quay.png]",
        'assistant: Let me look it up.\n[call tide_table {"place":"quay"}]',
        "tool: 06:12 4.1 m",
        "assistant: High water is at 06:12.",
        "user: Thanks, and the day after?",
    ]
    assert days(tides)[-1] == "2026-02-15T08:00:00"
    assert problems_of(found) == [] and found[-1].thread is None, "a chat that was opened and left"


def test_open_webui() -> None:
    seeds, rain = threads_of(found_at(EXPORTS / "open-webui.json"))
    assert spoken(seeds) == [
        "user: When do I sow the broad beans?\n[file: garden.pdf]",
        'assistant: [call almanac {"plant": "bean"}]',
        "tool: October or March",
        "assistant: In October, or in March.",
        "<0 assistant: In spring.",
    ]
    assert spoken(rain) == [
        "user: Will it rain on Skye?",
        'assistant: [call get_weather {"place":"Skye"}]',
        "tool: rain",
        "assistant: Yes, all day.",
    ]
    assert days(rain)[0] == "2023-11-14T22:30:00"


def test_a_chat_of_open_webui_by_itself_is_read_whatever_else_it_has(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    chat = {"chat": None, "history": {"messages": {"a": {"role": "user", "content": "Hm."}}}}
    file.write_text(json.dumps(chat))
    assert [spoken(thread) for thread in threads_of(found_at(file))] == [["user: Hm."]]


def test_a_text_that_opens_thousands_of_blocks_and_closes_none_is_read_at_once(tmp_path: Path) -> None:
    file, text = tmp_path / "chat.json", '<details type="a" ' * 20_000
    messages = {
        "a": {"role": "user", "content": "Hm.", "childrenIds": ["b"]},
        "b": {"role": "assistant", "content": text, "parentId": "a"},
    }
    file.write_text(json.dumps({"history": {"currentId": "b", "messages": messages}}))
    began = time.process_time()
    [thread] = threads_of(found_at(file))
    assert [message.text for message in thread.messages] == ["Hm.", text.strip()]
    assert time.process_time() - began < 5


def test_librechat() -> None:
    [clock] = threads_of(found_at(EXPORTS / "librechat.json"))
    assert spoken(clock) == [
        "user: Why does the long-case clock stop at noon?\n[file: movement.jpg]",
        'assistant: [call manual {"page": 3}]',
        "tool: The rack catches on the snail.",
        "assistant: The rack catches on the snail at twelve.",
        "user: Can I bend it instead?",
        "assistant: No, it would break.",
        "<3 user: How do I file it?",
    ]


def test_sharegpt() -> None:
    [bees] = threads_of(found_at(EXPORTS / "sharegpt.json"))
    assert spoken(bees) == [
        "user: When do the bees swarm?",
        'assistant: [call calendar {"of": "swarms"}]',
        "tool: May and June",
        "assistant: In May and June.",
    ]
    assert bees.source == "sharegpt:identity_0"


def test_messages_in_openais_format(tmp_path: Path) -> None:
    net, floats = threads_of(found_at(EXPORTS / "openai.jsonl"))
    assert spoken(net)[1:3] == ["user: Which twine for the herring net?", 'assistant: [call stock {"of": "twine"}]']
    assert net.source == "openai:talk-1" and set(days(net)) == {"2025-03-01T09:00:00"}
    assert spoken(floats)[0] == "user: And the floats?\n[image]"
    said = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
    for name, text in {
        "array.json": json.dumps(said, indent=1),
        "lines.jsonl": "\n".join(map(json.dumps, said)),
    }.items():
        (tmp_path / name).write_text(text)
        [thread] = threads_of(found_at(tmp_path / name))
        assert spoken(thread) == ["user: One.", "assistant: Two."]


def test_claude_code() -> None:
    found = found_at(EXPORTS / "claude-code.jsonl")
    [lathe] = threads_of(found)
    assert problems_of(found) == []
    assert spoken(lathe) == [
        "user: Which pitch has the lead screw? Look in both files.",
        'assistant: I read both.\n[call Read {"file_path": "screw.toml"}]\n[call Read {"file_path": "gears.toml"}]',
        "tool: pitch = 3",
        "tool: ratio = 2",
        "assistant: The pitch is 3 mm.",
        "user: Cut it in steel.",
        "assistant: Steel it is.",
        "<4 user: Cut it in brass.",
    ]
    assert (lathe.folder, topic_of_folder(lathe.folder)) == ("/srv/ada/lathe", "lathe")
    assert days(lathe)[0] == "2025-11-02T08:00:10"


def test_codex() -> None:
    [orrery] = threads_of(found_at(EXPORTS / "codex.jsonl"))
    assert spoken(orrery)[1:] == [
        "user: How many teeth has the wheel of Mars?",
        'assistant: [call shell {"command":["cat","wheels.csv"]}]',
        'tool: {"output":"mars,79\\n","metadata":{"exit_code":0}}',
        "assistant: Seventy-nine.",
    ]
    assert topic_of_folder(orrery.folder) == "orrery"
    assert days(orrery)[-1] == "2025-10-29T00:59:44"
    [old] = threads_of(found_at(EXPORTS / "codex-of-2025-06.jsonl"))
    assert spoken(old) == ["user: Where is the key of the tower?", "assistant: On the beam over the door."]


def test_aider() -> None:
    bell, clapper = threads_of(found_at(EXPORTS / "aider.chat.history.md"))
    assert spoken(bell) == [
        "user: How often does the bell ring?\n\nCount the strokes, too.",
        "assistant: It rings each hour:\n\n# A heading of the answer\n> and a quotation in it\n\n"
        "```python\nring(hour)\n```",
    ]
    assert spoken(clapper) == ["user: what is the clapper made of?", "assistant: Of iron."]
    assert bell.source == "aider:exports/2024-05-03 10:00:00"
    assert len(set(days(bell))) == 1


def test_text_that_an_export_has_of_an_attachment_stands_below_its_name_once(tmp_path: Path) -> None:
    [whole, _] = json.loads((EXPORTS / "claude.json").read_text())
    pasted = [{"file_name": "", "extracted_content": text} for text in ("Quay at six.\r\nBring oars.", "Fog.", "Fog.")]
    whole["chat_messages"][0] |= {"attachments": pasted, "files": [{"file_name": "tides.csv"}, {"file_name": "a.png"}]}
    whole["chat_messages"][2] |= {
        "attachments": [{"file_name": "tides.csv", "extracted_content": "06:12,4.1\n"}],
        "files": [{"file_name": "tides.csv"}],
    }
    (tmp_path / "claude.json").write_text(json.dumps([whole]))
    first, *_, last = threads_of(found_at(tmp_path / "claude.json"))[0].messages
    assert (
        first.text.split("?\n")[1]
        == "[file]\nQuay at six.\nBring oars.\n[file]\nFog.\n[file: tides.csv]\n[file: a.png]"
    )
    assert last.text == "Thanks, and the day after?\n[file: tides.csv]\n06:12,4.1"


def test_a_folder_and_a_zip_have_what_their_files_have(tmp_path: Path) -> None:
    packed = tmp_path / "export.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(EXPORTS / "claude.json", "data/conversations.json")
        archive.writestr("data/users.json", '[{"uuid": "x", "full_name": "Ada"}]')
    assert problems_of(found_at(packed)) == [], "users.json is passed over"
    programs = {thread.program for thread in threads_of(found_at(EXPORTS))}
    assert programs == set(NAMES) - {"aider", "memd"}, "Aider's file has another name in a folder"


def test_a_file_that_was_cut_off_gives_what_stands_before(tmp_path: Path) -> None:
    whole = (EXPORTS / "chatgpt.json").read_bytes()
    cut = tmp_path / "conversations.json"
    cut.write_bytes(whole[:-200])
    found = found_at(cut)
    assert [thread.source for thread in threads_of(found)] == ["chatgpt:6b0f0d9c-0000-4000-8000-00000000000a"]
    assert "the file ends in the middle of it" in problems_of(found)[-1]


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("chatgpt.json", '"mapping": {'),
        ("claude.json", '"chat_messages": ['),
        ("open-webui.json", '"chat": {'),
        ("librechat.json", '"messages": ['),
        ("sharegpt.json", '"conversations": ['),
        ("openai.jsonl", '"messages": ['),
    ],
)
def test_a_file_cut_off_in_its_first_conversation_is_known_as_an_export(tmp_path: Path, name: str, begun: str) -> None:
    whole = (EXPORTS / name).read_text().splitlines()[0] if name.endswith("l") else (EXPORTS / name).read_text()
    first = whole.index(begun) + len(begun)
    file = tmp_path / "saved"
    for end in range(first + 40, len(whole), max(1, (len(whole) - first) // 20)):
        file.write_text(whole[:end])
        assert format_in(file, Dating()) == Path(name).stem, whole[:end][-40:]
    file.write_text(json.dumps({"name": "lighthouse", "scripts": {"start": "lamp"}})[:-10])
    assert format_in(file, Dating()) is None, "any other JSON"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"%PDF-1.7\n" + b"\xff\xfe binary \n" * 100, "it is no JSON object"),
        (b"<html><body>\n" * 100, "it is no JSON object"),
        (b'{"name": "a package", "version": "1"}', "it is not a conversation; its members are name, version"),
        (b"PK\x03\x04 broken", "it is no whole zip"),
        (b'{"mapping": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "nested too deep"),
        ("[]".encode("utf-16"), "it is no JSON object"),
    ],
)
def test_a_file_of_something_else_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(content)
    found = found_at(file)
    assert threads_of(found) == []
    assert reason in "\n".join(problems_of(found))
    assert len(problems_of(found)) == 1


@pytest.mark.parametrize("packing", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
def test_a_damaged_file_in_a_zip_is_named_and_the_next_one_is_read(tmp_path: Path, packing: int) -> None:
    packed = tmp_path / "export.zip"
    with zipfile.ZipFile(packed, "w", packing) as archive:
        archive.write(EXPORTS / "chatgpt.json", "conversations-1.json")
        size = archive.infolist()[0].compress_size
        archive.write(EXPORTS / "claude.json", "conversations-2.json")
    content = packed.read_bytes()
    damage = 30 + len("conversations-1.json") + 13
    packed.write_bytes(content[:damage] + b"\xff" * (size - 20) + content[damage + size - 20 :])
    found = found_at(packed)
    assert [thread.program for thread in threads_of(found)] == ["claude"]
    assert "it cannot be unpacked" in problems_of(found)[0]


def test_a_value_that_is_too_long_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [{"role": "user", "content": "x" * 5_000}]
    short = [{"role": "user", "content": "The gate is shut at nine."}]
    lines, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text("\n".join(json.dumps({"messages": one}) for one in (short, long, short)))
    array.write_text(json.dumps([{"messages": one} for one in (short, long, short)], indent=1))
    for file, place in ((lines, "line 2"), (array, "element 2")):
        with file.open("rb") as opened:
            listed = list(items(iter(lambda: opened.read(100), b""), 1_000))
        assert [bool(item.problem) for item in listed] == [False, True, False]
        assert listed[1].place.startswith(place)


def test_messages_in_a_circle_or_with_the_same_id_are_all_kept_and_named(tmp_path: Path) -> None:
    def node(parent: str | None, text: str) -> dict[str, Any]:
        content = {"content_type": "text", "parts": [text]}
        return {"parent": parent, "message": {"author": {"role": "user"}, "content": content, "create_time": 0}}

    circle = {"mapping": {"a": node("c", "one"), "b": node("a", "two"), "c": node("b", "three")}, "current_node": "c"}
    chat = [{"uuid": "m", "sender": "human", "text": text} for text in ("four", "five")]
    file = tmp_path / "odd.jsonl"
    file.write_text(f"{json.dumps(circle)}\n{json.dumps({'uuid': 'x', 'chat_messages': chat})}\n")
    first, second = threads_of(found_at(file))
    assert sorted(message.text for message in first.messages) == ["one", "three", "two"]
    assert first.problems == ("3 messages follow each other in a circle, which is opened",)
    assert [message.text for message in second.messages] == ["four", "five"]
    assert second.problems == ("1 ids stand for several messages, such as 'm'",)


def test_an_id_that_thousands_of_messages_have_takes_no_more_time_than_one_of_their_own() -> None:
    nodes = [Node("m", None, (Message("user", f"message {number}"),)) for number in range(8_000)]
    started = time.thread_time()
    assert len(thread_of("claude", "x", nodes).messages) == len(nodes)
    assert time.thread_time() - started < SECONDS_MAX


def test_a_message_that_cannot_be_read_is_named_and_the_others_stay(tmp_path: Path) -> None:
    chat = json.loads((EXPORTS / "claude.json").read_text())[:1]
    chat[0]["chat_messages"][1] = {"uuid": 3, "sender": ["nobody"]}
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps(chat))
    [thread] = threads_of(found_at(file))
    assert [message.role for message in thread.messages] == ["user", "user"]
    assert thread.problems[0].startswith("message 2 cannot be read: ")


@pytest.mark.parametrize("at", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_only_python_writes_costs_a_message_its_date_alone(tmp_path: Path, at: float) -> None:
    said = 'NaN, "-Infinity" and \\ are said.'
    message = {"role": "user", "content": said, "timestamp": at}
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([{"chat": {"history": {"messages": {"a": message}}}, "id": "x"}]))
    [thread] = threads_of(found := found_at(file))
    assert (days(thread), [one.text for one in thread.messages], problems_of(found)) == ([""], [said], [])


@pytest.mark.parametrize("half", [r"\ud83d", r"\uDE00"])
@pytest.mark.parametrize("indent", [None, 1])
def test_half_an_emoji_costs_no_more_than_itself(tmp_path: Path, half: str, indent: int | None) -> None:
    """JavaScript leaves it where it cuts a string, such as a title."""
    chats = [{"messages": [{"role": "user", "content": "Cut HALF here."}], "title": "HALF"}] * 2
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(chats, indent=indent).replace("HALF", half))
    threads = threads_of(found := found_at(file))
    assert [thread.messages[0].text for thread in threads] == ["Cut \ufffd here."] * 2 and problems_of(found) == []


UNREADABLE = (b"1e999", b'"2025-10-29T00:5\xf5:44"', b"9" * 5_000, b'"\\ud800"')


@pytest.mark.parametrize("bad", UNREADABLE, ids=["too large", "no UTF-8", "too long", "half an emoji"])
def test_a_time_that_cannot_be_read_costs_a_session_one_item_at_most(bad: bytes) -> None:
    lines = (EXPORTS / "codex.jsonl").read_bytes().splitlines()
    [whole] = threads_of(list(found_in(items([b"\n".join(lines)]), Dating())))
    place = next(place for place, line in enumerate(lines) if b'"response_item"' in line and b'"assistant"' in line)
    lines[place] = re.sub(rb'(?<="timestamp": )"[^"]*"', lambda _: bad, lines[place])
    [thread] = threads_of(list(found_in(items([b"\n".join(lines)]), Dating())))
    assert len(thread.messages) >= len(whole.messages) - (bad == UNREADABLE[2])


@pytest.mark.parametrize("bad", UNREADABLE, ids=["too large", "no UTF-8", "too long", "half an emoji"])
@pytest.mark.parametrize("within", [b"BAD", b'[{"x": BAD}]'])
def test_a_member_that_nobody_reads_costs_nothing(bad: bytes, within: bytes) -> None:
    def message(text: str, *children: dict[str, Any]) -> dict[str, Any]:
        return {"messageId": text, "sender": "User", "isCreatedByUser": True, "text": text, "children": [*children]}

    nested = message("one", message("two", message("three") | {"odd": 0}), message("four") | {"odd": 0})
    chat = json.dumps({"conversationId": "c", "messages": [nested], "recursive": True}).encode()
    told = list(found_in(items([chat.replace(b'"odd": 0', b'"odd": ' + within.replace(b"BAD", bad))]), Dating()))
    [thread] = threads_of(told)
    assert {one.text for one in thread.messages} == {"one", "two", "three", "four"} and problems_of(told) == []


def test_a_message_that_cannot_be_read_hides_none_of_its_answers() -> None:
    answer = {"messageId": "a", "sender": "User", "isCreatedByUser": True, "text": "Here."}
    question = answer | {"messageId": 5, "children": [answer]}
    chat = json.dumps({"conversationId": "c", "messages": [question], "recursive": True}).encode()
    [thread] = threads_of(list(found_in(items([chat]), Dating())))
    assert [one.text for one in thread.messages] == ["Here."] and "message 1 cannot be read" in thread.problems[0]


def test_a_byte_that_is_no_utf_8_costs_no_more_than_itself_but_no_text_of_memd_s_own_is_changed() -> None:
    chat = b'{"messages": [{"role": "user", "content": "Caf\xe9 at nine."}]}'
    [thread] = threads_of(list(found_in(items([chat]), Dating())))
    assert thread.messages[0].text == "Caf\ufffd at nine."
    [entry] = found_in(items([b'{"canonical_id": 1, "uuid": "x", "content": "Caf\xe9"}']), Dating(), "memd")
    assert b"\xe9" in entry.entry


# Trees and bytes of any kind


@st.composite
def trees(draw: st.DrawFn) -> list[Node]:
    size = draw(st.integers(1, 12))
    names = st.sampled_from([str(number) for number in range(size)])
    parents = st.one_of(st.none(), names, st.just("nobody"))
    texts = [f"text {number}" for number in range(size)]
    return [
        Node(draw(names), draw(parents), [Message("user", f"{text}.{part}") for part in range(draw(st.integers(0, 2)))])
        for text in texts
    ]


@given(trees(), st.text("0123456789", max_size=2))
def test_of_any_tree_each_message_is_listed_once_behind_its_parent(nodes: list[Node], leaf: str) -> None:
    texts = [message.text for node in nodes for message in node.messages]
    if not texts:
        return
    thread = thread_of("test", "id", nodes, leaf)
    assert sorted(message.text for message in thread.messages) == sorted(texts)
    assert all(NO_PARENT <= parent < place for place, parent in enumerate(thread.parents))
    parts = list(stretches(thread))
    assert [place for part in parts for place in part] == list(range(len(texts)))
    for part in parts:
        assert all(thread.parents[place] == place - 1 for place in part[1:])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\[]{},: \n\u00e9'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\[', max_size=3), inner, max_size=3),
    max_leaves=12,
)


def blocks_of(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@given(
    st.lists(st.dictionaries(st.text("k"), JSON, min_size=1, max_size=2), min_size=1, max_size=4), st.integers(1, 40)
)
def test_values_are_found_wherever_blocks_end(values: list[dict[str, Any]], size: int) -> None:
    layouts = [
        json.dumps(values),
        json.dumps(values, indent=1, ensure_ascii=False),
        "\n".join(map(json.dumps, values)),
        "\n".join(json.dumps(value, indent=1) for value in values),
    ]
    for layout in layouts:
        listed = list(items(blocks_of(layout.encode(), size)))
        assert [json.loads(item.data) for item in listed] == values


@given(st.binary(max_size=200), st.integers(1, 40))
def test_any_bytes_are_read_to_their_end(data: bytes, size: int) -> None:
    for item in items(blocks_of(b'[{"a": 1},\n' + data, size), 50):
        assert len(item.data) <= 50
        assert bool(item.problem) != bool(item.data)


@pytest.mark.thorough
def test_no_more_is_held_than_a_value_and_a_block(tmp_path: Path) -> None:
    import tracemalloc

    one = json.dumps({"messages": [{"role": "user", "content": "word " * 2_000}]}).encode()

    def blocks() -> Iterator[bytes]:
        yield b"[\n" + one
        for _ in range(3_000):  # 30 MB
            yield b",\n" + one

    tracemalloc.start()
    assert sum(1 for _ in items(blocks())) == 3_001
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
