"""Redaction: what is found, what is left alone, and that no text takes longer than its length deserves."""

from __future__ import annotations

import json
import logging
import random
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import phonenumbers
import pytest
from daemon_process import clean_environment
from effort import in_time, long, scaled
from hypothesis import given
from hypothesis import strategies as st

from memd.conversation.conversation import Buffered, Line
from memd.conversation.events import Appended, BufferEvent, Departed, Forked, Opened, Placed, Returned
from memd.entries import Draft, Speaker, Vector
from memd.errors import ConfigError, StoreError
from memd.ingest.redaction import persons
from memd.ingest.redaction.redactor import NO_REDACTION, Redactor, last_look, redacted_drafts
from memd.ingest.redaction.shapes import BUILT_IN
from memd.messages import Block, Message, ToolCall
from memd.settings.model import IngestSettings, RedactionName
from memd.telemetry.logging import ConsoleLines

ROOT = Path(__file__).parent.parent
REDACTOR = Redactor.of(IngestSettings(redact=True))

BODY = [
    f"MIIEow{line:02}IBAAKCAQEAabcdefghijklmnopqrstuvwxyz+/ABCDEFGHIJKLMNOPQRS"[:64].ljust(64, "x") for line in range(9)
]
PEM = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *BODY, "q83vEjRWeJA=", "-----END RSA PRIVATE KEY-----"])
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


def own(**patterns: str) -> Redactor:
    return Redactor.of(IngestSettings(redact=True, redact_builtin=(), redact_patterns=patterns))


# What is found

FOUND = {
    "My key is sk-proj-Ab12Cd34Ef56Gh78Ij90, keep it.": "My key is [redacted:api_key], keep it.",
    "sk-0123456789abcdefABCDEF": "[redacted:api_key]",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345 and": "[redacted:api_key] and",
    "use AKIAIOSFODNN7EXAMPLE.": "use [redacted:api_key].",
    "xoxb-123456789012-1234567890123-AbCdEf": "[redacted:api_key]",
    "AIzaSyA-1234567890abcdefghijklmnopqrstu": "[redacted:api_key]",
    f"The token ({JWT}).": "The token ([redacted:jwt]).",
    f"in a_{JWT}": "in a_[redacted:jwt]",
    "Authorization: Bearer abcdef": "Authorization: Bearer [redacted:bearer_token]",
    '"authorization": "Basic dXNlcjpwYXNz"': '"authorization": "Basic [redacted:bearer_token]"',
    "sent as Bearer 0a1b2c3d4e5f": "sent as Bearer [redacted:bearer_token]",
    "password = hunter2": "password = [redacted:password]",
    "client_secret = a1b2c3.d4e5f6": "client_secret = [redacted:password]",
    "Password: swordfish": "Password: [redacted:password]",
    "export API_KEY=abcdefgh && run": "export API_KEY=[redacted:password] && run",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG": "aws_secret_access_key = [redacted:password]",
    'password: str = "hunter2"': 'password: str = "[redacted:password]"',
    "env['DB_PASSWORD'] = 'a b c'": "env['DB_PASSWORD'] = '[redacted:password]'",
    'if password == "it\'s" :': 'if password == "[redacted:password]" :',
    "(mysql --db-password hunter2)": "(mysql --db-password [redacted:password])",
    "mysql --password hunter2 -h db": "mysql --password [redacted:password] -h db",
    "<password>hunter2</password>": "<password>[redacted:password]</password>",
    "https://h/cb?token=ab12cd34&x=1": "https://h/cb?token=[redacted:password]&x=1",
    'password = "not closed\nnext': 'password = "[redacted:password]\nnext',
    "login(password=hunter2, user=bob)": "login(password=[redacted:password], user=bob)",
    "postgres://bob:s3cret@db:5432/shop": "postgres://bob:[redacted:url_credentials]@db:5432/shop",
    "redis://:p@ss@host": "redis://:[redacted:url_credentials]@host",
    r"https:\/\/u:pw@h\/p": r"https:\/\/u:[redacted:url_credentials]@h\/p",
    "pay with 4111 1111 1111 1111 please": "pay with [redacted:card_number] please",
    "2 4111-1111-1111-1111 12": "2 [redacted:card_number] 12",
    "378282246310005.": "[redacted:card_number].",
    "5,4111111111111111,12/27": "5,[redacted:card_number],12/27",
    "card-4111111111111111-123": "card-[redacted:card_number]-123",
    "?card=%204111111111111111": "?card=%20[redacted:card_number]",
    "ends with -----END PRIVATE KEY-----": "ends with [redacted:private_key]",
    f"here:\n{PEM}\nthanks": "here:\n[redacted:private_key]\nthanks",
    f"here: {PEM[:300]}": "here: [redacted:private_key]",
    f"here:\n{PEM[:300]}\n\nWhat is it?": "here:\n[redacted:private_key]\n\nWhat is it?",
    f"{PEM[97:]}\nthanks": "[redacted:private_key]\nthanks",
    "\n".join(BODY[2:6]): "[redacted:private_key]",
    r"nMIIEow03IBAAKCAQEAab\n" + r"\n".join(BODY[4:]) + r"\n-----END": "[redacted:private_key]",
    "RSA PRIVATE KEY-----\n" + BODY[0]: "[redacted:private_key]",
    "the rest is cut off -----END": "the rest is cut off -----END",
    "> -----BEGIN OPENSSH PRIVATE KEY-----\n> " + "\n> ".join(BODY[:2]) + "\n> -----END OPENSSH PRIVATE KEY-----": (
        "> [redacted:private_key]"
    ),
}


@pytest.mark.parametrize(("text", "expected"), FOUND.items(), ids=range(len(FOUND)))
def test_a_secret_is_replaced_and_nothing_else(text: str, expected: str) -> None:
    assert REDACTOR.text(text) == expected


LEFT_ALONE = [
    "A risk-averse, disk-based-and-task-oriented-approach.",
    "max_tokens: 4096, prompt_tokens=128, and the token: a word.",
    "bearer authentication is described in RFC 6750",
    "password = os.environ['DB_PASSWORD']",
    "password = getpass.getpass()",
    "self.password = password",
    "secret = settings.oauth2.value",
    "def login(user: str, password: str) -> None:",
    "password: ${DB_PASSWORD}",
    "token = tokenizer.encode(text)[0]",
    '{"token": "hello", "logprob": -0.1}',
    "PASSWORD=$PASSWORD TOKEN=${{ secrets.TOKEN }} KEY=",
    "password=********",
    "Password: please choose one with twelve characters.",
    "http://localhost:3000?email=a@b.c and ssh://git@github.com:22/a/b",
    "at 1712345678901 ms, hash a4111111111111111b, sums 4,111,111 and 4 111 111",
    "4111 1111 1111 1112",
    "0.4111111111111111",
    "4111 ١١١١ 1111 1111",
    "PWD=/srv/shop",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "set tokenizer llama3-8b",
    "ENV TOKENIZER_MODEL bert-base-v2",
    "ARG KEY_TYPE ed25519",
    "set hotkey Ctrl+F12",
    "heroku config:set NODE_ENV=production2",
    "| Token | GPT-4o |",
    "| password | varchar(255) |",
    'setToken("next page")',
    'auth=("user", "name of it")',
    "GPIO PIN: 1013",
    "the otp is 2024",
    "https://x.y/?code=python-3-12-release-notes",
    '{"invalidToken": "Your token is invalid, please log in again", "resetPassword": "Reset your password"}',
    "wrong_password = 'The password is wrong.'",
    "confirm-password: 'Please repeat the password'",
]


@pytest.mark.parametrize("text", LEFT_ALONE)
def test_what_only_speaks_of_secrets_is_left_alone(text: str) -> None:
    assert REDACTOR.text(text) == text


@pytest.mark.thorough
def test_the_source_of_memd_has_no_secrets() -> None:
    for path in sorted((ROOT / "memd").rglob("*.py")):
        text = path.read_text()
        assert REDACTOR.text(text) is text, path


@given(text=st.text(alphabet="pasword=:\"'\\ \n-@/.sk0eyJ4[redacted:]", max_size=60))
def test_what_was_redacted_is_not_redacted_again(text: str) -> None:
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once


# Secrets of every shape, wherever they stand


def with_check_digit(digits: str) -> str:
    doubled = [sum(map(int, str(2 * int(digit)))) for digit in digits[::-2]]
    total = sum(doubled) + sum(map(int, digits[-2::-2]))
    return digits + str(-total % 10)


def card(digits: str, separator: str) -> str:
    number = with_check_digit("4" + digits)
    return separator.join(number[at : at + 4] for at in range(0, 16, 4)) if len(number) == 16 else number


# With dots it may also be settings.oauth2.key.
WRAPPED = st.sampled_from([0, 1, 2])


def nested(text: str, depth: int) -> str:
    """`text` in a JSON string in a JSON string …"""
    for _ in range(depth):
        text = json.dumps({"line": f"first\n{text}\nlast"})
    return text


@given(value=st.text(min_size=1, max_size=30).filter(str.strip), depth=WRAPPED)
def test_whatever_stands_in_quotes_in_json_is_gone_whole(value: str, depth: int) -> None:
    redacted = REDACTOR.text(nested(json.dumps({"password": value, "user": "bob"}), depth))
    for _ in range(depth):
        redacted = json.loads(redacted)["line"].removeprefix("first\n").removesuffix("\nlast")
    kept = json.loads(redacted)
    assert kept["user"] == "bob"
    assert kept["password"] == "[redacted:password]" or re.fullmatch(
        r"\$?\{+.*\}+|\$\w+|\$\(.*|<.*>|%.*|[*•.xX_-]+|\[redacted:.*", value, re.DOTALL
    ), "only a placeholder stays"


@given(cut=st.integers(min_value=0, max_value=len(PEM)), depth=WRAPPED, keep_end=st.booleans())
def test_a_private_key_is_gone_wherever_it_is_cut_off(cut: int, depth: int, keep_end: bool) -> None:
    key = PEM[cut:] if keep_end else PEM[:cut]
    redacted = REDACTOR.text(nested(key, depth))
    begin_is_whole = not keep_end and cut >= len("-----BEGIN RSA PRIVATE KEY-----")
    end_is_whole = keep_end and cut <= len(PEM) - len("-----END RSA PRIVATE KEY-----")
    if begin_is_whole or end_is_whole:
        assert not any(line in redacted or line[:20] in redacted or line[-20:] in redacted for line in BODY)


# Long and hostile texts

HOSTILE = [
    "eyJ", "eyJaaaaaaaa.", "eyJa-", "sk-", "sk-ant-", "xoxb-", "a", "\\", "\\n", "-", "----- BEGIN ", "-----BEGIN ",
    "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\n-----", "A" * 64 + "\n",
    "Private-Lines: 1\n", 'password="', "password='\\", 'password=\\"', "password=", "password = ", "password: a",
    "password" + " " * 20, "password:", "secret_key_key_key", "token=a.b.c.", "token='", "password=,", "pass",
    "--pass ", "://a:", "://a:@", "://a:b@", "@", "bearer ", "bearer+", "bearer a", "authorization: ", "4", "333 ",
    "4444 ", "4-", " ", "\"'`", "[redacted:", "[redacted:password]", "=", "[", "${", "\n", "%20",
]  # fmt: skip


@pytest.mark.parametrize("part", HOSTILE)
def test_a_long_hostile_text_is_dealt_with_in_time(part: str) -> None:
    secret = "ghp_" + "0123456789abcdefghijklmnopqrstuvwxyz"
    redacted = in_time(REDACTOR.text, f"{secret} {long(part)}\n\n{secret}\n")
    assert secret not in redacted
    assert "[redacted:" in redacted


@pytest.mark.parametrize(
    ("before", "part", "after"),
    [
        ("eyJ", "a", ""), ("://a:", "b@", ""), ('password="', "a\\", ""), ("bearer ", "a", ""),
        ("-----BEGIN ", "A", ""), ("", "A" * 64 + "\n", "-----END PRIVATE KEY-----"),
        ("-----BEGIN PRIVATE KEY-----", "-", ""),
        ("-----BEGIN PRIVATE KEY-----", "prose ", ""), ("password=", "a,", " "), ("4", "1", ""),
        ('password="""', '"', ""),
    ],
)  # fmt: skip
def test_a_long_text_behind_a_promising_beginning_is_dealt_with_in_time(before: str, part: str, after: str) -> None:
    text = before + long(part) + after
    redacted = in_time(REDACTOR.text, text)
    assert len(redacted) <= len(text)
    assert REDACTOR.text(redacted) == redacted


def test_secrets_in_a_megabyte_of_anything_are_all_found() -> None:
    chance = random.Random(5)
    parts = [chance.choice(HOSTILE[:-3]) for _ in range(scaled(33_000))]
    secrets = [f"ghp_{chance.getrandbits(160):040x}" for _ in range(len(parts) // 40)]
    for secret in secrets:
        parts[chance.randrange(len(parts))] += f"\n{secret}\n"
    redacted = in_time(REDACTOR.text, "".join(parts))
    assert not [secret for secret in secrets if secret in redacted]


# Own patterns


def test_an_own_pattern_replaces_what_it_matches_or_its_group_alone() -> None:
    redactor = own(customer=r"\bC-\d{6}\b", spoken=r"(?i)password is (?P<secret>\S+)")
    assert redactor.text("Customer C-123456: the password is swordfish today.") == (
        "Customer [redacted:customer]: the password is [redacted:spoken] today."
    )


def test_an_own_pattern_that_fits_our_mark_leaves_it_alone() -> None:
    redactor = own(letters="[a-z]+", all="[^ ]+")
    assert redactor.text(redactor.text("one 2")) == "[redacted:letters] [redacted:all]"


def test_nothing_is_redacted_unless_it_is_asked_for() -> None:
    text = f"password = hunter2 {JWT} {PEM}"
    redactor = Redactor.of(IngestSettings(redact_patterns={"everything": ".+"}))
    assert redactor.text(text) is text
    assert not redactor and not NO_REDACTION and REDACTOR


def test_the_settings_name_the_patterns_that_there_are() -> None:
    assert tuple(BUILT_IN) == get_args(RedactionName)


# Whole values


def test_the_arguments_of_a_call_stay_json() -> None:
    assert REDACTOR.arguments('{"password": "x1"}') == '{"password": "[redacted:password]"}'
    kept = json.loads(REDACTOR.arguments('{"card": 4111111111111111, "of": "Bob"}'))
    assert kept == {"redacted": '{"card": [redacted:card_number], "of": "Bob"}'}
    assert REDACTOR.arguments("card 4111111111111111") == "card [redacted:card_number]"


SECRET = "sk-0123456789abcdefABCDEF"


def test_no_field_of_a_message_keeps_a_secret() -> None:
    call = ToolCall(SECRET, SECRET, json.dumps({"key": SECRET}))
    message = Message(SECRET, f"it is {SECRET}", (call,), tool_call_id=SECRET, name=SECRET, attachments=(b"x" * 16,))
    kept = REDACTOR.message(message)
    assert SECRET.encode() not in msgspec.msgpack.encode(kept)
    assert kept.attachments == message.attachments
    assert kept.text == "it is [redacted:api_key]"
    assert kept.tool_call_id == kept.tool_calls[0].id, "a result still belongs to its call"


def test_events_keep_their_digests_and_lose_their_secrets() -> None:
    message = Message("user", f"it is {SECRET}")
    buffered = Buffered(b"d" * 16, message.content_digest, 7, message)
    gone = Buffered(b"e" * 16, b"f" * 16, 7, None)
    events: list[BufferEvent] = [
        Opened("one", SECRET, 1.0),
        Appended("one", [buffered, gone], 2.0),
        Placed("one", b"d" * 16, Block(f"[memory] {SECRET}", 3)),
        Forked("two", "one", 1),
    ]
    kept = [REDACTOR.event(event) for event in events]
    assert SECRET.encode() not in msgspec.msgpack.encode(kept)
    appended = kept[1]
    assert isinstance(appended, Appended)
    assert [(item.digest, item.content_digest, item.tokens) for item in appended.messages] == [
        (item.digest, item.content_digest, item.tokens) for item in (buffered, gone)
    ]
    assert kept[3] is events[3]
    assert [NO_REDACTION.event(event) for event in events] == events


def test_messages_and_lines_that_come_into_the_prompt_later_lose_their_secrets_in_the_journal_too() -> None:
    events = [Returned("one", 1, {0: Message("user", f"it is {SECRET}")}), Departed("one", [1], {2: Line(SECRET, 3)})]
    assert SECRET.encode() not in msgspec.msgpack.encode([REDACTOR.event(event) for event in events])


def test_no_text_of_an_entry_keeps_a_secret() -> None:
    draft = Draft(
        uuid=bytes(16), content=f"it is {SECRET}", vector=b"", created_at=1, roles=("user", SECRET), kind=SECRET,
        source=SECRET, action=SECRET, reason=SECRET,
    )  # fmt: skip
    kept = REDACTOR.draft(draft)
    assert SECRET.encode() not in msgspec.msgpack.encode(kept)
    assert kept.roles[0] == "user"
    plain = msgspec.structs.replace(draft, content="x", roles=(), kind="turn", source=None, action=None, reason=None)
    assert REDACTOR.draft(plain) is plain
    assert REDACTOR.replaced(draft, kept) == {"api_key": 3}


# Where it meets the disk


def test_the_vector_of_an_entry_is_that_of_what_is_left_of_it() -> None:
    embedded: list[str] = []

    def embed(text: str) -> Vector:
        embedded.append(text)
        return np.full(2, 0.5, np.float32)

    redactor = Redactor.of(IngestSettings(redact=True))
    draft = Draft(uuid=bytes(16), content=f"it is {SECRET}", vector=bytes(8), created_at=1)
    (kept,) = redacted_drafts([draft], redactor, embed)
    assert (kept.content, kept.vector) == ("it is [redacted:api_key]", np.full(2, 0.5, "<f4").tobytes())
    assert embedded == ["it is [redacted:api_key]"]
    assert redacted_drafts([kept], redactor, embed) == [kept] and len(embedded) == 1
    assert redactor.counts == {"api_key": 1}, "what was replaced before does not count again"
    gone = msgspec.structs.replace(draft, content="", vector=b"", reason=SECRET)
    assert redacted_drafts([gone], redactor, embed)[0].vector == b""


def test_the_store_refuses_an_active_draft_that_was_not_redacted_and_redacts_what_has_no_vector() -> None:
    checked = last_look(REDACTOR)
    draft = Draft(uuid=bytes(16), content="it is [redacted:api_key]", vector=bytes(8), created_at=1, reason=SECRET)
    assert checked(draft) == msgspec.structs.replace(draft, reason="[redacted:api_key]")
    with pytest.raises(StoreError, match="should have been redacted before"):
        checked(msgspec.structs.replace(draft, content=f"it is {SECRET}"))
    gone = msgspec.structs.replace(draft, content="", vector=b"", reason=SECRET)
    assert checked(gone).reason == "[redacted:api_key]"


def test_who_speaks_where_is_still_true_of_what_is_left_of_a_text() -> None:
    first, second, third = f"it is {SECRET}!", "Noted.", f"{SECRET} and {SECRET}"
    content = f"{first}\n{second}\n{third}"
    starts = 0, len(first) + 1, len(first) + len(second) + 2
    speakers = tuple(map(Speaker, starts, ("user", "assistant", SECRET)))
    draft = Draft(uuid=bytes(16), content=content, vector=b"", created_at=1, speakers=speakers)
    kept = REDACTOR.draft(draft)
    name = REDACTOR.identifier(SECRET)
    mark = "[redacted:api_key]"
    assert kept.displayed == f"user: it is {mark}!\nassistant: Noted.\n{name}: {mark} and {mark}"
    assert kept.speakers_fit and REDACTOR.draft(kept) is kept


def test_a_message_that_lies_within_a_secret_speaks_no_more() -> None:
    redactor = Redactor.of(IngestSettings(redact=True, redact_patterns={"span": "b[^e]*d"}))
    speakers = (Speaker(0, "user"), Speaker(3, "tool"), Speaker(5, "user"))
    draft = Draft(uuid=bytes(16), content="ab\nc\nd e", vector=b"", created_at=1, speakers=speakers)
    kept = redactor.draft(draft)
    assert kept.displayed == "user: a[redacted:span]user:  e"
    assert kept.speakers_fit


@given(st.text("ab[]:redact own", max_size=40), st.sampled_from(["a.", r"\[r", "d:own", "(?<=a)b", "a*b|b+a"]))
def test_what_is_redacted_once_stays_as_it_is_whatever_the_pattern(text: str, pattern: str) -> None:
    redactor = Redactor.of(IngestSettings(redact=True, redact_patterns={"own": pattern}))
    kept = redactor.text(text)
    assert redactor.text(kept) == kept


def test_a_line_of_the_log_loses_its_secrets_its_traceback_too() -> None:
    formatter = ConsoleLines(content=True, redact=REDACTOR.text)
    try:
        raise ValueError(SECRET)
    except ValueError:
        record = logging.LogRecord("memd", logging.ERROR, "x.py", 1, "it was %s", (SECRET,), sys.exc_info())
    line = formatter.format(record)
    assert SECRET not in line
    assert line.count("[redacted:api_key]") == 2


# Redaction of persons: addresses, phone numbers, national ids and listed words; look-alikes; who pays for it


DATA = json.loads((Path(__file__).parent.parent / "bench" / "data" / "persons.json").read_text())
BRACKETS = re.compile(r"\[((?:[^\[\]]|\[(?:at|dot)\])*)\]")


def redactor(*persons: Any, countries: tuple[str, ...] = (), listed: tuple[str, ...] = ()) -> Redactor:
    return Redactor.of(
        IngestSettings(
            redact=True, redact_builtin=(), redact_persons=persons, redact_countries=countries, redact_words=listed
        )
    )


def test_a_country_that_is_none_is_refused_since_its_numbers_would_stay() -> None:
    with pytest.raises(ConfigError, match="redact_countries: UK is no country"):
        redactor("phone", countries=("PL", "UK"))


SENTENCES = [
    (kind, marked, (country,) if len(country) == 2 else ())
    for kind, sentences in DATA.items()
    if kind != "countries"
    for marked, country in sentences["found"]
    if country != "twice"
]


@pytest.mark.parametrize(("kind", "marked", "countries"), SENTENCES)
def test_of_a_sentence_about_a_person_the_number_or_address_is_gone_and_nothing_else(
    kind: str, marked: str, countries: tuple[str, ...]
) -> None:
    text, expected = BRACKETS.sub(r"\1", marked), BRACKETS.sub(f"[redacted:{kind}]", marked)
    if "44051401359: [" in marked:  # said twice, in brackets once
        expected = expected.replace("44051401359", "[redacted:national_id]")
    assert redactor(kind, countries=countries).text(text) == expected


@pytest.mark.parametrize("kind", ["email", "phone", "national_id"])
def test_what_only_looks_like_a_persons_is_left_alone(kind: str) -> None:
    taken = [text for text in DATA[kind]["left"] if redactor(kind).text(text) is not text]
    assert taken == (["999-99-9999"] if kind == "national_id" else []), "the ITIN has no check digit"


def test_numbers_without_country_code_or_name_are_found_in_the_countries_that_are_named() -> None:
    text = "601 234 567 and (415) 555-2671, 44051401359 and 54362315K"
    everywhere = redactor("phone", "national_id")
    assert everywhere.text(text) is text
    in_poland = redactor("phone", "national_id", countries=("PL",))
    assert in_poland.text(text) == ("[redacted:phone] and (415) 555-2671, [redacted:national_id] and 54362315K")
    both = redactor("phone", "national_id", countries=("ES", "US"))
    assert both.text(text) == "601 234 567 and [redacted:phone], 44051401359 and [redacted:national_id]"


def test_every_kind_of_id_has_its_check_and_every_layout_is_come_upon() -> None:
    for kind in persons.KINDS:
        assert all(callable(import_module(f"stdnum.{name}").is_valid) for name in kind.checks)
        for layout in (*kind.alone, *kind.at_home, *kind.named):
            assert persons._ID_BEGINS.match(re.sub("[A*]", "X", layout).replace("_", " ")), layout


LISTED = (
    "Müller", "Anna Nowak", "Łódź", "田中太郎", "김철수", "हिन्दी", "falcon", "NTT株式会社", "นายสมชาย",
    "Jean-Luc Picard", "tomasz", "Straße", "Νίκος", "ёлка", "محمد",
)  # fmt: skip
WORDS = {
    "Herr MULLER, Müllerin, Mu\u0308ller": "Herr [redacted:word], Müllerin, [redacted:word]",
    "anna  nowak, ANNA_NOWAK; Anna\n# Nowak. Annanowak": "[redacted:word], [redacted:word]; [redacted:word]. Annanowak",
    "Anna said: Nowak": "Anna said: Nowak",
    "lodz": "[redacted:word]",
    "私は田中太郎です 田中 太郎": "私は[redacted:word]です [redacted:word]",
    "김철수가 왔다": "[redacted:word]가 왔다",
    "हिन्दी में": "[redacted:word] में",
    "my_falcon_x myFalcon falcons 计划Falcon项目": "my_[redacted:word]_x myFalcon falcons 计划[redacted:word]项目",
    "ｎｔｔ株式会社 NTT 株式会社": "[redacted:word] [redacted:word]",
    "ผมนายสมชายครับ": "ผม[redacted:word]ครับ",
    "jean luc\nPICARD": "[redacted:word]",
    "C:\\home\\tomasz\\x": "C:\\home\\[redacted:word]\\x",
    '{"a": "M\\u00fcller\\nfalcon"}': '{"a": "[redacted:word]\\n[redacted:word]"}',
    "STRASSE, ΝΙΚΟΣ, елка, مُحَمَّد": "[redacted:word], [redacted:word], [redacted:word], [redacted:word]",
    "[redacted:word] word": "[redacted:word] word",
}


@pytest.mark.parametrize(("text", "expected"), WORDS.items())
def test_listed_words_are_gone_in_any_script_and_only_as_whole_words(text: str, expected: str) -> None:
    redacted = redactor(listed=LISTED).text(text)
    assert redacted == expected
    assert redactor(listed=LISTED).text(redacted) == redacted


def test_json_stays_json() -> None:
    everything = redactor("email", "phone", "national_id", listed=("Zoë",), countries=("PL",))
    text = "tel. 601234567\nzoe@example.org\nZoë\n44051401359 \U0001f600"
    for written in (json.dumps({"a": text}), json.dumps({"a": json.dumps([text])})):
        kept = everything.arguments(written)
        assert set(json.loads(kept)) == {"a"} and kept.count("[redacted:") == 4
        assert not re.search("601234567|example|Zo|44051401359", kept)


def test_a_number_at_which_its_library_fails_is_taken_for_one() -> None:
    with pytest.raises(KeyError):
        import_module("stdnum.cn.ric").is_valid("110001194912310029")
    assert redactor("national_id").text("110001194912310029") == "[redacted:national_id]"


# Work


@pytest.mark.parametrize(
    "part", ["1", "1 ", "12/12 12/12, ", "601 234 567, ", "tel 601234567 ", "+48601 ", "+1+1 ", "(12) "]
)
def test_the_library_of_phone_numbers_sees_a_few_times_the_text_at_most(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    seen: list[int] = []
    matcher = phonenumbers.PhoneNumberMatcher

    def counted(text: str, *rest: Any) -> Any:
        seen.append(len(text))
        return matcher(text, *rest)

    monkeypatch.setattr(phonenumbers, "PhoneNumberMatcher", counted)
    find = persons.phone_numbers(("PL",))
    for size in (1_000, 4_000):
        seen.clear()
        list(find((part * size)[:size]))
        assert sum(seen) <= 6 * size


# What is not asked for

IMPORTED = """
import sys
from memd.ingest.redaction.redactor import Redactor
from memd.settings.model import IngestSettings
Redactor.of(IngestSettings(redact=True)).text("anna@example.org +48 601 234 567")
print([name for name in ("phonenumbers", "stdnum", "memd.store.lexical.analyzer") if name in sys.modules])
"""


@pytest.mark.process
def test_nothing_is_imported_for_what_is_not_asked_for() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, env=clean_environment())
    assert run.stdout == "[]\n", run.stderr


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with pytest.raises(ConfigError, match=r"needs the package phonenumbers, .* pip install 'memd-proxy\[persons\]'"):
        redactor("phone")
    assert redactor("email").names == ("email",)
