"""The package for TypeScript programs, `clients/typescript`: through the real daemon, the SDKs and llama.cpp.

Rule: a stand-in answers only where a server has to fail or to lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import openai_responses
import pytest
from conftest import REPLY, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import DaemonProcess
from raw_wire import Peer, RawUpstream
from recording_upstream import RecordingUpstream, Request, Response, chat_answer
from typescript_package import AI_SDKS, TypeScriptPackage, examples

from memd.entries import Correction
from memd.notes import Note
from memd.selection import Selection
from memd.wire.sideband import InjectedChunk, MemoryOut, NoteOut, Signal, decode_memory_in, encode_memory_out

FACT = "The release word for the lighthouse lamp is cinnamon-42."
QUESTION = "What is the release word for the lighthouse lamp?"
NEW_FACT = "user: The release word for the lighthouse lamp is nutmeg-7."
UNKNOWN = "ffffffff"
MOMENT = 1_700_000_000_000_000
"""As in the package's own test/types.ts."""
CREATE = [
    *("openai chat", "openai responses", "anthropic"),
    *("ai compatible", "ai openai chat", "ai openai responses"),
]
STREAM = [name for name in CREATE if name != "ai openai responses"]  # which cannot read llama.cpp's events
WAYS = [
    *[(name, how, 7) for how, names in (("create", CREATE), ("stream", STREAM)) for name in names],
    *[(name, how, ai) for ai in (5, 6) for how in ("create", "stream") for name in ("ai compatible", "ai openai chat")],
    *[("ai openai responses", "create", ai) for ai in (5, 6)],
]
"""An SDK's API, how it is called, and the AI SDK's version."""
NOWHERE = "http://127.0.0.1:9"  # the port of a service that nobody runs
HELPFUL = {"chunk_ids": [UNKNOWN], "action": "Helpful", "reason": "it answered the question"}


def asked(url: str, question: str, sdk: str = "openai chat", how: str = "create", **more: Any) -> dict[str, Any]:
    return {"sdk": sdk, "how": how, "base_url": f"{url}/v1", "question": question, **more}


def squeezed(text: str) -> str:
    return text.replace(" ", "")


def shown_after_telling(package: TypeScriptPackage, daemon: DaemonProcess, sdk: str, how: str, **memory: Any) -> str:
    """Tell a fact and ask for it; the id of the chunk that the model was shown."""
    url = daemon.base_url
    told = package.steps("steps.ts", [asked(url, FACT, sdk, how), asked(url, QUESTION, sdk, how)], **memory)
    assert [one["error"] for one in told] == [None, None]
    assert squeezed(told[1]["reply"]) == squeezed("".join(REPLY_WITH_MEMORY))
    assert told[0]["memory_out"] == {"injected_chunks": []}
    [chunk] = told[1]["memory_out"]["injected_chunks"]
    headers = {"status": "injected", "injected": [chunk["id"]], "mode": "full"}
    assert {name: told[1]["headers"][name] for name in headers} == headers
    assert told[1]["headers"]["turn"] != told[0]["headers"]["turn"]
    chunk_id = chunk["id"]
    assert isinstance(chunk_id, str)
    return chunk_id


def live(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    """The present state of every chunk that is live, by its id."""
    entries = {entry["id"]: entry for entry in daemon.export()}
    return {name: entry for name, entry in entries.items() if entry["live"]}


# -- the package itself ------------------------------------------------------------------------------------------


def test_the_types_are_those_of_memd(memd_client: TypeScriptPackage) -> None:
    # What is read: whatever memd can say is assignable, and an object literal may have no member that the type lacks.
    chunk = InjectedChunk(id="a3f9", topic_id="office", canonical_id=1)
    kinds = get_args(get_type_hints(Signal)["type"])
    assert set(kinds) == {"context_pressure", "context_overflow", "correction_failed", "taken_out", "memory_in_refused"}
    fills = [Signal(type=kind, fill_ratio=1.5) for kind in kinds if kind.startswith("context_")]
    notes = (NoteOut(("b2e1",), duplicate=True), NoteOut(error="readonly"))
    told = (
        *(Signal(type=one, chunk_id="b2e1") for one in ("correction_failed", "taken_out")),
        Signal(type="memory_in_refused", reason="no action"),
    )
    whole = MemoryOut((chunk,), (*fills, *told), notes)
    outs = [encode_memory_out(out).decode() for out in (whole, MemoryOut(()))]
    lines = [f"export const out{number}: MemoryOut = {out};\n" for number, out in enumerate(outs)]
    memd_client.write("wire.ts", "import type { MemoryOut } from 'memd-client';\n" + "".join(lines))
    programs = {heading: program for heading, program in examples().items() if heading != "CommonJS"}
    for ai in AI_SDKS:
        package = memd_client.with_ai_sdk(ai)
        for number, (heading, program) in enumerate(programs.items()):
            package.write(f"readme{number}.ts", program)
            assert "memd-client" in program, heading
        package.check_types()
    # What is written: memd reads it, and no member of memd's is left at its default.
    memory_in = decode_memory_in(memd_client.run("types.ts").encode())
    assert memory_in.topic_id == "office"
    assert memory_in.related_topic_ids == ("company-wide",)
    assert memory_in.corrections == (
        Correction(("a3f9",), "Update", "we moved", "The office is in Bergen."),
        Correction(("b2e1",), "Helpful", "it answered the question", steps=10),
    )
    assert memory_in.notes == (Note("Lamps are in the attic.", "Lamps", ("ops",), MOMENT + 3, "wiki"),)
    assert memory_in.filter == Selection(
        MOMENT + 1, MOMENT + 2, kinds=("turn",), sources=("handbook.md",), tags=("ops",)
    )
    assert len(memory_in.__struct_fields__) == 5


def example(package: TypeScriptPackage, daemon: DaemonProcess, heading: str) -> list[str]:
    """Run a program of the README; the lines that it wrote."""
    program = examples()[heading]
    assert program.count("http://127.0.0.1:876") == 1
    program = program.replace("http://127.0.0.1:8765", daemon.base_url).replace("http://127.0.0.1:8766", daemon.own_url)
    name = "example.cjs" if heading == "CommonJS" else "example.ts"
    package.write(name, program)
    return package.run(name).splitlines()


def test_the_readme_s_example_with_openai_node_does_what_it_says(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    told, answer, ids, corrected, pending = example(memd_client, daemon, "openai-node")
    assert [told, answer, corrected] == ["".join(REPLY), "".join(REPLY_WITH_MEMORY), "".join(REPLY_WITH_MEMORY)]
    assert pending == "0 corrections wait"
    [old] = [entry for entry in daemon.export() if "7340" in entry["content"]]
    assert ids == f"[ '[mem:{old['id']}] of bike-workshop' ]"
    contents = [entry["content"] for entry in live(daemon).values()]
    assert "Decision: the booking API listens on port 8443." in contents
    assert old["id"] not in live(daemon)


@pytest.mark.parametrize("ai", AI_SDKS)
def test_the_readme_s_example_with_the_ai_sdk_does_what_it_says(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, ai: int
) -> None:
    reply = "".join(REPLY_WITH_MEMORY)
    assert example(memd_client.with_ai_sdk(ai), daemon, "AI SDK") == [
        f"{reply} 1 injected",
        f"{reply} 0 corrections wait, 0 signals",
    ]
    [marta] = [entry for entry in live(daemon).values() if "never e-mail" in entry["content"]]
    assert (marta["action"], marta["utility_multiplier"]) == ("Helpful", 1.5)


def test_the_readme_s_example_without_a_model_does_what_it_says(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    assert example(memd_client, daemon, "Without a model") == [
        "1 chunk",
        "[ 'Keys: The spare keys hang behind the compressor.' ]",
        "0 failed",
        "[",
        "  'replacement: The spare keys are with Marta.',",
        "  'Update: The spare keys hang behind the compressor.'",
        "] true",
        "400 memd-client: there is no topic 'nobody'; `memd stats` lists them",
    ]


def test_the_readme_s_other_examples_do_what_they_say(memd_client: TypeScriptPackage, daemon: DaemonProcess) -> None:
    assert example(memd_client, daemon, "Whole requests") == ["200 none readonly"]
    assert example(memd_client, daemon, "CommonJS") == ["200 full"]
    assert set(examples()) == {"openai-node", "AI SDK", "Without a model", "Whole requests", "CommonJS"}
    assert not [entry for entry in daemon.export() if "Nobody" in entry["content"]]


# -- with every SDK ----------------------------------------------------------------------------------------------


def check_round(package: TypeScriptPackage, daemon: DaemonProcess, sdk: str, how: str) -> None:
    """A fact is told, recalled and replaced by a correction; an id that is unknown is told."""
    chunk_id = shown_after_telling(package, daemon, sdk, how, topic="lighthouse")
    replaced = {"chunk_ids": [chunk_id, UNKNOWN], "action": "Update", "reason": "it leaked", "content": NEW_FACT}
    step = asked(daemon.base_url, "Thank you.", sdk, how, corrections=[replaced])
    [told] = package.steps("steps.ts", [step], topic="lighthouse")
    assert {"type": "correction_failed", "chunk_id": UNKNOWN} in told["memory_out"]["signals"]
    assert (told["pending"], told["refused"]) == (0, 0)
    entries = daemon.export()
    [old] = [entry for entry in entries if entry["id"] == chunk_id and not entry["live"]][-1:]
    [new] = [entry for entry in entries if entry["content"] == NEW_FACT]
    assert (old["reason"], new["live"], new["topic_id"]) == ("it leaked", True, "lighthouse")


@pytest.mark.parametrize(("sdk", "how", "ai"), WAYS)
def test_an_sdk_s_requests_are_remembered_recalled_and_corrected(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, sdk: str, how: str, ai: int
) -> None:
    check_round(memd_client.with_ai_sdk(ai), daemon, sdk, how)


@pytest.mark.parametrize("ai", AI_SDKS)
def test_the_ai_sdk_s_responses_are_streamed_with_memory(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream, ai: int
) -> None:
    upstream.answer = openai_responses.answer  # OpenAI's events, which this provider insists on
    check_round(memd_client.with_ai_sdk(ai), make_daemon(upstream.url).start(), "ai openai responses", "stream")


@pytest.mark.parametrize(("sdk", "how", "ai"), WAYS)
def test_a_server_that_is_no_memd_answers_as_without_the_package(
    memd_client: TypeScriptPackage, llama: str, sdk: str, how: str, ai: int
) -> None:
    package = memd_client.with_ai_sdk(ai)
    [told] = package.steps("steps.ts", [asked(llama, QUESTION, sdk, how, corrections=[HELPFUL])], topic="a")
    assert squeezed(told["reply"]) == squeezed("".join(REPLY))
    # Corrections stay where they are: nobody took them.
    assert told == {**told, "memory_out": None, "headers": None, "pending": 1, "refused": 0, "error": None}


@pytest.mark.parametrize("ai", AI_SDKS)
def test_the_middleware_shows_raw_chunks_only_if_asked_and_keeps_the_provider_s_metadata(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, ai: int
) -> None:
    told = json.loads(memd_client.with_ai_sdk(ai).run("parts.ts", {"base_url": f"{daemon.base_url}/v1"}))
    assert [one["raw"] > 0 for one in told] == [False, False, True]
    for one in told:
        assert set(one["metadata"]) == {"provider", "memd"}
        assert set(one["metadata"]["memd"]) == {"status", "injected", "mode", "turn", "memory_out"}


def test_a_related_topic_is_searched(memd_client: TypeScriptPackage, daemon: DaemonProcess) -> None:
    memd_client.steps("steps.ts", [asked(daemon.base_url, FACT), asked(daemon.base_url, "Hi.")], topic="company-wide")
    step = asked(daemon.base_url, QUESTION)
    [told] = memd_client.steps("steps.ts", [step], topic="workshop", relatedTopics=["company-wide"])
    assert "company-wide" in [chunk["topic_id"] for chunk in told["memory_out"]["injected_chunks"]]


# -- the queue of corrections ------------------------------------------------------------------------------------


def test_corrections_wait_until_memd_is_there_and_are_applied_once(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    chunk_id = shown_after_telling(memd_client, daemon, "openai chat", "create")
    first = {**HELPFUL, "chunk_ids": [chunk_id], "reason": "first"}
    second = {**HELPFUL, "chunk_ids": [chunk_id], "reason": "second"}
    steps = [
        asked(NOWHERE, "Thanks.", corrections=[first]),
        asked(NOWHERE, "Thanks.", "ai compatible", "stream"),
        asked(daemon.base_url, "Thank you.", corrections=[second]),
        asked(daemon.base_url, "Goodbye."),
    ]
    told = memd_client.steps("steps.ts", steps)
    assert [one["pending"] for one in told] == [1, 1, 0, 0]
    assert [one["error"] is None for one in told] == [False, False, True, True]
    assert [entry["reason"] for entry in daemon.export() if entry["action"] == "Helpful"] == ["first", "second"]
    assert live(daemon)[chunk_id]["utility_multiplier"] == 2.25


@pytest.mark.parametrize("sdk", ["openai chat", "anthropic", "ai compatible"])
def test_an_sdk_s_own_retry_applies_a_correction_once(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream, llama: str, sdk: str
) -> None:
    daemon = make_daemon(llama).start()
    chunk_id = shown_after_telling(memd_client, daemon, sdk, "create")
    daemon.terminate()
    failures = iter([Response((b'{"error": {"message": "loading"}}',), status=503)])

    def answer(request: Request) -> Response:
        failed = next(failures, None)
        return failed or (anthropic_answer() if sdk == "anthropic" else chat_answer(request))

    upstream.answer = answer
    daemon.upstream = upstream.url
    daemon.start()
    correction = {**HELPFUL, "chunk_ids": [chunk_id]}
    [told] = memd_client.steps(
        "steps.ts", [asked(daemon.base_url, "Thanks.", sdk, corrections=[correction], retries=1)]
    )
    assert (told["reply"], told["pending"], next(failures, None)) == ("Noted.", 0, None)
    assert live(daemon)[chunk_id]["utility_multiplier"] == 1.5


def anthropic_answer() -> Response:
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "recorded", "stop_reason": "end_turn"}
    content = [{"type": "text", "text": "Noted."}]
    return Response((json.dumps({**body, "content": content, "usage": {}}).encode(),))


@pytest.mark.parametrize("headers", [{"X-Memory-Mode": "readonly"}, {"X-Memory-Mode": "off"}], ids=["readonly", "off"])
def test_corrections_wait_while_the_mode_leaves_no_trace(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, headers: dict[str, str]
) -> None:
    chunk_id = shown_after_telling(memd_client, daemon, "openai chat", "create")
    correction = {**HELPFUL, "chunk_ids": [chunk_id]}
    for how in ("create", "stream"):
        step = asked(daemon.base_url, "Thanks.", how=how, corrections=[correction], headers=headers)
        [told] = memd_client.steps("steps.ts", [step])
        assert (told["pending"], told["headers"]["mode"]) == (1, headers["X-Memory-Mode"])
    assert live(daemon)[chunk_id]["utility_multiplier"] == 1.0


def test_a_correction_that_memd_cannot_read_costs_one_request_its_memory_and_is_kept_apart(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    steps = [
        asked(daemon.base_url, FACT, corrections=[{**HELPFUL, "action": "Delete"}]),
        asked(daemon.base_url, FACT),
        asked(daemon.base_url, QUESTION),
    ]
    told = memd_client.steps("steps.ts", steps)
    assert [one["headers"]["status"] for one in told] == ["bad-memory-in", "none", "injected"]
    assert [(one["pending"], one["refused"]) for one in told] == [(0, 1)] * 3


@pytest.mark.parametrize("sdk", ["openai chat", "anthropic"])
def test_a_stream_that_is_left_early_has_said_what_became_of_the_corrections(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, sdk: str
) -> None:
    [told] = memd_client.steps("steps.ts", [asked(daemon.base_url, "Hi.", sdk, "leave", corrections=[HELPFUL])])
    assert (told["pending"], told["error"]) == (0, None)


# -- servers that fail or lie ------------------------------------------------------------------------------------

CHUNK = {"id": "a3f9", "topic_id": "default", "canonical_id": 1}
ODD: list[tuple[Any, Any]] = [
    ("injected", None),
    (None, None),
    ([], None),
    ({}, None),
    ({"injected_chunks": {"id": "a3f9"}}, None),
    (
        {"injected_chunks": [None, 1, "a3f9", {"id": 1}, {**CHUNK, "canonical_id": "1"}, CHUNK]},
        {"injected_chunks": [CHUNK]},
    ),
    (
        {
            "injected_chunks": [],
            "signals": [{"type": "novel"}, {"type": "context_overflow"}, {"type": "correction_failed"}],
        },
        {"injected_chunks": []},
    ),
    ({"injected_chunks": [], "signals": "none"}, {"injected_chunks": []}),
]


def lying(memory_out: Any, headers: dict[str, str] | None = None, status: int = 200) -> Callable[[Request], Response]:
    """Answers of a server that adds this `memory_out` and these headers to a chat completion."""

    def answer(request: Request) -> Response:
        honest = chat_answer(request)
        member = b', "memory_out": ' + json.dumps(memory_out).encode()
        first, *rest = honest.parts
        end = first.rindex(b"}")
        parts = (first[:end] + member + first[end:], *rest)
        return honest._replace(parts=parts, status=status, headers=(*honest.headers, *(headers or {}).items()))

    return answer


@pytest.mark.parametrize("how", ["create", "stream"])
@pytest.mark.parametrize("sdk", ["openai chat", "ai compatible"])
def test_an_odd_memory_out_is_left_out_and_breaks_nothing(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, sdk: str, how: str
) -> None:
    answers = iter([lying(said) for said, _ in ODD])
    upstream.answer = lambda request: next(answers)(request)
    told = memd_client.steps("steps.ts", [asked(upstream.url, "Hi.", sdk, how) for _ in ODD])
    assert [squeezed(one["reply"]) for one in told] == ["Noted."] * len(ODD)
    assert [one["memory_out"] for one in told] == [read for _, read in ODD]


@pytest.mark.parametrize("status", [400, 429, 503])
def test_an_error_puts_corrections_back_whatever_it_says(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, status: int
) -> None:
    upstream.answer = lying({"injected_chunks": []}, status=status)
    [told] = memd_client.steps("steps.ts", [asked(upstream.url, "Hi.", corrections=[HELPFUL])])
    assert told["error"] is not None
    assert told["pending"] == 1


def test_a_stream_that_breaks_off_puts_corrections_back(memd_client: TypeScriptPackage, raw: RawUpstream) -> None:
    def script(peer: Peer) -> None:
        peer.read_body()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        peer.send(b'f\r\ndata: {"a": 1}\n\r\n')
        peer.abort()

    raw.script = script
    step = {"url": f"{raw.url}/v1/chat/completions", "method": "POST", "body": "{}", "corrections": [HELPFUL]}
    [told] = memd_client.steps("fetch.ts", [step])
    assert (told["status"], told["error"]) == (200, "TypeError")  # it began well
    assert told["pending"] == [HELPFUL]


@pytest.mark.parametrize("there", [True, False])
def test_corrections_that_come_back_go_before_those_that_came_meanwhile(
    memd_client: TypeScriptPackage, llama: str, there: bool
) -> None:
    first, second, third = ({**HELPFUL, "reason": reason} for reason in ("first", "second", "third"))
    step = {"url": f"{llama if there else NOWHERE}/v1/chat/completions", "method": "POST"}
    step["body"] = json.dumps({"messages": [{"role": "user", "content": "Hi."}]})
    [told] = memd_client.steps("fetch.ts", [{**step, "corrections": [first, second], "meanwhile": [third]}])
    assert told["status"] == (200 if there else 0)
    assert told["pending"] == [first, second, third]


def test_notes_go_out_with_the_next_request_and_wait_until_memd_says_that_it_took_them(
    memd_client: TypeScriptPackage, served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    note = {"content": "The spare lamp is behind the rope.", "title": "Lamp", "tags": ["house"]}
    step = {"url": f"{served.base_url}/chat/completions", "method": "POST"}
    step["body"] = json.dumps({"messages": [{"role": "user", "content": "Where is the spare lamp?"}]})
    nowhere = {**step, "url": f"{NOWHERE}/v1/chat/completions"}
    told = memd_client.steps("fetch.ts", [{**nowhere, "notes": [note]}, step, step])
    assert [one["notes"] for one in told] == [[note], [], []]
    assert len(json.loads(told[1]["body"])["memory_out"]["notes"][0]["chunk_ids"]) == 1
    assert "(note: Lamp, tagged house) The spare lamp" in upstream.prompts[-1]
    assert "memory_out" in told[2]["body"] and '"notes"' not in told[2]["body"]


# -- what passes untouched ---------------------------------------------------------------------------------------

UNTOUCHED = [
    ("GET", "/v1/models", None),
    ("POST", "/v1/embeddings", '{"input": "Hi."}'),
    ("POST", "/v1/messages/count_tokens", '{"messages": []}'),
    ("POST", "/v1/chat/completions", "no JSON"),
    ("POST", "/v1/chat/completions", '[{"messages": []}]'),
    ("POST", "/v1/chat/completions", '{"messages": [],  "memory_in": {}}'),
    ("POST", "/v1/chat/completions", '{"messages": [],  "metadata": {"memory_in": "{}"}}'),
    ("POST", "/v1/chat/completions", '{"messages": [],  "metadata": "odd"}'),
]


@pytest.mark.parametrize(("method", "path", "body"), UNTOUCHED)
def test_what_is_no_request_to_a_model_passes_untouched(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, method: str, path: str, body: str | None
) -> None:
    step = {"url": upstream.url + path, "method": method, "corrections": [HELPFUL]}
    [told] = memd_client.steps("fetch.ts", [step if body is None else {**step, "body": body}])
    [request] = upstream.requests
    assert (request.method, request.target, request.body) == (method, path, (body or "").encode())
    assert told["pending"] == [HELPFUL]


@pytest.mark.parametrize(
    ("stream", "piece_bytes", "line_end"),
    [(False, 0, b"\n"), (False, 7, b"\r"), (True, 0, b"\n"), (True, 1, b"\r\n"), (True, 7, b"\r"), (True, 7, b"\r\n")],
)
def test_an_answer_is_read_along_and_its_bytes_stay(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, stream: bool, piece_bytes: int, line_end: bytes
) -> None:
    def answer(request: Request) -> Response:
        told = lying({"injected_chunks": [], "said": "Grüße an 東京"})(request)
        return told._replace(parts=(b"".join(told.parts).replace(b"\n", line_end),))

    upstream.answer = answer
    body = {"messages": [{"role": "user", "content": "Grüße"}], "stream": stream, "metadata": {"user": "marta"}}
    url = f"{upstream.url}/v1/chat/completions"
    step = {"url": url, "method": "POST", "body": json.dumps(body), "corrections": [HELPFUL], "slice": piece_bytes}
    [told] = memd_client.steps("fetch.ts", [step])
    [request] = upstream.requests
    sent = json.loads(request.body)
    memory_in = json.loads(sent["metadata"].pop("memory_in"))
    assert sent == body
    assert memory_in == {"corrections": [HELPFUL]}
    assert told["body"].encode() == answer(request).parts[0]
    assert (told["status"], told["pending"]) == (200, [])
    assert told["url"] == ("" if piece_bytes else url)  # in pieces it comes from a `fetch` that names none
