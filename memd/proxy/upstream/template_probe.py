"""Probes whether a chat template renders a separate memory message where it stands, by having the server render it.

Rule: a template passes only if the prompt with the block is the prompt without it, plus the block before its question
and nothing else. Where the server renders nothing, there is no verdict.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

Messages = Sequence[Mapping[str, str]]
Render = Callable[[Messages], Awaitable[str | None]]
"""Renders a conversation to a prompt: empty if the template refuses it, None if the server does not answer."""

_BLOCKS = (
    {"role": "developer", "content": "memd asks for the first block."},
    {"role": "developer", "content": "memd asks for the second block."},
)
_ASKED_FIRST = {"role": "user", "content": "memd asks first."}
_ANSWERED = {"role": "assistant", "content": "memd was answered."}
_ASKED_LAST = {"role": "user", "content": "memd asks last."}
_LEADS: tuple[Messages, ...] = (({"role": "system", "content": "memd is being told."},), ())


async def shows_in_place(render: Render) -> bool | None:
    """Whether the blocks of two turns are rendered in place, with and without a system message; None: unknown."""
    for lead in _LEADS:
        plain = [*lead, _ASKED_FIRST, _ANSWERED, _ASKED_LAST]
        one_block = [*lead, _BLOCKS[0], _ASKED_FIRST, _ANSWERED, _ASKED_LAST]
        two_blocks = [*one_block[:-1], _BLOCKS[1], _ASKED_LAST]
        prompt, shown = await render(plain), await render(one_block)
        if not prompt or shown is None:  # a template that refuses even this proves nothing about blocks
            return None
        if not is_inserted(prompt, shown, _BLOCKS[0], before=_ASKED_FIRST, after=lead):
            return False
        both = await render(two_blocks)
        if both is None:
            return None
        if not is_inserted(shown, both, _BLOCKS[1], before=_ASKED_LAST, after=[_ANSWERED]):
            return False
    return True


def is_inserted(
    plain: str, shown: str, block: Mapping[str, str], *, before: Mapping[str, str], after: Messages = ()
) -> bool:
    """Whether `shown` is `plain` with the block between the messages `after` and `before`, each of them there once."""
    texts = [message["content"] for message in (*after, block, before)]
    if any(shown.count(text) != 1 for text in texts):
        return False
    places = [shown.index(text) for text in texts]
    same = _common_prefix(plain, shown) + _common_prefix(plain[::-1], shown[::-1])
    return places == sorted(places) and same >= len(plain)


def _common_prefix(one: str, other: str) -> int:
    """The length of the common prefix of two texts, in characters."""
    pairs = zip(one, other, strict=False)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
