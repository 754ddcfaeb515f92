"""A tool loop longer than the window, played with the real model server, for `memd check --live`.

Rule: it costs little and leaves nothing. It is played by a daemon of its own in a temporary folder, with the user's
settings; of a large window only `ROOM_TOKENS` are used, because what has to be seen is the same: old results leave,
and what stays is still a prompt that the model's chat template takes. It ends after `LOOP_SECONDS_MAX` however slow the
model is.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from memd.cli.check.live import LiveAnswer, key_headers, scratch_config, send
from memd.errors import MemdError
from memd.proxy.app import running
from memd.settings.model import Config

ROOM_TOKENS = 4_096
"""A smaller window is used as it is."""
LOOP_SECONDS_MAX = 120.0
STEPS_MAX = 40
STEPS_A_WINDOW = 6
"""So many results fill it."""
LENGTH = 1.6
"""The loop's length, in windows."""
STEP_REPLY_TOKENS = 32
CHARACTERS_PER_TOKEN = 3.0
"""Assumed of a model that does not tell its count."""
ASKED = "Read the log of each pump, one after the other, and tell me at the end which of them needs oil."
_TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Read the log of a pump.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


class HeldLoop(msgspec.Struct, frozen=True, kw_only=True):
    """How far it came."""

    window: int
    """The tokens that its prompts may take."""
    is_window: bool
    """Whether that is the model's whole window."""
    steps: int
    """The steps that were answered."""
    sent_tokens: int
    """Of the last request that was answered, as the client sent it; estimated."""
    most_tokens: int
    """Of its longest prompt, by the server's count; 0: not told."""
    last: LiveAnswer
    is_out_of_time: bool


def hold_a_loop(config: Config, model: str, window: int | None) -> HeldLoop:
    """Play the loop and return how far it came.

    Args:
        config: the settings to use; their data directory and address are not touched.
        model: what the requests call the model.
        window: the model's, None if it is not known.
    """
    room = ROOM_TOKENS if window is None else min(window, ROOM_TOKENS)
    with tempfile.TemporaryDirectory(prefix="memd-check-") as folder:
        scratch = scratch_config(config, Path(folder))
        if room != window:  # the reply and the block take their share of a window, and so of what stands for it
            hard = room // 2 if scratch.buffer.hard_tokens == "auto" else min(room // 2, scratch.buffer.hard_tokens)
            buffer = msgspec.structs.replace(scratch.buffer, hard_tokens=hard, soft_tokens=hard * 7 // 8)
            injection = msgspec.structs.replace(scratch.injection, budget_tokens=room // 8, sticky_tokens=0)
            scratch = msgspec.structs.replace(scratch, buffer=buffer, injection=injection)
        loop = _Loop(model, room)
        try:
            asyncio.run(loop.play(scratch))
        except (MemdError, OSError) as error:
            loop.last = LiveAnswer(problem=str(error))
    return HeldLoop(
        window=room,
        is_window=room == window,
        steps=loop.steps,
        sent_tokens=loop.sent_tokens,
        most_tokens=loop.most_tokens,
        last=loop.last,
        is_out_of_time=loop.seconds_left <= 0,
    )


class _Loop:
    def __init__(self, model: str, room: int) -> None:
        self._model = model
        self._room = room
        self._ends_at = time.monotonic() + LOOP_SECONDS_MAX
        self._per_token = CHARACTERS_PER_TOKEN
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
        self.steps = 0
        self.sent_tokens = 0
        self.most_tokens = 0
        self.last = LiveAnswer()

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    async def play(self, config: Config) -> None:
        """Ask, answer the model's call or one in its place, and ask again until it is long enough."""
        async with running(config) as daemon, aiohttp.ClientSession(headers=key_headers(config)) as session:
            while self.steps < STEPS_MAX and self.sent_tokens <= self._room * LENGTH and self.seconds_left > 0:
                body = {
                    "model": self._model,
                    "messages": self._messages,
                    "tools": [_TOOL],
                    "max_tokens": STEP_REPLY_TOKENS,
                }
                self.last = await send(session, daemon.base_url, body, {}, self.seconds_left)
                if self.last.problem or self.last.status != 200:
                    return
                self._answered()

    def _answered(self) -> None:
        characters = len(json.dumps(self._messages))
        if self.steps == 0 and self.last.prompt_tokens:
            self._per_token = (characters + len(json.dumps(_TOOL))) / self.last.prompt_tokens
        self.steps += 1
        self.sent_tokens = int(characters / self._per_token)
        self.most_tokens = max(self.most_tokens, self.last.prompt_tokens)
        calls = self.last.message.get("tool_calls") or []
        if calls and all(map(_is_whole, calls)):
            self._messages.append(self.last.message)
        else:  # it talks instead of calling, or its call was cut off: the loop goes on as if it had called
            arguments = json.dumps({"path": f"pump-{self.steps}.log"})
            function = {"name": "read", "arguments": arguments}
            calls = [{"id": f"call_{self.steps}", "type": "function", "function": function}]
            self._messages.append({"role": "assistant", "content": self.last.text, "tool_calls": calls})
        for call in calls:
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": self._log_of_a_pump()})

    def _log_of_a_pump(self) -> str:
        """A result of a share of the window."""
        length = int(self._room / STEPS_A_WINDOW * self._per_token)
        lines = (f"{hour:02}:00 pump {self.steps}: {20 + hour * self.steps % 17} degrees" for hour in range(100_000))
        said = [f"The oil mark of pump {self.steps} is {self.steps * 37 % 100}."]
        while sum(map(len, said)) < length:
            said.append(next(lines))
        return "\n".join(said)


def _is_whole(call: Any) -> bool:
    """Whether a call can be sent back."""
    try:
        return bool(call["id"]) and isinstance(json.loads(call["function"]["arguments"]), dict)
    except (ValueError, LookupError, TypeError):
        return False
