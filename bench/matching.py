"""Matching a request, and the journal of a history that is rewritten at every step.

    python bench/matching.py

256 open conversations of 500 messages, all of which begin alike. Requests of 500 messages are placed in one of them:
the next turn, a retry, an edit, a deletion, a first message replaced, results pruned, the front trimmed, a history that
nobody knows. One line each: median and 99th percentile of the time that the event loop is held, for finding the place
and for all that the buffer does with it. Then the bytes of `hot.log` over the bytes said, for a client that prunes its
results at each of 500 steps: as written while it happens, and as rewritten at the end.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

from memd.conversation.conversation import History
from memd.conversation.events import Closed, encode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.conversation.matching import match
from memd.messages import Message, ToolCall

CONVERSATIONS = 256
MESSAGES = 500
ROUNDS = 200
STEPS = 500
RESULTS_KEPT = 8
"""Tool results that the pruning client keeps (opencode keeps the last 40,000 tokens of them)."""

Said = list[Message]


def spoken(conversation: int, count: int) -> Said:
    """A conversation that begins like all others; every tenth message is one that everybody says."""
    history = [Message("user", "Read the document."), Message("assistant", "I have read it.")]
    for number in range(2, count):
        role = "assistant" if number % 2 else "user"
        history.append(Message(role, "yes" if number % 10 == 0 else f"{conversation}: message {number} " + "x " * 40))
    return history


def new_buffer() -> HotBuffer:
    """An empty one."""
    names = itertools.count()
    return HotBuffer(lambda: f"{next(names):012d}", 64)


def twenty(messages: Sequence[Message], _: object) -> list[int]:
    """The tokens of each."""
    return [20] * len(messages)


def receive(buffer: HotBuffer, history: Said, digests: list[bytes] | None = None) -> None:
    """A request with this history."""
    contents = digests or [message.content_digest for message in history]
    buffer.receive(History(history, contents, twenty), 0.0)


def rewritings(rng: random.Random) -> dict[str, Callable[[Said], Said]]:
    """What a client may make of a history for its next request."""
    said = itertools.count()

    def new() -> Message:
        return Message("user", f"something new {next(said)}")

    def pruned(history: Said) -> Said:
        chosen = set(rng.sample(range(len(history) - 20), 40))
        return [Message(m.role, "[cleared]") if i in chosen else m for i, m in enumerate(history)]

    def without_pair(history: Said) -> Said:
        place = rng.randrange(2, len(history) - 20)
        return history[:place] + history[place + 2 :]

    def edited(history: Said) -> Said:
        place = rng.randrange(2, len(history) - 20)
        return [*history[:place], new(), *history[place + 1 :]]

    return {
        "the next turn": lambda history: [*history, new()],
        "a retry": lambda history: history,
        "an edit at the end": lambda history: [*history[:-2], new()],
        "an edit in the middle": lambda history: [*edited(history), new()],
        "a pair deleted": lambda history: [*without_pair(history), new()],
        "the first message replaced": lambda history: [new(), *history[1:], new()],
        "forty results pruned": lambda history: [*pruned(history), new()],
        "the front trimmed": lambda history: [*history[200:], new()],
        "unknown": lambda history: [Message("user", f"{next(said)} {n}") for n in range(len(history))],
    }


def measure_matching() -> Iterator[str]:
    """One line for each kind of request."""
    rng = random.Random(1)
    histories = [spoken(number, MESSAGES) for number in range(CONVERSATIONS)]
    for name, rewritten in rewritings(rng).items():
        finding, whole = [], []
        buffer = new_buffer()
        for history in histories:
            receive(buffer, history)
        for _ in range(ROUNDS):
            request = rewritten(rng.choice(histories))
            contents = [message.content_digest for message in request]
            gc.collect(0)
            started = time.perf_counter()
            match(buffer._index, History(request, contents, twenty))
            found = time.perf_counter()
            receive(buffer, request, contents)
            finding.append(found - started)
            whole.append(time.perf_counter() - found)
            buffer.take_unsaved()
            if len(buffer.conversations()) > CONVERSATIONS:  # as if the archiver had closed it
                buffer.record(Closed(buffer.conversations()[-1].id))
        yield f"{name:28} {_times(finding)}   {_times(whole)}"


def _times(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2] * 1e3:6.3f} {ordered[int(len(ordered) * 0.99)] * 1e3:6.3f} ms"


def measure_journal() -> str:
    """Bytes of the journal over bytes said."""
    buffer = new_buffer()
    history: Said = [Message("user", "Read the files.")]
    said = 0
    for step in range(STEPS):
        call = Message("assistant", "", tool_calls=(ToolCall(f"call_{step}", "read", f'{{"path": "{step}.txt"}}'),))
        result = Message("tool", f"content of file {step}: " + "word " * 40, tool_call_id=f"call_{step}")
        said += len(result.text) + len(call.tool_calls[0].arguments) + len("read")
        results = [place for place, message in enumerate(history) if message.role == "tool"][:-RESULTS_KEPT]
        for place in results:
            history[place] = Message("tool", "[cleared]", tool_call_id=history[place].tool_call_id)
        contents = [message.content_digest for message in history]
        arrival = buffer.receive(History(history, contents, twenty), float(step))
        buffer.reply(arrival, call, 20, float(step))
        history += [call, result]
        for branch in buffer.conversations()[:-1]:
            buffer.record(Closed(branch.id))
    live = sum(len(encode_event(event)) + 8 for event in buffer.take_unsaved())
    short = sum(len(encode_event(event)) + 8 for event in buffer.retelling()())
    return f"{said:,} bytes said, {live:,} journalled ({live / said:.2f} times), {short:,} after rewriting"


def main() -> None:
    """Print the table."""
    print(f"{'':28} {'found':^16}   {'and taken in':^16}")
    for line in measure_matching():
        print(line)
    print(measure_journal())


if __name__ == "__main__":
    main()
