"""Issue 17's numbers 6, 8 to 13 and 15 in bench/agents.py: what is stored of what agents send, how often, and when.

Rule: as agents_leaving.py. The words of side requests and reminders are those of the programs named beside them.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from agents_leaving import Finding, Scenario, Stage, assistant, at_least, at_most, at_once, user
from agents_replay import House, house
from agents_runs import Words
from daemon_process import Answer
from histories import conversation_of, said
from strict_llama import Prompt

from memd.conversation.conversation import History
from memd.conversation.matching import ConversationIndex, match

Json = dict[str, Any]

Ask = Callable[[], tuple[Answer, list[Prompt]]]

SETTLING_SECONDS = 9.0
"""After so long without a request everything that is going to be stored has been."""

# -- 6: new conversations ---------------------------------------------------------------------------------------------


def new_chats(staged: Stage) -> list[Finding]:
    """Chats of 2 KB one right after the other: what the next one waits for, and what it knows."""
    words, known, first, knew = Words(6), list[float](), list[float](), 0
    count = 5 if staged.is_quick else 16
    with house(8192) as home:
        code, thing = "", "harbour"
        for _ in range(count):
            question = f"What is the code of the {thing}?"
            answer, prompts = home.say([user(question)], "I see.", stream=True)
            first.append(_memory_ms(home, answer))
            knew += bool(code) and bool(prompts) and code in prompts[-1].text
            code, thing = words.code(), words.thing()
            messages = [user(question), assistant("I see.")]
            messages.append(user(f"{words.prose(180)}\nThe code of the {thing} is {code}. {words.prose(60)}"))
            answer, _ = home.say(messages, words.prose(200), stream=True)
            known.append(_memory_ms(home, answer))
        found = _own_compaction(home, words)
    base = statistics.median(known)
    return [
        at_most(
            6, "median ms of memory in a new chat (known: + 25 %, 5 ms)", statistics.median(first[1:]), base * 1.25 + 5
        ),
        at_most(6, "worst ms of memory in a new chat", max(first[1:]), 100),
        at_least(6, "new chats that knew what was said just before", knew, count - 1, f" of {count - 1}"),
        found,
    ]


def _memory_ms(home: House, answer: Answer) -> float:
    """Milliseconds that memory took of a request, by its receipt."""
    for _ in range(50):
        for turn in home.turns()[:4]:
            if turn["turn_id"] == answer.headers["X-Memory-Turn"]:
                return float(turn["timings_ms"]["memory"])
        time.sleep(0.02)
    return float("nan")


def _own_compaction(home: House, words: Words) -> Finding:
    """A client that replaces its history by a summary: the first request after it."""
    code, thing = words.code(), words.thing()
    messages = [user(f"The code of the {thing} is {code}."), assistant("Noted.")]
    for _ in range(8):
        messages += [user(words.prose(300)), assistant(words.prose(100))]
    home.say([*messages, user("Go on.")])
    summary = f"This session is being continued from a previous conversation. Summary: {words.prose(200)}"
    _, prompts = home.say([user(f"{summary}\n\nWhat was the code of the {thing}?")])
    shown = bool(prompts) and code in prompts[-1].text
    return Finding(6, "the first request after a client's own compaction has memory", str(shown), "True", shown)


# -- 8: fan-out -------------------------------------------------------------------------------------------------------


def fan_out(staged: Stage) -> list[Finding]:
    """One document and "read", then six questions from the same beginning: one after the other, and together."""
    found = []
    for together in (False, True):
        words = Words(8 + together)
        start = [user(f"Read this.\n{words.prose(1500)}"), assistant("read")]
        codes = [words.code() for _ in range(12)]
        with house(32_768) as home:
            home.say(start[:1], "read")
            asks = [_question(home, start, codes[at], codes[6 + at], words) for at in range(6)]
            if together:
                at_once(asks)
            else:
                for ask_one in asks:
                    ask_one()
            lost = home.settled(codes)
        how = "together" if together else "one after the other"
        found.append(
            at_most(8, f"of six questions and answers from one beginning are lost, {how}", len(lost), 0, " of 12")
        )
    return found


def _question(home: House, start: list[Json], asked: str, answered: str, words: Words) -> Ask:
    question = user(f"What about part {asked}? {words.prose(20)}")
    reply = f"It says {answered}. {words.prose(30)}"
    return lambda: home.say([*start, question], reply)


# -- 9: boilerplate ---------------------------------------------------------------------------------------------------


def _reminders(text: str, words: Words) -> str:
    """As Claude Code: in front of the user's words, and behind them."""
    opening = "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# claudeMd\n"
    closing = "This is a reminder that your todo list is currently empty. DO NOT mention this to the user explicitly."
    return f"{opening}{words.prose(700)}\n</system-reminder>\n{text}\n<system-reminder>\n{closing}\n</system-reminder>"


def _environment(text: str, words: Words) -> str:
    """As Cline: `src/core/task`, its message and what the editor shows."""
    files = "\n".join(f"src/{words.thing().replace(' ', '_')}.py" for _ in range(60))
    details = f"<environment_details>\n# Visual Studio Code Visible Files\n{files}\n</environment_details>"
    return f"<task>\n{text}\n</task>\n{details}"


def boilerplate(staged: Stage) -> list[Finding]:
    """Five facts told in wrapped messages, asked for in wrapped messages."""
    found = []
    for name, wrap in (("<system-reminder>", _reminders), ("<environment_details>", _environment)):
        words = Words(9)
        facts = {words.thing(): words.code() for _ in range(5)}
        with house(8192) as home:
            for thing, code in facts.items():
                home.say(
                    [user(wrap(f"The code of the {thing} is {code}. {words.prose(25)}", Words(1)))], words.prose(30)
                )
                for _ in range(2):
                    home.say([user(wrap(words.prose(40), Words(1)))], words.prose(40))
            home.settled(list(facts.values()))
            shown = 0
            for thing, code in facts.items():
                _, prompts = home.say([user(wrap(f"What is the code of the {thing}?", Words(1)))], "I will look.")
                shown += bool(prompts) and code in prompts[-1].text
            time.sleep(SETTLING_SECONDS)
            text = "\n".join(home.logged())
        wrapped = sum(text.count(line) for line in Words(1).prose(700).split("\n")) + text.count("src/")
        found.append(at_least(9, f"{name}: facts found", shown, 5, " of 5"))
        found.append(at_most(9, f"{name}: lines of it that are stored", wrapped, 0))
    return found


# -- 10: echoes -------------------------------------------------------------------------------------------------------


def echoes(staged: Stage) -> list[Finding]:
    """Forty times nearly the same question with a useless answer; then an Update of what five answers retold."""
    words = Words(10)
    code, other, new = words.code(), words.code(), words.code()
    ways = ("Tell me", "Can you tell me", "Do you know", "Please say", "I ask again")
    with house(8192) as home:
        moved = f"When everything was painted the blue account book of the boathouse went to cabinet {code}."
        home.say([user(f"{words.prose(50)} {moved} {words.prose(50)}")])
        home.settled([code])
        for number in range(10 if staged.is_quick else 40):
            question = f"{ways[number % 5]} where the account book of the old boathouse is, time {number}."
            useless = f"I do not know where the account book of the old boathouse is, not at time {number} either."
            home.say([user(question)], useless)
            time.sleep(0.1)
        time.sleep(SETTLING_SECONDS)
        _, prompts = home.say([user("Where is the account book of the old boathouse?")])
        shown = bool(prompts) and code in prompts[-1].text
        home.say([user(f"Write down: the mooring fee of the north pier is {other} crowns.")])
        home.settled([other])
        for number in range(5):
            home.say(
                [user(f"{ways[number]} what the mooring fee of the north pier is.")],
                f"The mooring fee is {other} crowns.",
            )
        time.sleep(SETTLING_SECONDS)
        old, newer = _updated(home, other, new)
    return [
        Finding(10, "the fact is shown after forty questions that were answered badly", str(shown), "True", shown),
        Finding(10, "the new value is shown after an Update", str(newer > 0), "True", newer > 0),
        at_most(10, "shown chunks that still tell the old value", old, 1),
    ]


def _updated(home: House, other: str, new: str) -> tuple[int, int]:
    """Update the statement; how many shown chunks tell the old value then, and how many the new one."""
    question = [user("What is the mooring fee of the north pier?")]
    _, prompts = home.say(question, memory_in={})
    chunks = re.findall(r"\[mem:([0-9a-f]+)\] ([^\[]*)", prompts[-1].text if prompts else "")
    ids = [one for one, text in chunks if f"Write down: the mooring fee of the north pier is {other}" in text]
    content = f"user: Write down: the mooring fee of the north pier is {new} crowns."
    correction = {"chunk_ids": ids, "action": "Update", "reason": "it was raised", "content": content}
    home.say([user("It was raised.")], memory_in={"corrections": [correction]} if ids else {})
    _, prompts = home.say([user("And what is the mooring fee of the north pier now?")])
    told = [text for _, text in re.findall(r"\[mem:([0-9a-f]+)\] ([^\[]*)", prompts[-1].text if prompts else "")]
    return sum(other in text for text in told), sum(new in text for text in told)


# -- 11: side requests ------------------------------------------------------------------------------------------------

SIDE_REQUESTS: dict[str, str] = {
    "Open WebUI, query": 'Query: History:\nUSER: """{}"""\nASSISTANT: """Yes."""\nQuery: And then?',
    "Open WebUI, emoji": "Your task is to reflect the speaker's likely facial expression through a fitting emoji. "
    "Interpret emotions from the message and reflect their facial expression using fitting, diverse emojis "
    "(e.g., 😊, 😢, 😡, 😱).\n\nMessage: ```{}```",
    "Open WebUI, mixture": "You have been provided with a set of responses from various models to the latest user "
    'query: "{}"\n\nYour task is to synthesize these responses into a single, high-quality response.',
    "Open WebUI, queries": "### Task:\nAnalyze the chat history to determine the necessity of generating search "
    "queries, in the given language.\n### Chat History:\n<chat_history>\n{}\n</chat_history>",
    "Zed, title": "Generate a concise 3-7 word title for this conversation, omitting punctuation. Go straight to the "
    "title, without any preamble and prefix like `Here's a concise suggestion:...` or `Title:`. {}",
    "Continue, title": "Given the following... please reply with a title for the chat that is 3-4 words in length, "
    "all words used should be directly related to the content of the chat, avoid using verbs unless they are directly "
    "related to the content of the chat, no additional text or explanation, you don't need ending punctuation.\n\n{}",
    "Codex, compaction": "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM "
    "that will resume the task.\n\nInclude:\n- Current progress and key decisions made\n{}",
    "Claude Code, compaction": "Your task is to create a detailed summary of the conversation so far, paying close "
    "attention to the user's explicit requests and your previous actions.\n{}",
}
"""open-webui backend/open_webui/{config,utils/middleware}.py; zed crates/agent; continue core/util/chatDescriber.ts;
lobe-chat packages/prompts/src/chains/summaryTitle.ts; opencode packages/opencode/src/agent/prompt/title.txt;
codex core/templates/compact/prompt.md."""
OPENCODE_TITLE = "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>\nGenerate a title"
LOBECHAT_TITLE = "You are a professional conversation summarizer. Generate a concise title that captures the essence."
SPOKEN = (
    "Generate a title for my novel about the harbour, please. {}",
    "Query the database for the tide tables of {} and summarise them.",
    "Please summarize what we said about {} in one sentence.",
)


def side_requests(staged: Stage) -> list[Finding]:
    """None of them is stored; what only sounds like one is."""
    words, codes, spoken = Words(11), dict[str, str](), list[str]()
    with house(8192) as home:
        for name, text in SIDE_REQUESTS.items():
            codes[words.code()] = name
            home.say([user(text.format(list(codes)[-1]))], "Title")
        codes[words.code()] = "opencode, title"
        asked = [user("Generate a title for this conversation:\n"), user(f"Please remember {list(codes)[-1]}.")]
        home.say([{"role": "system", "content": OPENCODE_TITLE}, *asked], "Title")
        codes[words.code()] = "LobeChat, title"
        told = f"user: Where is {list(codes)[-1]}?\nassistant: Here.\n\nRespond in en-US."
        home.say([{"role": "system", "content": LOBECHAT_TITLE}, user(told)], "Title")
        for text in SPOKEN:
            spoken.append(words.code())
            home.say([user(text.format(spoken[-1]))])
        lost = home.settled(spoken)
        time.sleep(SETTLING_SECONDS)
        text = "\n".join(home.logged())
    kept = [name for code, name in codes.items() if code in text]
    told = f" of {len(codes)}{': ' if kept else ''}{'; '.join(kept)}"
    return [
        at_most(11, "side requests stored", len(kept), 0, told),
        at_most(11, "requests that only sound so and are lost", len(lost), 0, f" of {len(spoken)}"),
    ]


# -- 15: the last byte ------------------------------------------------------------------------------------------------


def last_byte(staged: Stage) -> list[Finding]:
    """A thin client's reply, and `kill -9` as soon as it is complete."""
    words, lost, tries = Words(15), 0, 4 if staged.is_quick else 12
    settings = {"buffer": {"journal_fsync": "always"}}
    with house(8192, settings) as home:
        for number in range(tries):
            code = words.code()
            more: Json = {"X_Memory_History": "daemon", "X_Memory_Session": f"thin-{number}", "stream": number % 2 == 0}
            home.say([user(f"What is code {number}?")], f"The code is {code}. {words.prose(200)}", **more)
            home.daemon.kill()
            home.daemon.start()
            _, prompts = home.say([user("Thanks. Again?")], **more)
            lost += not (prompts and code in prompts[-1].text)
    return [at_most(15, "replies lost by kill -9 right after their last byte", lost, 0, f" of {tries}")]


# -- 13: matching -----------------------------------------------------------------------------------------------------


def matching(staged: Stage) -> list[Finding]:
    """256 conversations of 500 messages, and requests that extend, edit, trim, rewrite and begin one."""
    index, held = ConversationIndex(), list[list[str]]()
    count = 64 if staged.is_quick else 256
    for number in range(count):
        shared = [f"{'ua'[at % 2]}:the same {at}" for at in range(2 if number % 2 else 120)]
        held.append(shared + [f"{'ua'[at % 2]}:said {number} {at}" for at in range(500 - len(shared))])
        index.note(conversation_of(*held[-1]))
    gc.freeze()  # as the daemon after its start: what is measured is matching, and not Python's collector
    times = sorted(
        _matched(index, changed) for number in range(0, count, 4) for changed in _requests(held[number], number)
    )
    p99 = times[int(len(times) * 0.99)]
    what = f"p99 of matching, {count} conversations of 500 ({len(times)} requests)"
    return [at_most(13, what, round(p99, 2), 1.0, " ms")]


def _requests(history: list[str], number: int) -> list[list[str]]:
    new = f"u:new {number}"
    return [
        [*history, new],
        [*history[:-2], f"u:edited {number}", "a:and answered", new],
        [*history[200:], new],
        [*history[:20], *history[300:], new],
        [*history[:250], f"u:another {number}", *history[251:], new],
        [*history[:250], *history[252:], new],
        [f"u:alone {number}", "a:yes", new],
    ]


def _matched(index: ConversationIndex, history: Sequence[str]) -> float:
    """Milliseconds to find one request's conversation, digests given."""
    digests = [said(one).content_digest for one in history]
    started = time.thread_time()  # of the processor: others may be at work on it
    match(index, History([], digests, lambda *_: []))
    return (time.thread_time() - started) * 1000


SCENARIOS: dict[int, Scenario] = {
    6: new_chats,
    8: fan_out,
    9: boilerplate,
    10: echoes,
    11: side_requests,
    13: matching,
    15: last_byte,
}
