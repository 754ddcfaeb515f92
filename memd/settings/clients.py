"""The default patterns of `ingest.strip`: the text that well-known programs wrap around their users' words.

Rule: a pattern is linear in the text, which is untrusted: what it repeats is possessive and ends at the first character
that cannot belong to it, so that an opening without its end costs no more than the text up to the next opening, and
takes no words along. Each has the project and the file that it comes from.
"""

from __future__ import annotations

_TO_ITS_END = r"[^<]*+(?:<(?!/?\1>)[^<]*+)*+</\1>"
"""Behind an opening tag whose name is group 1: everything up to its closing tag, unless it is opened again before."""

STRIPPED_BY_DEFAULT = (
    # environment_details: Cline and Roo Code, behind each message (Roo: src/core/environment/getEnvironmentDetails.ts).
    # system-reminder: Claude Code, around and within messages and tool results; opencode's plan mode.
    # environment_context, user_instructions, turn_aborted: Codex, messages of their own (codex-rs/core and
    # codex-rs/protocol). local-command-caveat: Claude Code, in front of a command's output.
    r"<(environment_details|system-reminder|environment_context|user_instructions|turn_aborted|local-command-caveat)>"
    + _TO_ITS_END,
    # Claude Code and programs like it write it on lines of its own; elsewhere it may be the user's XML.
    r"(?m)^[ \t]*+<(env)>[ \t]*+\n" + _TO_ITS_END + r"[ \t]*+$",
    # Codex: the project's AGENTS.md as a user message (codex-rs/core).
    r"(?m)^# AGENTS\.md instructions[^\n]{0,4096}+\n\s{0,8}+<(INSTRUCTIONS)>" + _TO_ITS_END,
    # Cline: what a hook has to say (sdk/packages/agents/src/agent-runtime.ts).
    r"<(hook_context)(?: [^<>]{0,4096}+)?+>[^<]*+(?:<(?!/?hook_context\b)[^<]*+)*+</hook_context>",
    # Cline (apps/vscode/src/core/prompts/responses.ts) and Roo Code (src/core/task/Task.ts): the words within are the
    # user's, only the tags are wrapping.
    r"(?m)^<(task|feedback|user_message|answer)>[ \t]*+\n(?P<said>[^<]*+(?:<(?!/?\1>)[^<]*+)*+)</\1>",
    # Aider, for models with `reminder: user`: the edit format behind the last message, up to its end (aider/coders/
    # base_coder.py, editblock_prompts.py, udiff_prompts.py, patch_prompts.py, wholefile_prompts.py).
    r"(?s)\n\n#? ?(?:\*SEARCH/REPLACE block\* Rules:\n\nEvery \*SEARCH/REPLACE block\* must use this format:"
    r"|File editing rules:\n\nReturn edits similar to unified diffs"
    r"|V4A Diff Format Rules:\n\nYour entire response containing the patch MUST start with"
    r"|To suggest changes to a file you MUST return the entire content of the updated file\.\n)"
    r".{0,20000}+\Z",
)
