"""Which requests a program makes for itself, by the words of real programs, and which real questions are not taken
for one."""

from __future__ import annotations

import json

import pytest
from daemon_in_process import Client
from test_turn import FACT

from memd.proxy.reading import SideRequests
from memd.settings.model import Config
from memd.settings.programs import Programs, programs_of
from memd.wire.anthropic import ANTHROPIC
from memd.wire.api import Api
from memd.wire.chat import CHAT
from memd.wire.responses import RESPONSES

SIDE_REQUESTS = SideRequests(programs_of(Config().ingest))

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


def asked(question: str, instructions: str = "You are a helpful assistant.", api: Api = CHAT) -> bool:
    messages = [{"role": "user", "content": question}]
    if api is RESPONSES:
        body: dict[str, object] = {"input": messages, "instructions": instructions}
    elif api is ANTHROPIC:
        parts = [{"type": "text", "text": line} for line in instructions.split("\n")]
        body = {"messages": messages, "system": parts}
    else:
        body = {"messages": [{"role": "system", "content": instructions}, *messages]}
    return SIDE_REQUESTS.includes(api.parse(json.dumps(body).encode()))


@pytest.mark.parametrize("api", [RESPONSES, ANTHROPIC], ids=lambda api: api.name)
def test_a_request_is_known_by_its_system_prompt_in_each_api(api: Api) -> None:
    assert [name for name, prompt in INSTRUCTED.items() if not asked("Where does the key hang?", prompt, api)] == []


@pytest.mark.parametrize("question", REAL_QUESTIONS)
def test_a_users_question_is_not_taken_for_one(question: str) -> None:
    assert not asked(question)


@pytest.mark.parametrize("instructions", REAL_INSTRUCTIONS)
def test_a_system_prompt_is_not_taken_for_one(instructions: str) -> None:
    assert not asked("Where does the key hang?", instructions)


async def test_it_passes_untouched_and_is_not_remembered(client: Client) -> None:
    await client.ask(FACT)
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
