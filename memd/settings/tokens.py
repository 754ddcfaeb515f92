"""Who may use memd: the settings `auth`, and the list `auth.tokens` as YAML has it.

Rule: as in `loading.py`, which calls this: nothing is guessed at. No message repeats what may be a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from memd.errors import ConfigError
from memd.principals import EVERY_TOPIC, OWNER, OWNER_NAME, RIGHTS, Principal, Right, digest_of, overlapping
from memd.settings.file import Setting, item_problem

TOKEN_CHARACTERS_MIN = 16
REMEDY_IF_SHORT = "take a longer one, for example what `openssl rand -hex 24` prints"
TOKENS_MAX = 10_000
PRINCIPAL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$(?!\n)"
PRINCIPAL_NAME_RULE = "1 to 64 letters, digits, '.', '_', '@' or '-', beginning with a letter or digit"
TopicPattern = Annotated[str, Meta(pattern=r"^[*A-Za-z0-9][*A-Za-z0-9._-]{0,127}$(?!\n)")]
_ALLOWED = {
    "name": PRINCIPAL_NAME_RULE,
    "token_sha256": "the 64 hexadecimal digits of the token's SHA-256 (`memd token add` makes both)",
    "topics": f"a list of one or more names of topics, in which * stands for any characters ({EVERY_TOPIC}: all)",
    "rights": f"a list of one or more of {', '.join(RIGHTS)}",
}
_STARS_MAX = 8
"""Of one pattern: more slow the matching down, and nobody needs them."""


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `auth.tokens`: whose token it is, where it holds and for what."""

    name: Annotated[str, Meta(pattern=PRINCIPAL_NAME)]
    token_sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")]
    """SHA-256 of the token, in hexadecimal digits."""
    topics: Annotated[tuple[TopicPattern, ...], Meta(min_length=1, max_length=64)]
    """Patterns of topic names; `*` stands for any characters."""
    rights: Annotated[tuple[Right, ...], Meta(min_length=1)]

    @property
    def principal(self) -> Principal:
        """The principal who shows the token."""
        return Principal(self.name, self.topics, frozenset(self.rights))


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may use memd."""

    token: str = ""
    """The owner's token: it has every right in every topic. Without it and without `tokens` none is needed, and memd
    does not listen beyond this machine."""
    tokens: tuple[TokenSettings, ...] = ()
    """Tokens with topics and rights, besides those of `memd token`: see docs/rights.md."""

    @property
    def is_short(self) -> bool:
        """Whether there is a token that others might guess."""
        return 0 < len(self.token) < TOKEN_CHARACTERS_MIN

    @property
    def is_closed(self) -> bool:
        """Whether a token is needed."""
        return bool(self.token or self.tokens)


def known_principals(auth: AuthSettings) -> Mapping[bytes, Principal]:
    """The principals by the SHA-256 of their tokens; none where no token is needed."""
    known = {bytes.fromhex(one.token_sha256): one.principal for one in auth.tokens}
    return known | ({digest_of(auth.token): OWNER} if auth.token else {})


def token_changes(before: AuthSettings, now: AuthSettings) -> str:
    """Say which tokens are new, gone or others than before, by their names; empty if none is."""
    old, new = ({one.name: one for one in auth.tokens} for auth in (before, now))
    changed = [name for name in old.keys() & new.keys() if _held(old[name]) != _held(new[name])]
    if before.token and now.token and before.token != now.token:
        changed.append(OWNER_NAME)
    added, gone = new.keys() - old.keys(), old.keys() - new.keys()
    if bool(before.token) != bool(now.token):
        (added if now.token else gone).add(OWNER_NAME)
    told = (("added", added), ("gone", gone), ("changed", changed))
    return "; ".join(f"{word}: {', '.join(sorted(names))}" for word, names in told if names)


def read_tokens(setting: Setting) -> tuple[TokenSettings, ...]:
    """Return the tokens of a list as YAML has it.

    Raises:
        ConfigError: the list or one of its items is not what it should be.
    """
    given = setting.value
    if given in (None, ""):
        return ()
    if not isinstance(given, list | tuple) or len(given) > TOKENS_MAX:
        lines = "`- name: …`, `token_sha256: …`, `topics: […]`, `rights: […]`"
        raise ConfigError(
            f"{setting.place}: {setting.key} is no list of at most {TOKENS_MAX:,} items; give lines {lines}"
        )
    places = setting.item_places or [setting.place] * len(given)
    tokens = []
    for number, (place, item) in enumerate(zip(places, given, strict=True), 1):
        try:
            tokens.append(msgspec.convert(item, TokenSettings))
        except (msgspec.ValidationError, RecursionError) as error:
            problem = item_problem(error, item, TokenSettings, _ALLOWED, hidden="token_sha256")  # it may be the token
            hint = "; a token itself has no place here, its SHA-256 has" if "no setting `token`" in problem else ""
            raise ConfigError(f"{place}: {setting.key}, item {number}: {problem}{hint}") from None
    for number, problem in token_problems(tokens):
        raise ConfigError(f"{places[number]}: {setting.key}, item {number + 1}: {problem}")
    return tuple(tokens)


def token_problems(tokens: Sequence[TokenSettings], owner_token: str = "") -> Iterator[tuple[int, str]]:
    """Yield the index of a token and what is wrong with it, by itself and beside the others."""
    for number, one in enumerate(tokens):
        if one.name == OWNER_NAME:
            yield number, f"the name {OWNER_NAME} is that of auth.token; give another one"
        if len(set(one.rights)) < len(one.rights):
            yield number, f"{one.name} has a right twice; remove one"
        if found := overlapping(one.topics):
            first, second = found
            same = "twice; remove one" if first == second else f"and {second}, which overlap; leave the narrower out"
            yield number, f"the topics of {one.name} have {first} {same}"
        if any(pattern.count("*") > _STARS_MAX for pattern in one.topics):
            yield number, f"the topics of {one.name} have a pattern with more than {_STARS_MAX} stars; write it shorter"
        if owner_token and bytes.fromhex(one.token_sha256) == digest_of(owner_token):
            yield number, f"{one.name} has the token that auth.token is; a token belongs to one principal"
    names: set[str] = set()
    digests: dict[str, str] = {}
    for number, one in enumerate(tokens):
        if one.name in names:
            yield number, f"there is another token with the name {one.name}; give each its own name"
        if (digest := one.token_sha256.lower()) in digests:
            yield number, f"{one.name} has the same token as {digests[digest]}; a token belongs to one principal"
        names.add(one.name)
        digests[digest] = one.name


def _held(one: TokenSettings) -> tuple[object, ...]:
    return one.token_sha256.lower(), one.topics, one.rights
