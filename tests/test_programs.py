"""What programs say to themselves is not their user's speech: each rule by words of its program, and quotations;
requests that a program makes for itself; and what it wraps around words, on its way through the daemon."""

import json
import re
import time
from typing import Any

import pytest
from conftest import Serving
from daemon_in_process import Client
from daemon_process import DaemonProcess, user, wait_until
from recording_upstream import RecordingUpstream, chat_answer
from test_turn import FACT as TOLD
from test_turn import QUESTION as WHERE

from memd.messages import SEARCHED_CHARACTERS_MAX, Message, Speech, stored_text
from memd.proxy.reading import SideRequests
from memd.settings.loading import Kind, Programs, programs_of, rules
from memd.settings.model import Config, IngestSettings
from memd.wire.anthropic import ANTHROPIC
from memd.wire.api import Api, MessageCache
from memd.wire.chat import CHAT
from memd.wire.ollama import OLLAMA
from memd.wire.registry import APIS
from memd.wire.responses import RESPONSES

# Where the programs write theirs: Cline (sdk/packages/agents/src/agent-runtime.ts,
# apps/vscode/src/core/prompts/responses.ts), Roo Code (src/core/environment/getEnvironmentDetails.ts,
# src/core/task/Task.ts), Codex (codex-rs/core), Open WebUI (DEFAULT_RAG_TEMPLATE in backend/open_webui/config.py),
# Aider (aider/coders/base_coder.py).
PROGRAMS = programs_of(Config().ingest)
SPEECH = Speech(PROGRAMS.strip, PROGRAMS.message, PROGRAMS.reply, PROGRAMS.result)
SIDE_REQUESTS = SideRequests(PROGRAMS)
WITHOUT_WRAPPING = Speech(PROGRAMS.strip)
"""Leaves out what stands around words, and no whole message."""
DETAILS = "<environment_details>\n# VSCode Open Tabs\na<b.ts\n\n# Current Time\n10:{minute}\n</environment_details>"
REMINDER = "<system-reminder>\nThe TodoWrite tool hasn't been used recently.\n</system-reminder>"
AIDER_RULES = (
    "\n\n# *SEARCH/REPLACE block* Rules:\n\nEvery *SEARCH/REPLACE block* must use this format:\n1. The *FULL*\n"
    "\nONLY EVER RETURN CODE IN A *SEARCH/REPLACE BLOCK*!\n"
)

WRAPPED = {
    "cline": (f"<task>\nUse port 8765.\n</task>\n\n{DETAILS}", "Use port 8765."),
    "cline feedback": (f"<feedback>\nno, 8765\n</feedback>\n{DETAILS}", "no, 8765"),
    "roo": (f"<user_message>\nUse <b>8765</b>.\n</user_message>\n{DETAILS}", "Use <b>8765</b>."),
    "roo answer": (f"<answer>\nyes\n</answer>\n\n{DETAILS}", "yes"),
    "claude code": (f"{REMINDER}\nUse port 8765.\n{REMINDER}", "Use port 8765."),
    "an environment": ("Hello\n<env>\nWorking directory: /src\n</env>\nthere", "Hello\nthere"),
    "codex": ("<environment_context>\n  <cwd>/src</cwd>\n</environment_context>", ""),
    "codex instructions": ("# AGENTS.md instructions for /src\n\n<INSTRUCTIONS>\nBe brief.\n</INSTRUCTIONS>", ""),
    "a hook": ('<hook_context source="x" tool_name="y">\nnoted\n</hook_context>\nGo on.', "Go on."),
    "aider": (f"Use port 8765.{AIDER_RULES}", "Use port 8765."),
    "aider, whole": (
        "Go.\n\nTo suggest changes to a file you MUST return the entire content of the updated file.\nYou MUST use",
        "Go.",
    ),
    "opened twice": (f"<environment_details>Why? {DETAILS}", "<environment_details>Why?"),
}

# The beginnings of the prompts as the projects have them: Open WebUI (backend/open_webui/config.py,
# utils/middleware.py), opencode (packages/opencode/src/agent/prompt, session/compaction.ts), Codex
# (codex-rs/core/templates/compact), Cline (src/core/prompts/contextManagement.ts), Roo Code
# (src/shared/support-prompt.ts), Zed (crates/agent_settings/src/prompts), Continue (core/util, extensions/cli), Goose
# (crates/goose/src/prompts), LobeChat (packages/prompts/src/chains), LibreChat (@librechat/agents), Cherry Studio
# (src/renderer/src/config/prompts.ts), Aider (aider/prompts.py).
ASKED = {
    "open webui: title": "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.",
    "open webui: tags": "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history,",
    "open webui: follow-ups": "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might",
    "open webui: queries": "### Task:\nAnalyze the chat history to determine the necessity of"
    " generating search queries",
    "open webui: completion": "### Task:\nYou are an autocompletion system. Continue the text in `<text>` based on the",
    "open webui: image": "\n### Task:\nGenerate a detailed prompt for am image generation task",
    "open webui: emoji": "Your task is to reflect the speaker's likely facial expression through a fitting emoji.",
    "open webui: mixture": "You have been provided with a set of responses from various models to the latest user"
    ' query: "Which port?"',
    "open webui: tools": 'Query: History:\nUSER: """Which port?"""\nASSISTANT: """8765."""\nQuery: And the host?',
    "librechat": "Provide a concise, 5-word-or-less title for the conversation, using its same language, with no",
    "librechat: older": "Please generate a concise, 5-word-or-less title for the conversation, using its same language",
    "librechat: structured": "Analyze this conversation and provide:\n1. The detected language of the conversation",
    "a phrase": "Create a concise, 3-5 word phrase as a header for the following query",
    "continue: title": "Given the following... please reply with a title for the chat that is 3-4 words in length, all",
    "continue: compaction": "Create a comprehensive summary of this conversation that captures all essential"
    " information needed to continue the work seamlessly.",
    "continue cli": "Please provide a concise summary of our conversation so far, capturing the key context, decisions"
    " made, and current state.",
    "zed: title": "Generate a concise 3-7 word title for this conversation, omitting punctuation.\nGo straight to the",
    "zed: compaction": "You are compacting this conversation into a handoff for another agent that will resume the"
    " work.",
    "zed: summary": "Generate a detailed summary of this conversation. Include:\n1. A brief overview of what was",
    "claude code: compaction": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\n- Do NOT use Read, Bash,"
    " Grep, Glob, Edit, Write, or ANY other tool.\n- Your entire response must be plain text: an <analysis> block"
    " followed by a <summary> block.\n\nYour task is to create a detailed summary of the conversation so far,",
    "claude code, zed, roo: compaction": "Your task is to create a detailed summary of the conversation so far, paying"
    " close attention to the user's explicit requests and your previous actions.",
    "claude code: title": "Please write a 5-10 word title the following conversation:\n\nUser: hi",
    "cline": '<explicit_instructions type="summarize_task">\nThe current conversation is rapidly running out of'
    " context. Now, your urgent task is to create a comprehensive detailed summary",
    "codex": "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM that will",
    "opencode": "Provide a detailed prompt for continuing our conversation above.\nFocus on information that would be",
    "opencode: later": "Create a new anchored summary from the conversation history.\n\n## Goal",
    "opencode: again": "Update the anchored summary below using the conversation history above.\nPreserve still-true",
    "opencode: summary": "Summarize what was done in this conversation. Write like a pull request description.",
    "goose: compaction": "The messages above are a conversation to summarize. Create a structured context checkpoint",
    "goose: summary": "## Summary Task\nGenerate detailed summary of conversation to date.  \nInclude user requests,",
    "goose: title": "Generate a short title (four words or less) for this conversation.",
    "aider": "*Briefly* summarize this partial conversation about programming.\nInclude less detail about older parts",
}
INSTRUCTED = {
    "opencode: title": "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<task>\nGenerate",
    "opencode: compaction": "You are summarizing a conversation for continuation by another agent.\n\nProduce a",
    "claude code: compaction": "You are a helpful AI assistant tasked with summarizing conversations.",
    "claude code: topic": "Analyze if this message indicates a new conversation topic. If it does, extract a 2-3 word"
    " title that captures the new topic.",
    "claude code: title": "You are Claude Code, Anthropic's official CLI for Claude.\nGenerate a concise, sentence-case"
    " title (3-7 words) that captures the main topic or goal of this coding session.",
    "claude code: older title": "Summarize this coding conversation in under 50 characters.",
    "lobechat: title": "You are a professional conversation summarizer. Generate a concise title",
    "lobechat: history": "You're an assistant who's good at extracting key takeaways from conversations and"
    " summarizing them. Please summarize according to the user's needs.",
    "cherry studio": "You are an assistant skilled in conversation. You need to summarize the user's conversation into"
    " a title within 10 words.",
    "cherry studio: search": "\n  You are an AI question rephraser. You will be given a",
    "open webui: tools": 'Available Tools: [{"name": "x"}]\n\nYour task is to choose and return the correct tool(s)'
    " from the list of available tools based on the query.",
    "goose": "Generate a short title (four words or less) for this conversation.",
    "aider: commit": "You are an expert software engineer that generates concise, one-line Git commit messages based on"
    " the provided diffs.",
}
REAL_QUESTIONS = [
    "### Task:\nRespond to the user query using the provided context, incorporating inline citations",
    "### Task:\nGenerate a REST endpoint for bookings",
    "What does '### Task:\nGenerate a concise, 3-5 word title' do in Open WebUI?",
    "Write a concise, well-tested parser for the title line",
    "Generate a title for this conversation: between Ann and Bob, for my novel",
    "Create a summary of this conversation and mail it to Ann",
    "Your task is to create a detailed plan for the migration",
    "Summarize what was done in this conversation.",
    "Query: History of the port, please",
    "You have been provided with a set of keys; where do they hang?",
    "Please provide a concise summary of our conversation so far.",
    "Analyze this conversation and tell me who is right",
    "The current conversation is about context windows",
    "Given the following, please reply with a plan",
]
REAL_INSTRUCTIONS = [
    "You are a helpful assistant.",
    "You are Claude Code, Anthropic's official CLI for Claude.\nWhen the context is full, summarize this conversation.",
    "You are an expert software engineer who writes Git commit messages by hand and reviews code.",
    "You write novels. Never write: You are a title generator. You output ONLY a thread title.",
    "Available Tools: hammer, saw. Your task is to answer questions about joinery.",
]

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
def test_a_message_that_a_program_wrote_was_said_by_nobody_and_who_quotes_it_keeps_it(role: str, text: str) -> None:
    assert SPEECH.heard(Message(role, text)).said == ""
    assert SPEECH.heard(Message("tool", text)).said, "a result is never all of it a program's"
    without = WITHOUT_WRAPPING.heard(Message(role, text)).said.strip()
    quoted = f"Why does it write this?\n\n> {without}"
    assert SPEECH.heard(Message(role, quoted)).said == quoted
    other = "assistant" if role == "user" else "user"
    assert SPEECH.heard(Message(other, without)).said, "it stands in one name alone"


@pytest.mark.parametrize(("text", "said"), [*WRAPPED.values(), *STRIPPED.items()], ids=lambda text: text[:30])
def test_text_that_a_program_puts_around_the_words_is_not_said(text: str, said: str) -> None:
    message = SPEECH.heard(Message("user", text))
    assert message.said == said and message.text == text
    assert message.content_digest == Message("user", said).content_digest
    assert stored_text(message) == said


@pytest.mark.parametrize(
    "text",
    [
        "Use port 8765.",
        "  outer white space stays \n",
        "<environment_details> is what Cline writes, and I never close it",
        "The file has <env>PORT=1</env> in it.",
        "Our launch file:\n<env>\nDATABASE_PASSWORD=OSPREY77\n</env>\nkeep it in mind",
        "and mine: <environment_context> region FALCON8 </environment_context> and what follows",
        "<task>one</task> is how Ant writes it:\n<target>\n<task>\n  <javac/>\n</target>",
        "# *SEARCH/REPLACE block* Rules: explain them to me",
        "</system-reminder> then words <system-reminder>",
        "x" * (SEARCHED_CHARACTERS_MAX + 1) + REMINDER,
    ],
    ids=lambda text: text[:20],
)
def test_words_that_only_look_like_it_are_said_as_they_stand(text: str) -> None:
    message = Message("user", text)
    assert SPEECH.heard(message) is message and message.said is text


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        *((f"<{tag}>", f"</{tag}>") for tag in ("think", "thinking", "reason", "reasoning", "thought", "Thought")),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("◁think▷", "◁/think▷"),
        ("[THINK]", "[/THINK]"),
        ('<details type="reasoning" done="true" duration="3">', "</details>"),
    ],
)
def test_thinking_before_an_answer_is_not_said(opening: str, closing: str) -> None:
    thinking = SPEECH.heard(Message("assistant", f"{opening}\nHm, 8765?\n{closing}\n\nPort 8765."))
    assert thinking.said == "Port 8765."
    assert thinking.content_digest == Message("assistant", "Port 8765.").content_digest
    assert SPEECH.said("assistant", f"{opening}interrupted") is None


def test_what_only_looks_like_thinking_is_said() -> None:
    assert SPEECH.said("user", "<think>mine</think> words") is None
    assert SPEECH.said("assistant", "<think>of another</thinking> tag") is None
    assert SPEECH.said("assistant", "It writes <think>so</think>.") is None


RESULT = "1\timport os\n\n    return"
FILE = "<env>\nWorking directory: OSPREY77\n</env>"


@pytest.mark.parametrize("role", ["tool", "function"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{RESULT}\n\n{REMINDER}\n", RESULT),
        (f"{REMINDER}{RESULT}", RESULT),
        (f"{REMINDER}\n{REMINDER}\n{RESULT}\n{REMINDER} {REMINDER}", RESULT),
        (f"{FILE}\n{REMINDER}", FILE),
        (FILE, FILE),
        (REMINDER, REMINDER),
        (f"one\n{REMINDER}\n{DETAILS}\ntwo", f"one\n{REMINDER}\n{DETAILS}\ntwo"),
        ("<task>\nbuild\n</task>", "<task>\nbuild\n</task>"),
        (f"prompt = 1{AIDER_RULES}", f"prompt = 1{AIDER_RULES}"),
    ],
)
def test_a_result_loses_only_what_a_program_put_at_its_ends_and_never_all_of_it(
    role: str, text: str, said: str
) -> None:
    assert SPEECH.heard(Message(role, text)).said == said


def test_a_rewritten_wrapping_is_the_same_message_through_every_api() -> None:
    cache = MessageCache(speech=SPEECH)
    for api in APIS:
        name = "input" if api.name == "responses" else "messages"
        for minute in ("05", "06"):
            content = f"Go on.\n{DETAILS.replace('{minute}', minute)}"
            [digest] = api.parse(json.dumps({name: [{"role": "user", "content": content}]}).encode(), cache).digests
            assert digest == Message("user", "Go on.").content_digest


@pytest.mark.parametrize(
    "piece", ["<environment_details>", "<", "<env>\n", "<task>\n", "<hook_context ", "\n", AIDER_RULES]
)
def test_a_hostile_text_takes_no_longer_than_a_long_one(piece: str) -> None:
    text = piece * (SEARCHED_CHARACTERS_MAX // len(piece))
    started = time.process_time()
    SPEECH.said("user", text)
    SPEECH.said("tool", text)
    assert time.process_time() - started < 2, "a megabyte takes 25 to 100 ms; one that is not linear takes minutes"


def asked(question: str, instructions: str, api: Api = CHAT) -> bool:
    messages = [{"role": "user", "content": question}]
    if api is RESPONSES:
        body: dict[str, object] = {"input": messages, "instructions": instructions}
    elif api is ANTHROPIC:
        parts = [{"type": "text", "text": line} for line in instructions.split("\n")]
        body = {"messages": messages, "system": parts}
    else:
        body = {"messages": [{"role": "system", "content": instructions}, *messages]}
    return SIDE_REQUESTS.includes(api.parse(json.dumps(body).encode()))


@pytest.mark.parametrize("text", EXAMPLES["ignore"], ids=lambda text: text[:30])
def test_a_program_asks_for_itself_and_who_quotes_that_does_not(text: str) -> None:
    assert asked(text, "You help.")
    assert not asked(f"Where does this come from?\n\n{text}", "You help.")


@pytest.mark.parametrize("text", EXAMPLES["ignore_system"], ids=lambda text: text[:30])
def test_a_program_is_known_by_its_instructions_and_not_by_a_quotation(text: str) -> None:
    assert asked("Which port?", text)
    assert not asked("Which port?", f"You help. Users ask of prompts like: {text.splitlines()[-1]}")


@pytest.mark.parametrize("api", [RESPONSES, ANTHROPIC], ids=lambda api: api.name)
def test_a_request_is_known_by_its_system_prompt_in_each_api(api: Api) -> None:
    assert [name for name, prompt in INSTRUCTED.items() if not asked("Where does the key hang?", prompt, api)] == []


@pytest.mark.parametrize("question", REAL_QUESTIONS)
@pytest.mark.parametrize("instructions", REAL_INSTRUCTIONS)
def test_a_users_question_and_a_system_prompt_are_not_taken_for_one(question: str, instructions: str) -> None:
    assert not asked(question, instructions)


async def test_it_passes_untouched_and_is_not_remembered(client: Client) -> None:
    await client.ask(TOLD)
    await client.settled()
    for prompt in ASKED.values():
        status, memory, _ = await client.ask(prompt)
        assert (status, memory) == (200, "none")
        assert json.loads(client.upstream.chats[-1].body)["messages"] == [{"role": "user", "content": prompt}]
    await client.settled()
    topic = await client.daemon.topics.get("default")
    assert [len(one) for one in topic.buffer.conversations()] == [2]


def test_a_pattern_with_an_outer_choice_is_searched_for_everywhere() -> None:
    requests = SideRequests(Programs(ignore=(r"\Aping|pong",)))
    request = CHAT.parse(json.dumps({"messages": [{"role": "user", "content": "ping? pong!"}]}).encode())
    assert requests.includes(request)
    assert requests.includes(CHAT.parse(b'{"messages": [{"role": "user", "content": "now pong"}]}'))
    assert not requests.includes(CHAT.parse(b'{"messages": [{"role": "user", "content": "now ping"}]}'))


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


def test_the_rules_can_be_turned_off(serving: Serving) -> None:
    daemon = serving({"ingest": {"programs": False}})
    daemon.chat([*AIDER, user(FACT)])
    daemon.chat([user(ASKED["aider"])])
    text = stored(daemon, FACT, "*Briefly* summarize")
    assert "user: Change get_factorial()" in text and "src/app.py" in text


OPENED = "<environment_details>\n# Current Time\n10:05, workshop key bicycle\n</environment_details>"


async def test_wrapping_is_in_the_prompt_and_neither_stored_nor_asked(client: Client) -> None:
    await client.ask(f"<task>\n{TOLD}\n</task>\n\n{OPENED}")
    assert f"<task>\\n{TOLD}\\n</task>\\n\\n<environment_details>" in client.upstream.prompts[-1]
    assert await client.displayed() == [f"user: {TOLD}\nassistant: Noted."]
    await client.ask(f"{WHERE}\n{OPENED}")
    await client.settled()
    assert (await client.receipt())["question"] == WHERE
    assert TOLD in client.upstream.prompts[-1]
    await client.ask(OPENED)
    assert not any("workshop key" in text for text in await client.displayed()), "a message of wrapping alone"


async def test_thinking_is_neither_stored_nor_missed_when_the_client_drops_it(client: Client) -> None:
    client.upstream.answer = lambda request: chat_answer(request, text="<think>\nHm.\n</think>\n\nBehind it.")
    await client.ask(WHERE)
    await client.displayed()
    await client.ask(WHERE, "Behind it.", "Thanks!")
    texts = await client.displayed()
    assert len(texts) == len(set(texts)) and not any("Hm." in text for text in texts)
    topic = await client.daemon.topics.get("default")
    assert [len(one) for one in topic.buffer.conversations()] == [4], "it is the same conversation"
