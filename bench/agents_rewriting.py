"""Clients that rewrite what they sent, in bench/agents.py: issue 17's number 12, parts of 13 and 16.

Rule: each client tells everything once and rewrites its history as the program that is named does; what the log has
more than once is memd's doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from agents_leaving import Finding, Scenario, Stage, assistant, at_most, user
from agents_replay import House, house, stored
from agents_runs import Words

Json = dict[str, Any]

TURN_TOKENS, REPLY_TOKENS = 260, 160
WINDOW = 8192
SETTLING_SECONDS = 9.0


class Exchange(NamedTuple):
    """A question, the reasoning in front of its answer, and the answer."""

    asked: str
    thought: str
    answered: str


Rewritten = Callable[[list[Exchange], str], list[Json]]
"""What a client sends: what was said so far, and the new question."""


def _whole(said: list[Exchange], asked: str) -> list[Json]:
    return [*(one for each in said for one in (user(each.asked), assistant(each.answered))), user(asked)]


def _think_stripped(said: list[Exchange], asked: str) -> list[Json]:
    """Reasoning is kept in the latest answer and stripped from older ones: Open WebUI, Qwen's template, LibreChat."""
    messages = _whole(said, asked)
    if said:
        messages[-2] = assistant(f"<think>\n{said[-1].thought}\n</think>\n\n{said[-1].answered}")
    return messages


REMINDER = (
    "# *SEARCH/REPLACE block* Rules:\n\nEvery *SEARCH/REPLACE block* must use this format:\n"
    "1. The *FULL* file path alone on a line, verbatim. No bold asterisks, no quotes around it.\n"
    "2. The opening fence and code language, eg: ```python\n3. The start of search block: <<<<<<< SEARCH\n"
    "4. A contiguous chunk of lines to search for in the existing source code\n5. The dividing line: =======\n"
    "6. The lines to replace into the source code\n7. The end of the replace block: >>>>>>> REPLACE\n"
    "8. The closing fence: ```\n\n"
    "Use the *FULL* file path, as shown to you by the user.\nONLY EVER RETURN CODE IN A *SEARCH/REPLACE BLOCK*!"
)
"""Aider-AI/aider aider/coders/editblock_prompts.py, shortened."""


def _reminder_moved(said: list[Exchange], asked: str) -> list[Json]:
    """The reminder stands in the latest user message and nowhere else: Aider, `reminder: user`."""
    return _whole(said, f"{asked}\n\n{REMINDER}")


def _pair_deleted(said: list[Exchange], asked: str) -> list[Json]:
    """The third exchange goes when six are there, the seventh when ten are: chats with a bin beside each message."""
    kept = [each for at, each in enumerate(said) if not ((at == 2 and len(said) >= 6) or (at == 6 and len(said) >= 10))]
    return _whole(kept, asked)


def _first_replaced(said: list[Exchange], asked: str) -> list[Json]:
    """From the seventh on the first message is another and a notice stands in the first answer: Cline's truncation."""
    messages = _whole(said, asked)
    if len(said) >= 6:
        messages[0] = user("[Continue assisting the user!]")
        messages[1] = assistant(
            "[NOTE] Some previous conversation history with the user has been removed.\n\n" + said[0].answered
        )
        del messages[2:6]
    return messages


def _result_pruned(said: list[Exchange], asked: str) -> list[Json]:
    """Questions are results here; those of old turns are replaced by a notice: opencode, from the fifth on."""
    messages: list[Json] = []
    for at, each in enumerate(said):
        call = {
            "id": f"call_{at}",
            "type": "function",
            "function": {"name": "read", "arguments": f'{{"path": "{at}"}}'},
        }
        result = "[Old tool result content cleared]" if at < len(said) - 4 else each.thought + each.asked
        messages += [user(f"Please read file {at}."), {"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": f"call_{at}", "content": result}, assistant(each.answered)]
    return [*messages, user(asked)]


CLIENTS: dict[str, Rewritten] = {
    "one that rewrites nothing": _whole,
    "<think> stripped from old answers": _think_stripped,
    "Aider's reminder moved": _reminder_moved,
    "a pair deleted": _pair_deleted,
    "Cline's first message replaced": _first_replaced,
    "a tool result pruned": _result_pruned,
}


def rewriting(staged: Stage) -> list[Finding]:
    """Sessions of clients that rewrite; what is stored twice, and reasoning that is stored at all."""
    found = []
    for number, (name, client) in enumerate(CLIENTS.items()):
        if staged.is_quick and number % 2:
            continue
        with house(WINDOW) as home:
            said = _told(home, client, 12 if staged.is_quick else 16, Words(120 + number))
            spoken = [text for each in said for text in (each.asked, each.answered)]
            pruned = client is _result_pruned
            spoken += [each.thought for each in said] if pruned else []
            lost = home.settled([each.asked.split()[-1] for each in said])
            time.sleep(SETTLING_SECONDS)
            _, twice, _ = stored(home.logged(), spoken, [REMINDER])
            text = "\n".join(home.logged())
        found.append(at_most(12, f"{name}: stored twice", round(100 * twice, 2), 0 if number == 0 else 1, " %"))
        found.append(at_most(12, f"{name}: last words of questions that are lost", len(lost), 0, f" of {len(said)}"))
        if client is _think_stripped:
            kept = sum(each.thought.split("\n")[0] in text for each in said)
            found.append(at_most(12, f"{name}: reasonings stored", kept, 0, f" of {len(said)}"))
    return found


def _told(home: House, client: Rewritten, turns: int, words: Words) -> list[Exchange]:
    """Tell it all; each question ends with a word of its own."""
    said: list[Exchange] = []
    for _ in range(turns):
        asked = f"{words.prose(TURN_TOKENS)} {words.code()}"
        new = Exchange(asked, words.prose(60), words.prose(REPLY_TOKENS))
        if client is _result_pruned:
            home.say(client([*said, new], "x")[:-2], new.answered)  # its last message is the newest result
        else:
            thinks = client is _think_stripped
            reply = f"<think>\n{new.thought}\n</think>\n\n{new.answered}" if thinks else new.answered
            home.say(client(said, asked), reply, stream=True)
        said.append(new)
    return said


# -- 13: the journal of such a client ---------------------------------------------------------------------------------


def journal(staged: Stage) -> list[Finding]:
    """A history of which an early message is another in every request; the journal's largest size."""
    words, messages, peak, said_bytes = Words(13), list[Json](), 0, 0
    with house(32_768) as home:
        for turn in range(12 if staged.is_quick else 60):
            messages.append(user(words.prose(320)))
            early = user(f"It is {turn} past nine. Let us begin.")
            reply = words.prose(200)
            home.say([early, assistant("Good."), *messages], reply)
            messages.append(assistant(reply))
            said_bytes = sum(len(one["content"]) for one in messages)
            peak = max(peak, home.journal_bytes)
    ratio = round(peak / said_bytes, 2)
    return [at_most(13, f"journal over {said_bytes // 1000} kB said, the first message another each time", ratio, 3)]


# -- 16: names and prefill --------------------------------------------------------------------------------------------


def names_and_prefill(staged: Stage) -> list[Finding]:
    """A group chat's names, and an answer that is continued."""
    words = Words(160)
    code = words.code()
    with house(WINDOW) as home:
        home.say([{"role": "user", "name": "ann", "content": f"I keep the key of locker {code}."}])
        home.settled([code])
        text = "\n".join(home.daemon.said())
        named = "user (ann)" in text
        asked = [user(words.prose(200))]
        part, rest = words.prose(300), words.prose(300)
        home.say(asked, part)
        home.say([*asked, assistant(part)], rest)  # "continue": the last message is the model's own
        home.say([*asked, assistant(part + rest), user(f"Good. {code}")], "Yes.")
        time.sleep(SETTLING_SECONDS)
        _, twice, _ = stored(home.logged(), [asked[0]["content"], part + rest], [])
    return [
        Finding(16, "a stored text has the name of who said it", str(named), "True", named),
        at_most(16, "a continued answer is stored twice", round(100 * twice, 1), 1, " %"),
    ]


SCENARIOS: dict[int, Scenario] = {12: rewriting, 13: journal, 16: names_and_prefill}
