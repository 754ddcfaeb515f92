"""Redaction through the real daemon: no byte under the data directory, and no line of its log, has what was said.

Rule: the witness is the bytes of every file, not what memd says about them. Every test has its counterpart without the
setting, so that it is known that the bytes would be there.
"""

import json
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, user, wait_until
from recording_upstream import RecordingUpstream, Request, Response, chat_answer

from memd.embedding.local import FINGERPRINT
from memd.receipts import KEPT_CHARACTERS
from memd.store.store import ModelId, Store, StoreShared

KEY_LINES = [f"MIIEow{line:02}q83vEjRWeJABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopq{line:02}zz" for line in range(24)]
PEM = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *KEY_LINES, "-----END RSA PRIVATE KEY-----"])
BY_USER = {
    "api_key": "sk-proj-Zk3Vn8Qw1Xy5Rt7Ub2Mc9Lp4",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "bearer_token": "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "password": "vermilion77walrus",
    "url_credentials": "t0ffee!apple",
    "card_number": "4539 1488 0343 6467",
    "ticket": "TCK-884213",
    "email": "ida.fjord@lighthouse.example.org",
    "phone": "+47 22 86 44 17",
    "national_id": "44051401359",
    "word": "Ingebrigt Skærgård",
}
BY_MODEL = "ghp_Yb6Nq2Ws8Ed4Rf1Tg7Yh3Uj9Ik5Ol0Pz6Xc2"
IN_CALL, IN_RESULT = "marmalade!59Quokka", "xoxb-274658391047-Hb7Vg3Fc9Dx"
IN_NAME = "sk_live_Wd5Kp9Zr2Tg7Bx4Nv8Hc3Mq6"
IN_SESSION, IN_CORRECTION, IN_REASON = "AKIAQ3EGRZT7WXYL2KMN", "hf_Aq1Sw2De3Fr4Gt5Hy6Ju7Ki8Lo9", "kumquat31Saxophone"
SECRETS = [*BY_USER.values(), BY_MODEL, IN_CALL, IN_RESULT, IN_NAME, IN_SESSION]
SECRETS += [IN_CORRECTION, IN_REASON, *KEY_LINES]

SETTINGS: dict[str, Any] = {
    "buffer": {"soft_tokens": 400, "hard_tokens": 900},
    "segment": {"max_entries": 20},
    "injection": {"budget_tokens": 160},
    "log": {"level": "debug"},
}
REDACTING = {
    **SETTINGS,
    "ingest": {
        "redact": True,
        "redact_patterns": {"ticket": r"TCK-\d+"},
        "redact_persons": ["email", "phone", "national_id"],
        "redact_words": ["ingebrigt skaergard"],
    },
}

SAID = [
    "The staging machine for the lighthouse has a new login. Its API key is {api_key} for now.",
    "The session token that the lamp got was {jwt} this morning.",
    "I call the barometer with 'Authorization: Bearer {bearer_token}' and it answers.",
    "In the settings of the foghorn there is password = {password} since Tuesday.",
    "The database of the ferry is at postgres://keeper:{url_credentials}@ferry.example/timetable these days.",
    "The invoice for the paint went to the card {card_number} of the harbour office, see {ticket}.",
    "The keeper of the lamp is {word} now, PESEL {national_id}: write to {email} or call {phone}.",
]


def test_no_byte_on_disk_has_a_secret_whatever_happens(serving: Serving, upstream: RecordingUpstream) -> None:
    upstream.answer = answer_with_a_secret
    daemon = serving(REDACTING)
    history = talk(daemon)
    complain(daemon)
    assert_gone(daemon)
    daemon.kill()
    assert_gone(daemon)
    daemon.start()
    correct(daemon)
    assert_gone(daemon)
    history += [user("Back again after the restart. What does the gull want?")]
    history += [{"role": "assistant", "content": daemon.chat(history, headers={"X-Memory-Session": IN_SESSION}).reply}]
    daemon.restart()
    daemon.chat([user("A new conversation, in which the former one is handed over to the log.")])
    assert daemon.terminate() == 0
    assert_gone(daemon)
    assert daemon.run("verify").returncode == 0

    for secret in [*BY_USER.values(), IN_CALL, IN_RESULT]:
        assert any(secret in prompt for prompt in upstream.prompts), "the model is told everything"
    contents = "\n".join(entry["content"] for entry in daemon.export())
    for name in (*BY_USER, "private_key"):
        assert f"[redacted:{name}]" in contents
    assert len([prompt for prompt in upstream.prompts if "[redacted:" in prompt]) > 0, "and later what is remembered"
    assert not words_in_the_index(daemon, BY_USER["password"], IN_CORRECTION, KEY_LINES[9])
    assert words_in_the_index(daemon, "barometer")


def test_who_listens_or_looks_sees_no_secret_and_what_a_receipt_keeps_does_not_end_within_one(
    serving: Serving, upstream: RecordingUpstream
) -> None:
    daemon, secret = serving(REDACTING), BY_USER["api_key"]
    daemon.chat([user(SAID[0].format(**BY_USER) + " " + SAID[3].format(**BY_USER))])
    daemon.chat([user("A new conversation.")])
    counts = ('redacted="api_key 1, password 1"', 'redacted="password 1, api_key 1"')
    wait_until(lambda: any(one in daemon.log.read_text() for one in counts), lambda: repr(daemon))
    assert json.loads(daemon.run("stats", "--json").stdout)["daemon"]["redacted"] == {"api_key": 1, "password": 1}
    assert "since its start: api_key 1, password 1." in " ".join(daemon.run("stats").stdout.split())

    with urllib.request.urlopen(f"{daemon.own_url}/memd/events", timeout=120) as stream:
        assert stream.readline() == b": memd\n"
        daemon.chat([user(f"The lighthouse has {secret}." + " " * 300 + secret)])
        told = next(line for line in stream if b"lighthouse has" in line)
    waiting = ask(f"{daemon.own_url}/memd/buffer?topic=default").body
    for shown in (told, waiting):
        assert b"[redacted:api_key]" in shown and secret[:14].encode() not in shown

    begun = 14  # of its characters are before the cut, too few to be known as a key
    text = "a " * ((KEPT_CHARACTERS - begun) // 2) + secret + " is the key."
    upstream.answer = lambda request: chat_answer(request, text)
    receipt = daemon.receipt(daemon.chat([user(text)]).headers["X-Memory-Turn"])
    assert "[redac" in receipt["asked"] and "[redac" in receipt["reply"]
    assert daemon.terminate() == 0
    files = [path for path in daemon.data_dir.rglob("*") if path.is_file()]
    assert [path.name for path in files if secret[8:begun].encode() in path.read_bytes()] == []


def test_a_secret_that_is_given_as_a_chunks_id_is_on_no_disk(serving: Serving) -> None:
    daemon = serving(REDACTING)
    daemon.chat([user(SAID[0].format(**BY_USER))])
    daemon.wait_stored("lighthouse")
    [known, *_] = shown_for(daemon, "What is new at the lighthouse?", "lighthouse")
    shapeless, hexadecimal = "vermilion-walrus-quartz", "0123456789abcdef0123456789abcdef"
    wrong = [shapeless, hexadecimal, IN_CORRECTION, "dead"]
    asked = {"corrections": [{"chunk_ids": [known, *wrong], "action": "Helpful", "reason": "r"}]}
    answer = daemon.chat([user("Good.")], memory_in=asked)
    assert [one["chunk_id"] for one in answer.json["memory_out"]["signals"]] == wrong, "its own client may know"
    assert not any(one in str(answer.headers) for one in wrong[:3])
    wait_until(lambda: b"correction_failed" in ask(f"{daemon.own_url}/memd/turns").body, lambda: repr(daemon))
    told = json.loads(daemon.run("turn", "--json").stdout)["turns"][0]
    assert [known, "dead"] == [one for one in told["corrections"][0]["chunk_ids"] if not one.startswith("redacted-")]
    assert len(told["corrections"][0]["chunk_ids"]) == 5
    assert daemon.terminate() == 0
    for secret in wrong[:3]:
        found = [path for path in daemon.data_dir.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert found == [] and secret not in daemon.log.read_text()


def test_without_the_setting_everything_is_there(serving: Serving, upstream: RecordingUpstream) -> None:
    upstream.answer = answer_with_a_secret
    daemon = serving(SETTINGS)
    talk(daemon)
    correct(daemon)
    complain(daemon)
    daemon.terminate()
    assert IN_SESSION in daemon.log.read_text()
    found = secrets_in(daemon.data_dir)
    assert {*found} >= {*SECRETS}
    assert words_in_the_index(daemon, BY_USER["password"])
    assert not any("[redacted:" in entry["content"] for entry in daemon.export())


def test_a_history_that_is_sent_again_is_not_stored_again(serving: Serving, upstream: RecordingUpstream) -> None:
    upstream.answer = answer_with_a_secret
    daemon = serving(REDACTING)
    history = talk(daemon)
    left = left_out(history[:-1], upstream)
    [known] = open_conversations(daemon)
    daemon.restart()
    for text in ("What was the first thing I said?", "And the second?"):
        history += [user(text)]
        reply = daemon.chat(history).reply
        before, left = left, left_out(history, upstream)
        assert 0 < before <= left, "what had left the prompt stays out of it"
        history += [{"role": "assistant", "content": reply}]
    assert open_conversations(daemon) == [known], "a known conversation"
    daemon.chat([user("Something new, so that the former conversation is handed over.")])
    daemon.terminate()
    contents = [entry["content"] for entry in daemon.export()]
    assert len(contents) == len(set(contents))
    assert sum("The staging machine for the lighthouse" in content for content in contents) == 1


def test_a_journal_from_before_the_setting_is_redacted_when_the_daemon_starts(serving: Serving) -> None:
    daemon = serving({})
    daemon.chat([user(SAID[3].format(**BY_USER))], headers={"X-Memory-Session": IN_SESSION})
    wait_until(lambda: {*secrets_in(daemon.data_dir)} == {BY_USER["password"], IN_SESSION}, lambda: repr(daemon))
    daemon.kill()
    daemon.configure({"ingest": {"redact": True}})
    daemon.start()
    wait_until(lambda: not secrets_in(daemon.data_dir), lambda: f"{secrets_in(daemon.data_dir)} {daemon!r}")
    daemon.kill()
    assert not secrets_in(daemon.data_dir)


def test_praise_for_an_old_chunk_does_not_write_its_secret(serving: Serving) -> None:
    daemon = serving({})
    daemon.chat([user(SAID[3].format(**BY_USER))])
    daemon.wait_stored("foghorn there is")
    daemon.terminate()
    assert [*secrets_in(daemon.data_dir)] == [BY_USER["password"]]
    daemon.configure({"ingest": {"redact": True}})
    daemon.start()
    [shown] = shown_for(daemon, "What is in the settings of the foghorn?", "foghorn there is")
    daemon.chat([user("Good.")], memory_in={"corrections": [correction(shown, "Helpful")]})
    daemon.terminate()
    chunk = [entry for entry in daemon.export() if entry["id"] == shown]
    assert [BY_USER["password"] in entry["content"] for entry in chunk] == [True, False]
    assert chunk[-1]["live"] and "password = [redacted:password] since" in chunk[-1]["content"]


def test_thin_clients_are_shown_redacted_turns_after_a_restart(serving: Serving, upstream: RecordingUpstream) -> None:
    daemon = serving({"ingest": {"redact": True}})
    thin = {"X-Memory-History": "daemon", "X-Memory-Session": IN_SESSION}
    for text in (SAID[3].format(**BY_USER), "go on"):
        daemon.chat([user(text)], headers=thin)
    assert BY_USER["password"] in upstream.prompts[-1]
    daemon.restart()
    daemon.chat([user("and on")], headers=thin)
    assert len(json.loads(upstream.prompts[-1])) == 5, "the session is known again"
    assert "[redacted:password]" in upstream.prompts[-1]
    assert BY_USER["password"] not in upstream.prompts[-1]


@pytest.mark.parametrize("redact", [True, False])
def test_an_import_is_redacted_also_where_a_chunk_is_the_middle_of_a_key(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path, redact: bool
) -> None:
    upstream.answer = answer_with_a_secret
    source = make_daemon(upstream.url, SETTINGS).start()
    talk(source)
    correct(source)
    source.terminate()
    file = tmp_path / "everything.jsonl"
    file.write_text(source.run("export").stdout)
    with file.open("a") as more:
        more.write(json.dumps([user("Another one: " + SAID[0].format(**BY_USER) + "\n" + PEM)]) + "\n")
    daemon = make_daemon(upstream.url, REDACTING if redact else SETTINGS)
    done = daemon.run("import", str(file), "--config", str(daemon.config))
    assert done.returncode == 0, done.stderr
    assert ("redacted: " in done.stdout) is redact
    assert bool(secrets_in(daemon.data_dir)) is not redact
    entries = len(daemon.export())
    again = daemon.run("import", str(file), "--config", str(daemon.config))
    assert again.returncode == 0
    assert len(daemon.export()) == entries, "what is there is known, redacted or not"
    assert bool(secrets_in(daemon.data_dir)) is not redact


# -- what is said, and what is looked at ------------------------------------------------------------------------------


def answer_with_a_secret(request: Request) -> Response:
    return chat_answer(request, f"Noted. My own token is {BY_MODEL} by the way, and the weather is fine.")


def talk(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """A conversation in which every secret is said, long enough that most of it is stored; returns the history."""
    history: list[dict[str, Any]] = []
    call = {"name": "deploy", "arguments": json.dumps({"env": f"export DB_PASSWORD='{IN_CALL}'\nrun", "key": PEM})}
    exchanges: list[list[dict[str, Any]]] = [[user(text.format(**BY_USER))] for text in SAID]
    exchanges.append([user(f"This is the key of the signal station:\n\n{PEM}\n\nKeep it safe.")])
    exchanges.append(
        [
            {**user("Deploy it please."), "name": IN_NAME},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c1", "content": f'{{"ok": true, "log": "posted as {IN_RESULT}\\n"}}'},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": "\n".join(f"ferry {number} left" for number in range(99)),
            },
        ]
    )
    exchanges += [
        [user(f"And now number {number} of the list of things about the gull, please.")] for number in range(9)
    ]
    for exchange in exchanges:
        history += exchange
        history.append(
            {"role": "assistant", "content": daemon.chat(history, headers={"X-Memory-Session": IN_SESSION}).reply}
        )
    return history


def left_out(history: list[dict[str, Any]], upstream: RecordingUpstream) -> int:
    """How many messages of the history that was sent last were not in its prompt."""
    return len(history) - len(json.loads(upstream.prompts[-1]))


def open_conversations(daemon: DaemonProcess) -> list[str]:
    """The ids of the conversations that are open."""
    talks = ask(f"{daemon.base_url}/memd/buffer?topic=default").json["conversations"]
    return [talk["conversation"] for talk in talks]


def correct(daemon: DaemonProcess) -> None:
    asked = "To which card of the harbour office did the invoice for the paint go?"
    [wrong] = shown_for(daemon, asked, "invoice for the paint")[:1]
    update = correction(wrong, "Update", f"The API of the harbour office takes {IN_CORRECTION} instead.")
    answer = daemon.chat([user("That has changed.")], memory_in={"corrections": [update]})
    assert "correction_failed" not in json.dumps(answer.json["memory_out"])


def complain(daemon: DaemonProcess) -> None:
    """Make memd say something in its log that quotes a secret."""
    daemon.chat([user("hello")], headers={"Origin": f"http://{IN_SESSION}.example"})
    wait_until(lambda: "a web page gets no memory" in daemon.log.read_text(), lambda: repr(daemon))


def correction(chunk_id: str, action: str, content: str | None = None) -> dict[str, Any]:
    given = {} if content is None else {"content": content}
    return {"chunk_ids": [chunk_id], "action": action, "reason": f"because password: {IN_REASON}", **given}


def shown_for(daemon: DaemonProcess, question: str, words: str) -> list[str]:
    """The ids of the chunks that are recalled for a question and have these words."""
    chunks = daemon.chat([user(question)], memory_in={}).json["memory_out"]["injected_chunks"]
    wait_until(lambda: {one["id"] for one in chunks} <= {one["id"] for one in daemon.export()}, lambda: repr(chunks))
    contents = {entry["id"]: entry["content"] for entry in daemon.export()}
    return [chunk["id"] for chunk in chunks if words in contents[chunk["id"]]]


def secrets_in(folder: Path) -> dict[str, str]:
    """Each secret that is in the bytes of a file below the folder, as it is or as JSON has it, and the file's name."""
    data: dict[Path, bytes] = {}
    for path in folder.rglob("*"):
        try:
            data[path] = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:
            continue  # a running daemon has replaced it
    return {
        secret: path.name
        for secret in SECRETS
        for path, content in data.items()
        if any(form in content for form in forms(secret))
    }


def forms(secret: str) -> Iterable[bytes]:
    yield secret.encode()
    yield json.dumps(secret)[1:-1].encode()
    yield secret.encode("utf-16-le")
    if "-" in secret or " " in secret:
        yield secret.replace("-", "").replace(" ", "").encode()


def assert_gone(daemon: DaemonProcess) -> None:
    assert not secrets_in(daemon.data_dir)
    assert daemon.log.read_bytes(), "it said something"
    assert not secrets_in(daemon.log.parent), "nor has its log"


def words_in_the_index(daemon: DaemonProcess, *words: str) -> bool:
    """Whether a stopped daemon's topic finds one of these words."""
    store = Store(daemon.data_dir, StoreShared(model=ModelId(384, FINGERPRINT), segment_entries_max=20))
    try:
        topic = store.topic("default")
        topic.load()
        return any(topic.snapshot().places_with(word) for word in words)
    finally:
        store.close()
