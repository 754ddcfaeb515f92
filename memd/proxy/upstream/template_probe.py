"""Whether a chat template shows a message of memd's own where it stands: asked of the server that has the template.

Rule: a template passes only if the prompt with the block is the prompt without it and the block let in before its
question, nothing else. What the server does not render is not judged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

Messages = Sequence[Mapping[str, str]]
Render = Callable[[Messages], Awaitable[str | None]]
"""The prompt that the server makes of a conversation: empty if its template refuses it, None if it does not say."""

_BLOCKS = (
    {"role": "developer", "content": "memd asks for the first block."},
    {"role": "developer", "content": "memd asks for the second block."},
)
_ASKED_FIRST = {"role": "user", "content": "memd asks first."}
_ANSWERED = {"role": "assistant", "content": "memd was answered."}
_ASKED_LAST = {"role": "user", "content": "memd asks last."}
_LEADS: tuple[Messages, ...] = (({"role": "system", "content": "memd is being told."},), ())


async def shows_in_place(render: Render) -> bool | None:
    """Whether blocks of two turns stand in their places, with a system message and without; None: cannot be told."""
    for lead in _LEADS:
        plain = [*lead, _ASKED_FIRST, _ANSWERED, _ASKED_LAST]
        one_block = [*lead, _BLOCKS[0], _ASKED_FIRST, _ANSWERED, _ASKED_LAST]
        two_blocks = [*one_block[:-1], _BLOCKS[1], _ASKED_LAST]
        prompt, shown = await render(plain), await render(one_block)
        if not prompt or shown is None:  # a template that refuses even this says nothing about blocks
            return None
        if not is_let_in(prompt, shown, _BLOCKS[0], before=_ASKED_FIRST, after=lead):
            return False
        both = await render(two_blocks)
        if both is None:
            return None
        if not is_let_in(shown, both, _BLOCKS[1], before=_ASKED_LAST, after=[_ANSWERED]):
            return False
    return True


def is_let_in(
    plain: str, shown: str, block: Mapping[str, str], *, before: Mapping[str, str], after: Messages = ()
) -> bool:
    """Whether `shown` is `plain` with the block between the messages `after` and `before`, each of them there once."""
    texts = [message["content"] for message in (*after, block, before)]
    if any(shown.count(text) != 1 for text in texts):
        return False
    places = [shown.index(text) for text in texts]
    same = _same(plain, shown) + _same(plain[::-1], shown[::-1])
    return places == sorted(places) and same >= len(plain)


def _same(one: str, other: str) -> int:
    """How many characters two texts have alike from the beginning on."""
    pairs = zip(one, other, strict=False)
    return next((position for position, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
