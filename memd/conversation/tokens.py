"""Counts the tokens of texts and messages, and learns how a model's own counts differ.

Rule: counts are *raw* cl100k_base tokens; only `Drift` converts them to a model's own. The tokenizer's ranks are passed
in; nothing is read or fetched. Text is untrusted: `<|endoftext|>` counts as plain characters, and counting takes at
most linear time. Thread-safe.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np
import tiktoken
from msgspec import UNSET, json

from memd.caching import ENTRY_BYTES, ByteCache, CachedFunction, Latest
from memd.messages import Message

MESSAGE_OVERHEAD = 4
"""Tokens that a chat template adds around a message: opening and closing control token, role, newline."""
ATTACHMENT_TOKENS = 576
"""Tokens of an image: the 24 × 24 patches of CLIP at 336 pixels, as in LLaVA 1.5. Models differ."""

_BLOCK_CHARACTERS = 10_000
"""Longer texts are counted in blocks; each joint adds at most a token or two. tiktoken alone (0.14, 2 cores) is not
linear: a million characters of Chinese without punctuation take 1,080 ms (10,000 take 2.5 ms), of spaces 410 ms. A
million spaces before a letter overflow its regular expression's stack: a Rust panic, not an `Exception`."""
_SAMPLES, _SAMPLE_CHARACTERS = 50, 400
_CALLS_ALONE_MAX = 64
_EXACT_CHARACTERS_MAX = _SAMPLES * _SAMPLE_CHARACTERS
"""Longer texts of a prompt are estimated: 1.6 MB made a request wait for up to a second. Near its limit a prompt is
counted by the upstream, and refusals are learned from. The error is 5 % for text of one kind, 15 % for prose, code,
Chinese and base64 in turns (tests/test_tokens.py)."""
_COUNTS_BYTES_MAX = 6_000_000  # enough for the histories of forty busy clients
_KEY_BYTES = 60  # per count of a message
_TEXTS_BYTES_MAX = 4_000_000

_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_SPECIAL_TOKENS = {
    "<|endoftext|>": 100257,
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}


def cl100k_base(ranks: bytes) -> tiktoken.Encoding:
    """Build the encoding from its published file (`assets.ranks_bytes`: lines of base64 token bytes, a space, the
    rank), like tiktoken_ext.openai_public; takes 0.1 s. Raises ValueError: it is not such a file."""
    # Parsing it as JSON, in C, takes a fifth of the time of parsing lines, at each start.
    members = ranks.rstrip().replace(b" ", b'":').replace(b"\n", b',"')
    mergeable_ranks = json.decode(b'{"' + members + b"}", type=dict[bytes, int])
    encoding = tiktoken.Encoding(
        "cl100k_base", pat_str=_PATTERN, mergeable_ranks=mergeable_ranks, special_tokens=_SPECIAL_TOKENS
    )
    encoding._mergeable_ranks = {}  # kept only for pickling: 13 MB, of which its core has another copy
    return encoding


class TokenCounter:
    """Counts raw tokens and caches the counts of messages; `drift` converts them to a model's own."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self.drift = Drift()
        self._encoding = encoding
        self._lengths = np.zeros(encoding.n_vocab, np.uint8)
        """Byte length of each token; 0 if not looked up yet."""
        self._counts: ByteCache[tuple[bytes, int, int], int] = ByteCache(_COUNTS_BYTES_MAX)
        self.count_again = CachedFunction(self.count, _TEXTS_BYTES_MAX, sys.getsizeof)
        """`count` with a cache, for short texts that recur, such as recalled chunks."""
        self.estimate_again = CachedFunction(self.estimate, _TEXTS_BYTES_MAX, sys.getsizeof)
        """`estimate` with a cache, for a program's tools, which recur in each of its requests."""

    @property
    def cache_bytes(self) -> int:
        """Bytes held by the caches."""
        return self._counts.bytes_held + self.count_again.bytes_held + self.estimate_again.bytes_held

    def count(self, text: str) -> int:
        """Return the raw tokens of `text`. About 50 ms per megabyte of prose, 300 ms at worst."""
        blocks = (text[start : start + _BLOCK_CHARACTERS] for start in range(0, len(text), _BLOCK_CHARACTERS))
        return sum(len(self._encoding.encode_ordinary(block)) for block in blocks)

    def ends(self, text: str) -> list[int]:
        """Return where each raw token of `text` ends, in characters; one that ends within a character counts to its
        end."""
        ids = np.array(self._encoding.encode_ordinary(text), np.intp)
        for one in set(ids[self._lengths[ids] == 0].tolist()):
            self._lengths[one] = len(self._encoding.decode_single_token_bytes(one))
        ends = np.cumsum(self._lengths[ids], dtype=np.intp)
        if not text.isascii():
            try:
                data = np.frombuffer(text.encode(), np.uint8)
            except UnicodeEncodeError:  # surrogate pairs, which tiktoken encodes as characters
                whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                data = np.frombuffer(whole.encode(), np.uint8)
            ends = np.cumsum((data & 0xC0) != 0x80)[np.minimum(ends, len(data)) - 1]
        found: list[int] = ends.tolist()
        return found

    def estimate(self, text: str) -> int:
        """Return the raw tokens of `text`; a long one is estimated from samples, slightly high: 2 ms, 30 ms at worst.
        Depends only on the text, so it is the same after a restart."""
        if len(text) <= _EXACT_CHARACTERS_MAX:
            return self.count(text)
        step = (len(text) - _SAMPLE_CHARACTERS) / (_SAMPLES - 1)
        starts = (round(number * step) for number in range(_SAMPLES))
        counts = [self.count(text[start : start + _SAMPLE_CHARACTERS]) for start in starts]
        mean = sum(counts) / _SAMPLES
        doubt = math.sqrt(sum((one - mean) ** 2 for one in counts) / (_SAMPLES - 1) / _SAMPLES)
        return math.ceil((mean + doubt) * len(text) / _SAMPLE_CHARACTERS)

    def known(self, messages: Sequence[Message], content_digests: Sequence[bytes]) -> list[int | None]:
        """Return the cached count of each message, or None; takes 0.4 µs each, because there are thousands."""
        return self._counts.use(map(_key, messages, content_digests))

    def message(self, message: Message, content_digest: bytes) -> int:
        """Return the raw tokens of a message in a prompt: text, tool calls, attachments and the template around them;
        `content_digest`: its own, which the caller already has."""
        [known] = self.known([message], [content_digest])
        if known is not None:
            return known
        texts = [message.text, message.name, message.tool_call_id]
        for call in message.tool_calls:
            texts += [call.id, call.name, call.arguments]
        if len(message.tool_calls) > _CALLS_ALONE_MAX:
            texts = ["\n".join(texts)]  # so that it is estimated: one call of ten words takes 30 µs
        attached = ATTACHMENT_TOKENS * len(message.attachments)
        overhead = MESSAGE_OVERHEAD * (1 + len(message.tool_calls))
        tokens = sum(self.estimate(text) for text in texts) + attached + overhead
        self._counts.put(_key(message, content_digest), tokens, ENTRY_BYTES + _KEY_BYTES)
        return tokens

    def messages(self, messages: Sequence[Message], content_digests: Sequence[bytes]) -> list[int]:
        """See `message`; the sequences run in parallel."""
        each = zip(messages, content_digests, self.known(messages, content_digests), strict=True)
        return [self.message(one, digest) if known is None else known for one, digest, known in each]


class Drift:
    """A factor per model from raw tokens to the model's own, learned from the `usage.prompt_tokens` of its answers. It
    rises fast and falls slowly: too low a factor overflows prompts, too high a one only shortens them."""

    FACTOR_MIN = 0.5
    FACTOR_MAX = 6.0
    """A model with byte fallback has one token per character: 4.5 times the raw count of English, at most 6."""
    RISE = 0.7
    FALL = 0.1
    TOKENS_MIN = 100
    """Smaller prompts are ignored, because the template's fixed words are too large a part of them."""
    MODELS_MAX = 64  # clients choose model names freely

    def __init__(self) -> None:
        self._factors: Latest[str, float] = Latest(self.MODELS_MAX)
        self._lock = threading.Lock()

    def factor(self, model: str) -> float:
        """Return the present factor of `model`, 1.0 while unknown."""
        return self._factors.get(model, 1.0)

    def is_known(self, model: str) -> bool:
        """Return whether `observe` was called for `model`."""
        return model in self._factors

    @property
    def latest_model(self) -> str:
        """The model observed last; empty if there is none."""
        return next(reversed(self._factors), "")

    def drifted(self, model: str, raw_tokens: int) -> int:
        """Return `raw_tokens` in tokens of `model`, rounded up."""
        return math.ceil(raw_tokens * self.factor(model))

    def observe(self, model: str, raw_tokens: int, prompt_tokens: int) -> None:
        """Learn from one answer: our raw count of the whole forwarded prompt, and the model's (`usage.prompt_tokens`,
        including cached ones)."""
        if raw_tokens < self.TOKENS_MIN or prompt_tokens <= 0:
            return
        ratio = min(max(prompt_tokens / raw_tokens, self.FACTOR_MIN), self.FACTOR_MAX)
        with self._lock:
            factor = self.factor(model)
            first_rise = (
                1.0 if model not in self._factors else self.RISE
            )  # the initial 1.0 was not learned and has no weight
            weight = first_rise if ratio > factor else self.FALL
            self._factors[model] = factor + weight * (ratio - factor)


def _key(message: Message, content_digest: bytes) -> tuple[bytes, int, int]:
    # The digest ignores white space and arguments, which may be long, and unsaid text, which may be anything.
    length = len(message.text)
    if message.tool_calls:
        length += sum([len(call.arguments) for call in message.tool_calls])
    return content_digest, length, 0 if message.own_words is UNSET else hash(message.text)
