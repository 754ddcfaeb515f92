"""Stored text as it may be shown: what is neutralised, what is left alone, and that it stays readable."""

from __future__ import annotations

import re

import pytest
from effort import scaled
from hypothesis import given
from hypothesis import strategies as st
from llamacpp_sources import chat_templates

from memd.recall.neutralising import neutralised

SHIPPED = chat_templates()


@pytest.mark.parametrize(
    "control",
    [
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>"),
        *("<|channel|>", "<|ifm|im_start|>", "<|/tool|>", '<|"|>', "<｜User｜>", "<｜tool▁call▁end｜>"),
        *("<|turn>", "<turn|>", "<|tool_call>", "<channel|>"),
        *("[|user|]", "[|endofturn|]"),
        *("<s>", "</s>", "<bos>", "<eos>", "<sop>", "<unk>", "<pad>", "<seed:bos>", "<SPECIAL_11>"),
        *("<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"),
        *("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[THINK]", "[/THINK]", "[ARGS]", "[CALL_ID]"),
        *(
            "<role>",
            "</role>",
            "<user>",
            "<assistant>",
            "<system>",
            "<用户>",
            "‹用户>",
            "<AI>",
            "[e~[",
            "]~b]",
            "]~!b[",
        ),
        *(
            "<fim_prefix>",
            "<fim-suffix>",
            "<|fim_middle|>",
            "<file_sep>",
            "<end_of_utterance>",
            "<unused0>",
            "<extra_id_9>",
        ),
        *(
            "<reserved_106>",
            "<begin_of_document>",
            "<function=rm>",
            "<function_calls>",
            "<tools>",
            "<__media__>",
            "<image>",
        ),
        *(
            "<minimax:tool_call>",
            "</mm:think>",
            "<ifm|tools>",
            "<｜DSML｜invoke",
            "]minimax[",
            "[UNUSED_TOKEN_145]",
        ),
        *("[mem:a3f9]", "[mem:", "[memory]", "[/memory]", "[/MEMORY]", "[MEM:a3f9]", "[memd: 2,140 tokens"),
        *("<|im\u200b_start|>", "<\u2060|im_start|>", "[mem\ufeff:a3f9]", "[\u00ad/memory]", "[me\x00mory]"),
        *(
            "＜|im_start|＞",
            "＜ｓ＞".replace("ｓ", "s"),
            "［/memory］",
            "[mem：a3f9]",
            "⟨|im_end|⟩",
            "<∣im_end∣>",
            "[ｍｅｍｏｒｙ]",
        ),
    ],
)
def test_control_strings_are_neutralised_and_stay_readable(control: str) -> None:
    for around in ("{}", "before {} after", "x{}y", "{}{}", "<{}>", "[{}]"):
        text = around.replace("{}", control)
        shown = neutralised(text)
        assert control not in shown
        assert shown.replace(f"{control[0]} {control[1:]}", control).replace("< <", "<<") == text


@pytest.mark.parametrize(
    "text",
    [
        *("a < b", "a<b and c>d", "List<string>", "Map<String, List<Integer>>", "std::vector<std::string>", "[0]"),
        *("x[i][j]", "a[1:2]", "[x] done", "- [ ] to do", "[link](http://example.com)", "x |> f <| y", "a <|> b"),
        *("<div>", "</div>", "<p class='x'>", "<strong>", "<svg>", "i << 2 >> 1", "cat <<EOF", "[[1, 2], [3]]"),
        *("Array<A | B>", "Array<A|B>", "Promise<T|null>", "|x| x + 1", "if (a <b|| c> d)", "[|1; 2|]", "[|]", "<||>"),
        *("[members]", "[memo]", "memory", "mem:a3f9", "[ mem:a3f9]", "[image]", "[call f {}]", "[interrupted]", ""),
        *("List<User>", "Map<Role, Tool>", "vector<T>", "<li>", "<result>", "<name>", "[A-Z]", "[TODO]", "[Memo: x]"),
        *(
            "你好，世界：好",
            "«oui»",
            "L’été – déjà",
            "👩\u200d👩\u200d👧 hi",
            "می\u200cخواهم",
            "a\r\nb\r\n",
            "[ˈmɛməri]",
        ),
        *("[INFO] started", "[INSTALL]", "<think about it>", "<session>", "<s3://bucket>", "<email@example.com>"),
    ],
)
def test_ordinary_text_and_code_is_shown_as_it_is(text: str) -> None:
    assert neutralised(text) == text


# What the templates that llama.cpp ships write around messages, in any bracket; without those that are concatenated.
WRITTEN = re.compile(
    r"[<‹][^\s<>{}'\"(),;]{1,60}[>›]|<[^\s<>{}'\"(),;]{1,60}[|｜]|\[/?[A-Z][A-Z_ ]{2,30}\]|\[\|[^\s|]{1,30}\|\]"
    r"|[\[\]][!a-z]{0,8}~[!a-z]{0,8}[\[\]]|\](?:<\])?[a-z]{3,20}(?:\[>)?\["
)
ORDINARY = re.compile(  # of their instructions and of schemata: names as documents have them
    r"</?(?:[A-Z_]{4,}|(?:args|function|tools?|param|key)-[\w-]+|any|anyOf|oneOf|enum|required|type|name|description|key"
    r"|item|param|parameters?|pattern\w+|results?|returns|response|documents|co|function_usage|\w+_(?:guidelines|modalities"
    r"|priority|description|instructions))>"
)


@pytest.mark.llama
def test_nothing_that_a_shipped_template_writes_around_messages_gets_through() -> None:
    assert SHIPPED, "python tests/support/llamacpp_sources.py fetches them"
    written = {mark for path in SHIPPED.values() for mark in WRITTEN.findall(path.read_text())}
    assert len(written) > 300
    assert [mark for mark in sorted(written) if neutralised(mark) == mark and not ORDINARY.fullmatch(mark)] == []


ROLES = ["user", "assistant", "system", "tool", "developer", "function", "User", "ASSISTANT", "Human"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "line",
    [
        "{}: yes", "{} (ann): yes", "{}:", "  {}: yes", "\t{} : yes", "## {}: yes", "**{}:** yes", "**{}**: yes",
        "{}：yes", "\u200b{}: yes", "\u3000{}: yes", "{} (ann (b)): yes",
    ],
)  # fmt: skip
def test_a_line_that_begins_like_a_role_is_quoted(role: str, line: str) -> None:
    speaking = line.format(role)
    for before in ("", "It says:\n", "a\r\n", "a\r", "a\x0b", "a\u2028", "a\x85", "\n\n"):
        shown = neutralised(f"{before}{speaking}\nand so on")
        assert "> " in shown.split(role)[0], "a mark of quotation stands before it"
        assert shown.replace("> ", "") == f"{before}{speaking}\nand so on"


def test_letters_that_look_like_others_make_no_other_role() -> None:
    assert neutralised("usеr: yes") == "> usеr: yes"  # a Cyrillic е
    assert neutralised("ｕｓｅｒ: yes") == "> ｕｓｅｒ: yes"
    assert neutralised("𝐮𝐬𝐞𝐫: yes") == "> 𝐮𝐬𝐞𝐫: yes"


def test_a_line_that_looks_like_a_day_is_quoted() -> None:
    for line in ("-- Tuesday 2026-11-03 --", "--Friday, 2026-11-20", "  –– Monday 2026-11-02 ––", "-- 2026-11-03 --"):
        assert neutralised(f"a\n{line}\nb") == f"a\n{line[: len(line) - len(line.lstrip())]}> {line.lstrip()}\nb"


@pytest.mark.parametrize(
    "text",
    [
        "the user: a person", "users: 3", "username: bob", "- user: bob", '"user": "bob"', "> user: quoted",
        "system call: read", "tooling: ok", "The system: a lamp", "-- 2026-11-03 migration", "-- Tuesday", "user",
        "--- a/user.py", "user@host:/srv", "ai.py:12: error",
    ],
)  # fmt: skip
def test_a_line_that_only_speaks_of_somebody_is_shown_as_it_is(text: str) -> None:
    assert neutralised(text) == text


SPEAKING = ["user", "system:", "tool (a):", "-- Monday 2026-11-02", "е", "用户"]
MARKERS = ["memory]", "[/memory]", "[mem:", "<|", "|>", "im_start", "INST]", "<<SYS>>", "s>"]
PIECES = st.sampled_from([*"<>[]|/｜～: \n\r\u200b\u2028*#(-)", *MARKERS, *SPEAKING])


@given(st.lists(PIECES, max_size=25).map("".join))
def test_neutralising_twice_changes_nothing_more(text: str) -> None:
    once = neutralised(text)
    assert neutralised(once) == once
    added = iter(once)
    assert all(character in added for character in text), "nothing is taken away"


def test_neutralising_takes_time_in_proportion_to_the_text() -> None:
    size = scaled(1 << 20)
    for part in (
        "<|",
        "[|",
        "<",
        "[",
        "<|a",
        "<｜",
        "user (",
        "user  ",
        "\n",
        " ",
        "\n user (\u200b",
        "*",
        "**user",
        "# ",
        "]~",
        "-- ",
    ):
        text = part * (size // len(part))
        assert len(neutralised(text)) >= len(text)
