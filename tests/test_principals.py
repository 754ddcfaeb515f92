"""Principals: what a token may do where, and how the settings name them. Pure: no daemon."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.errors import ConfigError
from memd.principals import OWNER, Principal, Principals, overlapping
from memd.settings.loading import load_config

ANN = Principal("ann", ("team-*", "ann"), frozenset({"read", "write"}))
DIGEST = hashlib.sha256(b"a secret").hexdigest()


def test_a_right_holds_in_the_topics_of_its_patterns_and_nowhere_else() -> None:
    assert ANN.may("read", "team-a")
    assert ANN.may("write", "ann")
    assert not ANN.may("read", "anna")
    assert not ANN.may("read", "a-team-")
    assert not ANN.may("correct", "team-a")
    assert not ANN.may_everywhere("read")
    assert OWNER.may_everywhere("admin")
    assert Principal("x", ("a.b",), frozenset({"read"})).may("read", "a.b")
    assert not Principal("x", ("a.b",), frozenset({"read"})).may("read", "axb"), "a dot is a dot"


@given(st.text("ab-*", min_size=1, max_size=7), st.text("ab-/", max_size=9))
def test_a_star_stands_for_any_characters(pattern: str, name: str) -> None:
    wanted = re.fullmatch("[^/]*".join(map(re.escape, pattern.split("*"))), name) is not None
    assert Principal("x", (pattern,), frozenset({"read"})).may("read", name) == wanted


def test_no_pattern_makes_a_long_name_take_long() -> None:
    """A regular expression takes four minutes for 40 letters. Whoever lets a program in chooses both."""
    [pattern] = ANN.narrowed(("read",), (f"team-{'*a' * 60}b",)).topics
    greedy = Principal("x", (pattern, "*a*a*a*a*a*a*a*a-"), frozenset({"read"}))
    assert not greedy.may("read", f"team-{'a' * 120}") and greedy.may("read", f"team-{'a' * 120}b")


def test_a_table_can_be_exchanged_and_never_opens_again() -> None:
    table = Principals()
    assert [table.is_open] == [True]
    table.exchange({hashlib.sha256(b"one").digest(): ANN})
    assert [table.is_open] == [False]
    assert (table.find("one"), table.find("two"), table.find("")) == (ANN, None, None)
    table.lend("lent", OWNER)
    table.exchange({})
    assert (table.is_open, table.find("one"), table.find("lent")) == (False, None, OWNER)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["a", "b"], None),
        (["a*", "*b"], ("a*", "*b")),
        (["a*b", "ac*"], ("a*b", "ac*")),
        (["a*b", "b*"], None),
        (["x", "a", "a"], ("a", "a")),
        (["*", "z"], ("*", "z")),
        (["*a", "*b"], None),
    ],
)
def test_patterns_that_one_name_could_match_overlap(patterns: list[str], found: tuple[str, str] | None) -> None:
    assert overlapping(patterns) == found


def loaded(tmp_path: Path, tokens: str, **env: str) -> object:
    path = tmp_path / "config.yaml"
    path.write_text(f"auth:\n  tokens:\n{tokens}")
    return load_config(path, env, {}).auth


def item(name: str = "ann", sha: str = DIGEST, topics: str = "[a]", rights: str = "[read]") -> str:
    return f"    - {{name: {name}, token_sha256: {sha}, topics: {topics}, rights: {rights}}}\n"


def test_tokens_of_the_settings_are_read(tmp_path: Path) -> None:
    auth = load_config(None, {"MEMD_AUTH_TOKENS": f"[{item().strip().removeprefix('- ')}]"}, {}).auth
    assert [one.principal for one in auth.tokens] == [Principal("ann", ("a",), frozenset({"read"}))]
    assert loaded(tmp_path, item()) == auth


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (
            item(topics='["team-*", team-a]'),
            "line 3: auth.tokens, item 1: the topics of ann have team-* and team-a, which",
        ),
        (item(topics="[a, a]"), "the topics of ann have a twice; remove one"),
        (item(topics="[]"), "topics is not what it should be; give a list of one or more names of topics"),
        (item(topics="[../a]"), "topics is not what it should be"),
        (item(topics='["a\\n"]'), "topics is not what it should be"),
        (item(name='"owner\\n"'), "name is not what it should be"),
        (
            item(rights="[]"),
            "rights is not what it should be; give a list of one or more of read, write, correct, admin",
        ),
        (item(rights="[delete]"), "give a list of one or more of read, write, correct, admin, not ['delete']"),
        (item(rights="[read, read]"), "ann has a right twice"),
        (item() + item("bob"), "line 4: auth.tokens, item 2: bob has the same token as ann"),
        (item() + item(sha="f" * 64), "there is another token with the name ann"),
        (item("owner"), "the name owner is that of auth.token"),
        (item(sha="abc"), "token_sha256 is not what it should be; give the 64 hexadecimal digits"),
        ("    - {name: ann, topics: [a], rights: [read]}\n", "it has no token_sha256; give the 64"),
        ("    - {name: ann, token: s3cr3t}\n", "a token itself has no place here, its SHA-256 has"),
        ("    - s3cr3t\n", "it is not what it should be; give its name, token_sha256, topics, rights"),
    ],
)
def test_a_wrong_token_is_refused_with_its_place_and_the_reason(tmp_path: Path, tokens: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, tokens)
    assert reason in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


def test_the_owners_token_is_nobody_elses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auth.tokens \(item 1\): ann has the token that auth.token is"):
        loaded(tmp_path, item(), MEMD_AUTH_TOKEN="a secret")
