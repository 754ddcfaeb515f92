"""The traffic of well-known programs: the default patterns of `ingest.strip`, `ignore` and `ignore_system`.

Rule: narrow. An ignored request is not remembered, so a pattern has the words of the program's own prompt, from its
beginning, and no phrase that a user would write. A pattern is linear in the text, which is untrusted: what it repeats
is possessive and ends at the first character that cannot belong to it, so that an opening without its end costs no more
than the text up to the next opening, and takes no words along. Each has the project and the file that it comes from.
"""

from __future__ import annotations

_TO_ITS_END = r"[^<]*+(?:<(?!/?\1>)[^<]*+)*+</\1>"
"""Behind an opening tag whose name is group 1: everything up to its closing tag, unless it is opened again before."""

STRIPPED_BY_DEFAULT = (
    # environment_details: Cline and Roo Code, behind each message (Roo: src/core/environment/getEnvironmentDetails.ts).
    # system-reminder: Claude Code, around and within messages, before and behind a file that it read (issue 50653 of
    # anthropics/claude-code); opencode's plan mode. local-command-caveat: Claude Code, in front of a command's output.
    r"<(environment_details|system-reminder|local-command-caveat)>" + _TO_ITS_END,
    # Codex, messages of their own (codex-rs/core and codex-rs/protocol), on lines of their own.
    r"(?m)^[ \t]*+<(environment_context|user_instructions|turn_aborted)>[ \t]*+\n" + _TO_ITS_END + r"[ \t]*+$",
    # Claude Code, opencode and programs like them begin it with the working directory; else it is the user's own file.
    r"(?m)^[ \t]*+<(env)>[ \t]*+\n\s{0,8}+Working directory:" + _TO_ITS_END + r"[ \t]*+$",
    # Codex: the project's AGENTS.md as a user message (codex-rs/core).
    r"(?m)^# AGENTS\.md instructions[^\n]{0,4096}+\n\s{0,8}+<(INSTRUCTIONS)>" + _TO_ITS_END,
    # Cline: what a hook has to say (sdk/packages/agents/src/agent-runtime.ts).
    r"<(hook_context)(?: [^<>]{0,4096}+)?+>[^<]*+(?:<(?!/?hook_context\b)[^<]*+)*+</hook_context>",
    # Cline (apps/vscode/src/core/prompts/responses.ts) and Roo Code (src/core/task/Task.ts): the words within are the
    # user's, only the tags are wrapping.
    r"(?m)^<(task|feedback|user_message|answer)>[ \t]*+\n(?P<said>[^<]*+(?:<(?!/?\1>)[^<]*+)*+)</\1>",
    # Open WebUI: documents in front of the question (backend/open_webui/config.py, DEFAULT_RAG_TEMPLATE), which stands
    # behind them, in earlier versions between tags.
    r"(?s)\A\s*### Task:\s+Respond to the user query using the provided context, incorporating inline citations"
    r"(?>.*?</context>\s*<user_query>)(?P<said>.*)</user_query>\s*\Z",
    r"(?s)\A\s*### Task:\s+Respond to the user query using the provided context, incorporating inline citations"
    r"(?>.*?</context>)",
    # Aider, for models with `reminder: user`: the edit format behind the last message, up to its end (aider/coders/
    # base_coder.py, editblock_prompts.py, udiff_prompts.py, patch_prompts.py, wholefile_prompts.py). Nothing in it was
    # said; the group keeps the pattern from the ends of results.
    r"(?s)(?P<said>)\n\n#? ?(?:\*SEARCH/REPLACE block\* Rules:\n\nEvery \*SEARCH/REPLACE block\* must use this format:"
    r"|File editing rules:\n\nReturn edits similar to unified diffs"
    r"|V4A Diff Format Rules:\n\nYour entire response containing the patch MUST start with"
    r"|To suggest changes to a file you MUST return the entire content of the updated file\.\n)"
    r".{0,20000}+\Z",
)

IGNORED_BY_DEFAULT = (
    # Open WebUI (backend/open_webui/config.py, the DEFAULT_…_PROMPT_TEMPLATEs). It also opens a real question about
    # documents with "### Task:", and that one must be remembered.
    r"\A\s*### Task:\s+Generate a concise, \d+-\d+ word title",
    r"\A\s*### Task:\s+Generate \d+-\d+ broad tags",
    r"\A\s*### Task:\s+Suggest \d+-\d+ relevant follow-up questions",
    r"\A\s*### Task:\s+Analyze the chat history to determine the necessity of generating search queries",
    r"\A\s*### Task:\s+You are an autocompletion system",
    r"\A\s*### Task:\s+Generate a detailed prompt for a[nm]? image generation task",
    r"\A\s*Your task is to reflect the speaker's likely facial expression through a fitting emoji\.",
    r"\A\s*You have been provided with a set of responses from various models to the latest user query:",
    # Its choice of tools (backend/open_webui/utils/middleware.py, get_tools_function_calling_payload).
    r'\A\s*Query: History:\n[A-Z]+: """',
    # LibreChat (@librechat/agents, createCompletionTitleRunnable and the titles of its endpoints) and programs like it.
    r"\A\s*(?:Please )?(?:[Cc]reate|[Gg]enerate|[Pp]rovide|[Ww]rite) a concise, \d[^.\n]{0,20}word[^.\n]{0,20} "
    r"(?:title|phrase)\b",
    r"\A\s*Analyze this conversation and provide:\s+1\. The detected language of the conversation",
    # Continue (core/util/chatDescriber.ts, core/util/conversationCompaction.ts, extensions/cli/src/compaction.ts).
    r"\A\s*Given the following\.\.\. please reply with a (?:title for the chat|short summary) that is \d",
    r"\A\s*Create a comprehensive summary of this conversation that captures all essential information needed",
    r"\A\s*Please provide a concise summary of our conversation so far, capturing the key context, decisions made,",
    # Zed (crates/agent_settings/src/prompts, crates/agent/src/prompts).
    r"\A\s*Generate a concise \d-\d word title for this conversation, omitting punctuation\.",
    r"\A\s*You are compacting this conversation into a handoff for another agent that will resume the work\.",
    r"\A\s*Generate a detailed summary of this conversation\. Include:",
    # Claude Code's and Zed's and Roo Code's (src/shared/support-prompt.ts) compaction; Claude Code's titles.
    r"\A\s*(?:CRITICAL: Respond with TEXT ONLY\. Do NOT call any tools\.[\s\S]{0,2000}?)?"
    r"Your task is to create a detailed summary of the (?:RECENT portion of the )?conversation",
    r"\A\s*Please write a \d+-\d+ word title (?:for )?the following conversation:",
    # Cline (src/core/prompts/contextManagement.ts).
    r'\A\s*(?:<explicit_instructions type="summarize_task">\s*)?'
    r"The current conversation is rapidly running out of context\.",
    # Codex (codex-rs/core/templates/compact/prompt.md).
    r"\A\s*You are performing a CONTEXT CHECKPOINT COMPACTION\. Create a handoff summary",
    # opencode (packages/opencode/src/session/compaction.ts).
    r"\A\s*Provide a detailed prompt for continuing our conversation above\.\s+Focus on information that would",
    r"\A\s*(?:Create a new anchored summary from|Update the anchored summary below using) the conversation history",
    r"\A\s*Summarize what was done in this conversation\. Write like a pull request description\.",
    # Goose (crates/goose/src/prompts/compaction.md, summarize_oneshot.md, session_name.md).
    r"\A\s*The messages above are a conversation to summarize\. Create a structured context checkpoint",
    r"\A\s*## Summary Task\s+Generate detailed summary of conversation to date\.",
    r"\A\s*Generate a short title \(four words or less\) for this conversation\.",
    # Aider (aider/prompts.py).
    r"\A\s*\*Briefly\* summarize this partial conversation about programming\.",
)

IGNORED_SYSTEM_BY_DEFAULT = (
    # opencode (packages/opencode/src/agent/prompt/title.txt, compaction.txt, summary.txt).
    r"\A\s*You are a title generator\. You output ONLY a thread title\.",
    r"\A\s*(?:You are summarizing a conversation for continuation by another agent"
    r"|You are a helpful AI assistant tasked with summarizing conversations"  # Claude Code's compaction too
    r"|You are an anchored context summarization assistant)",
    r"\A\s*Summarize what was done in this conversation\. Write like a pull request description\.",
    # Claude Code: titles and whether a message begins a new topic. It may introduce itself in the part before.
    r"(?m)^(?:Analyze if this message indicates a new conversation topic\. If it does, extract a \d-\d word title"
    r"|Summarize this coding conversation in under \d+ characters\."
    r"|Generate a concise, sentence-case title \(\d-\d words\) that captures the main topic)",
    # LobeChat (packages/prompts/src/chains/summaryTitle.ts, summaryHistory.ts).
    r"\A\s*You are a professional conversation summarizer\. Generate a concise title",
    r"\A\s*You're an assistant who's good at extracting key takeaways from conversations and summarizing them\.",
    # Cherry Studio (src/renderer/src/config/prompts.ts).
    r"\A\s*You are an assistant skilled in conversation\. You need to summarize the user's conversation into a title",
    r"\A\s*You are an AI question rephraser\.",
    # Open WebUI's choice of tools; its user message is in the other list.
    r"\A\s*Available Tools: [^\n]*+\s+Your task is to choose and return the correct tool\(s\) from the list",
    # Goose (crates/goose/src/prompts).
    r"\A\s*Generate a short title \(four words or less\) for this conversation\.",
    r"\A\s*(?:The messages above are a conversation to summarize\. |## Summary Task\s+Generate detailed summary )",
    # Aider (aider/prompts.py): summaries and commit messages.
    r"\A\s*\*Briefly\* summarize this partial conversation about programming\.",
    r"\A\s*You are an expert software engineer that generates concise, one-line Git commit messages based on",
)
