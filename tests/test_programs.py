"""What programs say to themselves is not their user's speech: each rule by words of its program, and quotations."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, user, wait_until
from recording_upstream import RecordingUpstream
from test_side_requests import ASKED, INSTRUCTED
from test_speech import WRAPPED

from memd.messages import Message
from memd.proxy.reading import SideRequests
from memd.settings.model import Config, IngestSettings
from memd.settings.programs import Kind, Programs, programs_of, rules
from memd.speech import Speech
from memd.wire.anthropic import ANTHROPIC
from memd.wire.api import Api
from memd.wire.chat import CHAT
from memd.wire.ollama import OLLAMA
from memd.wire.responses import RESPONSES

PROGRAMS = programs_of(Config().ingest)
SPEECH = Speech(PROGRAMS.strip, PROGRAMS.message, PROGRAMS.reply, PROGRAMS.result)
WITHOUT_WRAPPING = Speech(PROGRAMS.strip)
"""Leaves out what stands around words, and no whole message."""
MAP = (
    "Here are summaries of some files present in my git repository.\nDo not propose changes to these files, treat them"
    " as *read-only*.\nIf you need to edit any of these files, ask me to *add them to the chat* first.\n\nsrc/app.py:\n"
    "⋮\n│def main():\n"
)
SWITCHED = (
    "I switched to a new code base. Please don't consider the above files or try to edit them any longer."  # aider
)
SET_UP = (
    "This is the Qwen Code. We are setting up the context for our chat.\nToday's date is Friday.\n- src/\n  - app.py"
)
NO_TOOL = (
    "[ERROR] You did not use a tool in your previous response! Please retry with a tool use.\n\n# Next Steps\n\nIf you"
    " have completed the user's task, use the attempt_completion tool.\n(This is an automated message, so do not"
    " respond to it conversationally.)"
)
MESSAGES = [  # as the programs write them
    "Change get_factorial() to use math.factorial",
    "Refactor hello() into its own file.",
    "Replace is_prime with a call to sympy.",
    "Change the greeting to be more casual",
    SWITCHED,
    MAP,
    "I am not sharing any files that you can edit yet.",
    "Don't try and edit any existing code without asking me to add the files to the chat!\nTell me which files in my"
    " repo are the most likely to **need changes**",
    "I spoke to you previously about a number of things.\nI asked you to rename a constant.",
    "This session is being continued from a previous conversation that ran out of context. The summary below covers the"
    " earlier portion of the conversation.\n\nSummary:\n1. Primary Request",
    NO_TOOL,
    f"{NO_TOOL}\n<environment_details>\n# Current Time\n10:05\n</environment_details>",
    "[SYSTEM] This run is not complete until you call one of these terminal completion tools: submit_and_exit. Continue"
    " working if requirements are not met.",
    "[TASK RESUMPTION] Resuming task...",
    '<user_input mode="act">[TASK RESUMPTION] Please continue where you left off.</user_input>',
    '<user_input mode="act">The user approved switching to act mode. Continue with the approved plan now.</user_input>',
    "Another language model started to solve this problem and produced a summary of its thinking process. You also",
    "The following tool was executed by the user",
    "Summarize the task tool output above and continue with your task.",
    "Continue if you have next steps, or stop and ask for clarification if you are unsure how to proceed.",
    "The conversation history before this point was compacted into the following summary:\n\n<summary>\nA\n</summary>",
    "The following is a summary of a branch that this conversation came back from:\n\n<summary>\nB</summary>",
    "I didn't see any properly formatted edits in your reply?!",
    "I committed the changes with git hash 31ab05c & commit msg: feat: rename the limit",
    SET_UP,
    "<session_context>\nThis is the Gemini CLI. We are setting up the context for our chat.\nToday's date is Friday.\n"
    "</session_context>",
]
REPLIES = [
    "Ok.",
    "To make this change we need to modify `mathweb/flask/app.py` to:\n\n1. Import the math package.",
    "To make this change we need to modify `main.py` and make a new file `hello.py`:\n\n1. Make a new hello.py file",
    "Ok, I will:\n\n1. Add an imports of sympy.\n2. Remove the is_prime() function.",
    'Ok, I will:\n\n1. Switch the greeting text from "Hello" to "Hey".\n\nshow_greeting.py',
    "Ok, I won't try and edit those files without asking first.",
    "Ok, I will use these files as references.",
    "Ok, any changes I propose will be to those files.",
    "Ok, based on your requests I will suggest which files need to be edited and then stop and wait for your approval.",
    "Got it. Thanks for the context!",
]
STRIPPED = {
    "<mode_notice>The user switched from plan mode to act mode before sending this message.</mode_notice><user_input"
    ' mode="act">Use <b>8765</b>.</user_input>': "Use <b>8765</b>.",
    "[TASK RESUMPTION] This task was interrupted 2 hours ago. The current working directory is now '/src'.\n\nNew"
    " instructions for task continuation:\n<user_message>\nGo on.\n</user_message>": "Go on.",
    "<recommended_plugins>\n- a\n</recommended_plugins>\nGo on.": "Go on.",
    "Ask Ann.\n Use the above message and context to generate a prompt and call the task tool with subagent: a": (
        "Ask Ann."
    ),
    "<system_reminder>This is a reminder that your todo list is currently empty. DO NOT mention</system_reminder>": "",
    "The previous session was interrupted because it got too long, the initial user request was: `Use `8765`.`": (
        "Use `8765`."
    ),
    "Go on.\n\n<REPOSITORY_INFO>\nAt the user's request, repository a/b has been cloned.\n</REPOSITORY_INFO>\n"
    "<RUNTIME_INFORMATION>\nToday's date is 2026-11-27 (UTC).\n</RUNTIME_INFORMATION>": "Go on.",
    "Go on.\n<EXTRA_INFO>\nThe following information has been included based on a keyword match for \"git\".\n"
    "</EXTRA_INFO>": "Go on.",
    "### Task:\nRespond to the user query using the provided context, incorporating inline citations\n<context>\na\n"
    "</context>\n\n<user_query>\nWhich port?\n</user_query>": "Which port?",
    "### Task:\nRespond to the user query using the provided context, incorporating inline citations\n<context>\na\n"
    "</context>\n\nWhich port?": "Which port?",
}  # fmt: skip
ASKED_TOO = [
    "# Current Chat:\n\nHuman: The key hangs in the shed.\nAI: Noted.",
    "### Task:\nGenerate a concise title summarizing the chat history.\n### Guidelines:",
    "### Task:\nPredict 3-5 useful messages this user might naturally send next to advance their current objective.",
    "### Task:\nSummarize the conversation history that will be compacted out of the active chat context.",
    "Hold on, before you continue I need you to write me a checkpoint of everything so far. Your context window is",
    "Hold on again, update your checkpoint. Merge the new messages into your existing checkpoint",
    "Generate an enhanced version of this prompt (reply with only the enhanced prompt - no conversation",
    "Generate a concise, single-line task title of at most 36 characters and under five words where possible.",
    "The following is the Codex agent history whose request action you are assessing. Treat the content as evidence",
    "Here is the conversation so far:\n\n<conversation>\n[User]: hi\n</conversation>\n\nCreate a new anchored summary"
    " from the conversation history in the <conversation> tags above",
    "Managed memory has TWO directories. Choose which one to write each memory into using the per-type `<scope>`",
    "[SUGGESTION MODE: Suggest what the user might naturally type next.]\n\nFIRST: Read the LAST FEW LINES",
    "First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.",
    "Summarize the user's primary intent or goal in this conversation in ONE sentence (max 80 characters).",
    "Please analyze the conversation history to determine the possibility that the conversation is stuck in a"
    " repetitive, non-productive state.",
    "Analyze *only* the content and structure of your immediately preceding response (your last turn in the",
    "Generate a concise title for the following content:\n\nWhich port?\n <think>\n\n</think>",
    "You are maintaining a context-aware state summary for an interactive agent.\nYou will be given a list of events",
]
INSTRUCTED_TOO = [
    "You are Open WebUI's private memory reviewer. Return only valid JSON.",
    "Use the `set_memory` tool to save important information about the user, but ONLY when the user has requested you",
    "Summarize the provided coding session into a concise continuation note with detailed next steps.",
    "You are a helpful assistant that generates informative git commit messages based on git diffs output. Skip",
    "You are judging one planned coding-agent action.\nAssess the exact action's intrinsic risk",
    "## Memory Writing Agent: Phase 1 (Single Rollout)\n\nYou are a Memory Writing Agent.",
    "You are a context summarization agent. You are given a conversation between a user and an agent. Your goal",
    "Summarize what was done in this conversation. Write like a pull request description.\n\nRules:",
    "You are an elite AI agent architect specializing in crafting high-performance agent configurations. Your",
    "The messages above are a conversation to summarize. Create a structured context checkpoint summary",
    "You are a context summarization assistant. Your task is to read a conversation between a user and an AI coding",
    "*Briefly* summarize this partial conversation about programming.\nInclude less detail about older parts",
    "You are now acting as the managed memory extraction subagent for an AI coding assistant.\n\nThe recent",
    "You are selecting memories that will be useful to an AI coding assistant as it processes a user's query.",
    "You are reviewing this conversation to extract reusable skills.\n\nReview the conversation above",
    "You are performing a managed memory dream — a reflective pass over durable memory files.",
    "Generate a concise, sentence-case title (3-7 words) that captures what this programming-assistant session is"
    " about. Think of it",
    "You generate session recaps for a programming assistant CLI.\n\nThe user stepped away",
    "Write a short summary label describing what these tool calls accomplished. It appears",
    "You are an assistant that rewrites raw coding-agent output into concise, user-friendly progress updates.",
    "\nYou are a specialized system component responsible for distilling chat history into a structured XML"
    " <state_snapshot>.",
    "You are a specialized Task Routing AI. Your sole function is to analyze the user's request",
    "You are an Auto Memory Extraction Agent.\n",
    "You will generate a short title based on the first message a user begins a conversation with.\n\n<rules>",
    "You are summarizing a conversation to preserve context for continuing work later.\n\n**Critical**:",
    "You are a helpful assistant that generates concise, descriptive titles for conversations with OpenHands.",
]
CALLED = [
    "You are Claude Code, Anthropic's official CLI for Claude.\nYou are an agent for Claude Code, Anthropic's official"
    " CLI for Claude. Given the user's message, you should use the tools available to complete the task.",
    "You are a file search specialist for Claude Code, Anthropic's official CLI for Claude. You excel at thoroughly",
    "You are Codex.\n\nYou are an agent in a team of agents collaborating to complete a task.\n\nYou can spawn",
    "# Review guidelines:\n\nYou are acting as a reviewer for a proposed code change made by another engineer.",
    "You are a file search specialist. You excel at thoroughly navigating and exploring codebases.\n\nYour strengths:",
    "You are a specialized subagent within the goose AI framework, created by Block. You were spawned by the main",
    "You are a file search specialist agent. You excel at thoroughly navigating and exploring codebases.",
    "You are a general-purpose agent. Given the user's message, you should use the tools available to complete the"
    " task. Do what",
    "You are a forked worker process. Follow the directive in the conversation history. Execute tasks directly",
    "You are a subagent spawned by a workflow orchestration script. Use the tools available to complete the task.",
    "You are **Codebase Investigator**, a hyper-specialized AI agent and an expert in reverse-engineering",
    "You are an expert browser automation agent (Orchestrator). Your goal is to completely fulfill the user's request.",
    "You are an agent for Crush. Given the user's prompt, you should use the tools available to you to answer",
    "You are a web content analysis agent for Crush. Your task is to analyze web content",
]
FILES = (
    "I have *added these files to the chat* so you can go ahead and edit them.\n\n*Trust this message as the true"
    " contents of these files!*\nAny other messages in the chat may contain outdated versions of the files' contents."
    "\n\nsrc/app.py\n```\nLIMIT = 921\n```\n"
)
FAILED_EDIT = (
    "# 1 SEARCH/REPLACE block failed to match!\n\n## SearchReplaceNoExactMatch: This SEARCH block failed to exactly"
    " match lines in src/app.py\n<<<<<<< SEARCH\nLIMIT = 1\n=======\nCEILING = 1\n>>>>>>> REPLACE\n\nThe SEARCH section"
    " must exactly match an existing block of lines including all white space, comments, indentation, docstrings, etc\n"
)
READ_FILE = "[read_file for 'src/app.py'] Result:\nLIMIT = 921\n\n<environment_details>\nnow\n</environment_details>"
RESULTS = [
    FILES,
    FILES.replace("can go ahead and edit them", "see all of their contents").replace("```", "</source>"),
    FAILED_EDIT,
    "UnifiedDiffNoMatch: hunk failed to apply!\n\nsrc/app.py does not contain lines that match the diff you provided!",
    READ_FILE,
]
EXAMPLES: dict[Kind, list[str]] = {
    "ignore": [*ASKED.values(), *ASKED_TOO],
    "ignore_system": [*INSTRUCTED.values(), *INSTRUCTED_TOO],
    "message": MESSAGES,
    "reply": REPLIES,
    "result": RESULTS,
    "strip": [*(text for text, _ in WRAPPED.values()), *STRIPPED],
    "sub_agent": CALLED,
}


def met_by(kind: Kind, text: str) -> set[str]:
    """The patterns of the rules of a kind that an example of it meets."""
    if kind in ("message", "reply"):
        words = WITHOUT_WRAPPING.heard(Message("user", text)).said.strip()
        return {pattern for pattern in getattr(PROGRAMS, kind) if re.fullmatch(pattern, words)}
    if kind == "result":
        return {pattern for pattern in PROGRAMS.result if re.fullmatch(pattern, text.strip())}
    return {pattern for pattern in getattr(PROGRAMS, kind) if re.search(pattern, text)}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_each_rule_is_met_by_words_of_its_program(kind: Kind) -> None:
    met = {text: met_by(kind, text) for text in EXAMPLES[kind]}
    assert [text for text, patterns in met.items() if not patterns] == []
    assert set(getattr(PROGRAMS, kind)) - set().union(*met.values()) == set()


def test_each_rule_says_where_its_words_stand_and_where_in_a_text_it_looks() -> None:
    programs = set()
    for rule in rules():
        for place in rule.of.split("; "):
            found = re.fullmatch(r"([a-z-]+) (<?[\w.]+) (requests|[\w./-]+)", place)
            assert found, place
            programs.add(found[1])
        is_anchored = rule.pattern.startswith((r"\A", r"(?m)^"))
        assert is_anchored == (rule.kind in ("ignore", "ignore_system", "sub_agent")) or rule.kind == "strip", rule.of
    assert len(programs) >= 10


@pytest.mark.parametrize("text", RESULTS, ids=lambda text: text[:30])
def test_a_result_that_a_program_gives_in_the_users_name_is_stored_and_part_of_the_turn(text: str) -> None:
    heard = SPEECH.heard(Message("user", text))
    assert heard.said
    assert not heard.opens_turn
    assert SPEECH.heard(Message("user", f"Why does it say this? {text}")).opens_turn


def test_what_a_user_says_to_a_result_opens_a_turn() -> None:
    asked = f"{READ_FILE}\n<feedback>\nNot this file.\n</feedback>"
    assert SPEECH.heard(Message("user", asked)).opens_turn
    assert SPEECH.heard(Message("user", f"{FILES}\nWhich limit is it?")).opens_turn


@pytest.mark.parametrize(
    ("api", "list_name", "content"),
    [
        (CHAT, "messages", READ_FILE),
        (OLLAMA, "messages", READ_FILE),
        (ANTHROPIC, "messages", [{"type": "text", "text": READ_FILE}]),
        (RESPONSES, "input", [{"type": "input_text", "text": READ_FILE}]),
    ],
)
def test_a_line_takes_the_place_of_a_result_in_the_users_name_in_each_dialect(
    api: Api, list_name: str, content: object
) -> None:
    told = [{"role": "user", "content": "Which limit is it?"}, {"role": "user", "content": content}]
    body = api.encode(api.parse(json.dumps({"model": "m", list_name: told}).encode()), replaced={1: "[memd: a line]"})
    messages = [(message.role, message.text) for message in api.parse(body).messages]
    assert messages == [("user", "Which limit is it?"), ("user", "[memd: a line]")]


WHOLE = [*(("user", text) for text in MESSAGES), *(("assistant", text) for text in REPLIES)]


@pytest.mark.parametrize(("role", "text"), WHOLE, ids=lambda text: text[:30])
def test_a_message_that_a_program_wrote_was_said_by_nobody(role: str, text: str) -> None:
    assert SPEECH.heard(Message(role, text)).said == ""
    assert SPEECH.heard(Message("tool", text)).said, "a result is never all of it a program's"


@pytest.mark.parametrize(("role", "text"), WHOLE, ids=lambda text: text[:30])
def test_who_quotes_such_a_message_keeps_it(role: str, text: str) -> None:
    without = WITHOUT_WRAPPING.heard(Message(role, text)).said.strip()
    quoted = f"Why does it write this?\n\n> {without}"
    assert SPEECH.heard(Message(role, quoted)).said == quoted
    other = "assistant" if role == "user" else "user"
    assert SPEECH.heard(Message(other, without)).said, "it stands in one name alone"


@pytest.mark.parametrize(("text", "said"), STRIPPED.items(), ids=lambda text: text[:30])
def test_text_that_a_program_puts_around_the_words_is_not_said(text: str, said: str) -> None:
    assert SPEECH.heard(Message("user", text)).said == said


def includes(instructions: str, question: str) -> bool:
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": question}]
    return SideRequests(PROGRAMS).includes(CHAT.parse(json.dumps({"messages": messages}).encode()))


@pytest.mark.parametrize("text", EXAMPLES["ignore"], ids=lambda text: text[:30])
def test_a_program_asks_for_itself_and_who_quotes_that_does_not(text: str) -> None:
    assert includes("You help.", text)
    assert not includes("You help.", f"Where does this come from?\n\n{text}")


@pytest.mark.parametrize("text", EXAMPLES["ignore_system"], ids=lambda text: text[:30])
def test_a_program_is_known_by_its_instructions_and_not_by_a_quotation(text: str) -> None:
    assert includes(text, "Which port?")
    assert not includes(f"You help. Users ask of prompts like: {text.splitlines()[-1]}", "Which port?")


def test_a_list_of_ones_own_stands_in_place_of_the_rules_of_its_kind_and_false_of_all() -> None:
    own = programs_of(IngestSettings(strip=("a",), ignore=()))
    assert (own.strip, own.ignore) == (("a",), ()) and own.message == PROGRAMS.message
    assert programs_of(IngestSettings(programs=False)) == Programs()
    assert programs_of(IngestSettings(programs=False, ignore=("b",))) == Programs(ignore=("b",))


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


AIDER = [
    user("Change get_factorial() to use math.factorial"),
    assistant("To make this change we need to modify `mathweb/flask/app.py` to:\n\n1. Import the math package."),
    user(SWITCHED),
    assistant("Ok."),
    user(MAP),
    assistant("Ok, I won't try and edit those files without asking first."),
]
FACT = "The release branch of the harbour is called heron-blue-52."
AGAIN = "What is the release branch of the harbour called?"


def stored(daemon: DaemonProcess, *words: str) -> str:
    """All that is stored, once these words are."""
    wait_until(lambda: all(word in "\n".join(daemon.said()) for word in words), lambda: str(daemon.said()))
    return "\n".join(daemon.said())


def test_of_a_chat_with_examples_and_a_map_only_what_was_said_is_stored(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    served.chat([*AIDER, user(FACT)])
    assert json.loads(upstream.chats[-1].body)["messages"] == [*AIDER, user(FACT)], "the prompt is as it was"
    served.chat([user(SET_UP), assistant("Got it. Thanks for the context!"), user("And the host is kestrel-9.")])
    served.chat([user(f"Why does aider tell it this? {SWITCHED}")])
    told = served.chat([*AIDER, user(AGAIN)])
    assert told.headers["X-Memory-Injected"] and "heron-blue-52" in upstream.prompts[-1]
    text = stored(served, FACT, "kestrel-9", f"tell it this? {SWITCHED}")
    assert not [one for one in ("get_factorial", "src/app.py", "setting up", "Got it", "mathweb", "Ok.") if one in text]
    assert text.count("I switched to a new code base") == 1


def test_a_message_of_a_program_alone_is_no_question(served: DaemonProcess) -> None:
    served.chat([user(FACT)])
    stored(served, FACT)
    told = served.chat([user(f"{MAP}\nThe release branch of the harbour is called:")])
    assert told.headers["X-Memory-Injected"] == ""


@pytest.mark.parametrize("instructions", [CALLED[0], CALLED[2], CALLED[4]], ids=lambda text: text[:20])
def test_the_task_of_a_sub_agent_is_stored_as_such_and_has_memory(
    served: DaemonProcess, upstream: RecordingUpstream, instructions: str
) -> None:
    served.chat([user(FACT)])
    stored(served, FACT)
    system = {"role": "system", "content": instructions}
    told = served.chat([system, user(AGAIN + " Look for it in all files.")])
    assert "heron-blue-52" in upstream.prompts[-1] and told.headers["X-Memory-Status"] == "injected"
    asked = json.loads(upstream.chats[-1].body)["messages"]
    assert all("name" not in message for message in asked)
    text = stored(served, "Look for it")
    assert f"user (sub-agent): {AGAIN}" in text and f"user: {AGAIN}" not in text
    served.chat([system, user(AGAIN + " Look for it in all files."), assistant(told.reply), user("Go on then.")])
    assert stored(served, "user (sub-agent): Go on then.").count("Look for it") == 1, "its history is known"


def test_the_rules_can_be_turned_off(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> None:
    daemon = make_daemon(upstream.url, {"ingest": {"programs": False}}).start()
    daemon.chat([*AIDER, user(FACT)])
    daemon.chat([user(ASKED["aider"])])
    text = stored(daemon, FACT, "*Briefly* summarize")
    assert "user: Change get_factorial()" in text and "src/app.py" in text
