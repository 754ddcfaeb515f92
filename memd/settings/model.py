"""The settings: names, defaults and bounds; and the addresses of HTTP servers in them.

Rule: defaults are here and in `defaults.yaml`, where comments explain the settings; a test keeps them equal. A field
whose type is annotated with a sentence was a setting and is a constant now, which tests may override: the sentence
tells a user whose file still has it what holds. Addresses are judged by their text alone, without a resolver, whose
answer may change a moment later.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec
from msgspec import Meta

from memd.principals import OWNER, OWNER_NAME, Principal, Right, digest_of

WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104  # compared, not bound
"""Hosts that mean every address of this machine."""
_ROUTE = re.compile(r"(?:(?<![:/])/+v1)*(?:/chat/completions)?/*$")
"""The surplus end of an address copied from another program's settings."""


def without_credentials(url: str) -> str:
    """Return an address without user and password, even if it is malformed."""
    return re.sub(r"(?<=//).*@", "", url)


def basic_authorization(url: str) -> str | None:
    """Return the header value for the user and password in an address (RFC 7617); None if it has none."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    return f"Basic {base64.b64encode(unquote_to_bytes(user)).decode()}" if at else None


def base_of(url: str) -> str:
    """Return a model server's address as memd uses it, without `/`, `/v1` or `/v1/chat/completions` at its end."""
    return _ROUTE.sub("", url)


def place_of(url: str) -> tuple[str, str, int | None, str]:
    """Return scheme, host, port and path of a valid address; equal ones are the same server."""
    parts = urlsplit(base_of(url))
    return parts.scheme, parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme), parts.path


def is_this_machine(host: str) -> bool:
    """Return whether a host in an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def url_problem(url: str) -> str | None:
    """Return why this is not the address of a server; None if it is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # A `/` or `#` in a password has probably ended the host too early, and the error quotes it.
        return "a user and password have to be percent-encoded" if "@" in url else str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "not the address of an HTTP server"
    if parts.query or parts.fragment or "@" in parts.path or " " in url:
        return "more than an address (a user and password have to be percent-encoded)"
    return None


PATTERN_NAME = r"^[A-Za-z0-9_-]{1,40}$"
PATTERN_COUNTRY = "^[A-Z]{2}$"
PATTERN_WORD = r"^[^\x00-/:-@\[-`{-\x7f]([^\x00-\x1f\x7f]*[^\x00-/:-@\[-`{-\x7f])?$"

RedactionName = Literal[
    "private_key", "url_credentials", "jwt", "api_key", "bearer_token", "password", "login", "cookie", "card_number",
    "iban",
]  # fmt: skip
"""The built-in redaction patterns; `assets/redaction.toml` has them."""
PersonName = Literal["email", "national_id", "phone"]
"""The opt-in patterns of `redact_persons`; `ingest/redaction.py` has them."""
LISTED_WORD = "word"
"""Mark for words in `redact_words`: `[redacted:word]`."""
PatternName = Annotated[str, Meta(pattern=PATTERN_NAME)]
CountryCode = Annotated[str, Meta(pattern=PATTERN_COUNTRY)]
ListedWord = Annotated[str, Meta(min_length=1, max_length=100, pattern=PATTERN_WORD)]

BucketUrl = Annotated[str, Meta(pattern=r"^(?:s3://[A-Za-z0-9][A-Za-z0-9.-]*(?:/[A-Za-z0-9._-]+)*/?)?$")]


class BackupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The continuous backup to a bucket."""

    bucket: BucketUrl = ""
    endpoint: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    seconds: Annotated[float, "changes go to the bucket every ten seconds: at most those are lost with a disk"] = 10.0
    keep_days: Annotated[int, Meta(ge=1, le=3_650)] = 7

    @property
    def is_on(self) -> bool:
        """True if there is a bucket."""
        return bool(self.bucket)


class EncryptionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Encryption of the data directory."""

    key_file: str = ""
    key: str = ""

    @property
    def is_on(self) -> bool:
        """True if there is a key."""
        return bool(self.key or self.key_file)


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The topics kept open in memory."""

    topic_idle_seconds: Annotated[
        float, "a topic is closed after ten minutes without a request, see store.memory_bytes_max"
    ] = 600.0
    memory_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 4 << 30


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The log that several daemons share."""

    database: str = ""

    @property
    def is_on(self) -> bool:
        """True if this daemon is one of several, and `data_dir` a copy."""
        return bool(self.database)


Seconds = Annotated[float, Meta(ge=0, le=604_800)]
Tokens = Annotated[int, Meta(ge=256, le=100_000_000)]
Threshold = Literal["auto"] | Tokens
Prefix = Annotated[str, Meta(max_length=1_000)]
HeaderName = Annotated[str, Meta(max_length=200, pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]*$")]
Text = Annotated[str, Meta(min_length=1, max_length=4_096, pattern=r"^[^\x00-\x1f\x7f]+$")]


UPSTREAMS_MAX = 64
TopicName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Same as `entries.TOPIC_ID_PATTERN`."""
AUTO_TOPIC = "auto"
BEGINNING_OF_TOPIC = r"^(?:[A-Za-z0-9][A-Za-z0-9._-]{0,127})?\*?$"


class ListenSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The address that memd listens on."""

    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8765
    tls_cert: str = ""
    tls_key: str = ""


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The address of memd's own page and routes."""

    port: Literal["auto"] | Annotated[int, Meta(ge=0, le=65_535)] = "auto"


class UpstreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model server that memd forwards to."""

    url: Text = "http://127.0.0.1:8080"
    urls: Annotated[tuple[Text, ...], Meta(max_length=UPSTREAMS_MAX)] = ()
    window: Literal["auto"] | Tokens | dict[Text, Tokens] = "auto"
    api_key: str = ""

    @property
    def address(self) -> str:
        """`url` without user and password, which may be shown and logged."""
        return without_credentials(self.url)

    @property
    def authorization(self) -> str | None:
        """The header value for the user and password in `url` (RFC 7617); None if it has none."""
        return basic_authorization(self.url)

    def each(self) -> tuple[UpstreamSettings, ...]:
        """Return each server's settings, with its address as `url` and no `urls`."""
        if not self.urls:
            return (self,)
        return tuple(msgspec.structs.replace(self, url=url, urls=()) for url in self.urls)


class BufferSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The hot buffer: the part of each conversation that is still in the prompt."""

    soft_tokens: Annotated[
        Threshold, "what leaves after a reply is an eighth less than what has to leave before a request"
    ] = "auto"
    hard_tokens: Annotated[
        Threshold, "the window decides when old turns leave: set upstream.window to a smaller one"
    ] = "auto"
    idle_seconds: Annotated[float, "a conversation that rests for five minutes is stored completely"] = 300.0
    store_after_seconds: Annotated[float, "turns are stored a second after their reply"] = 1.0
    journal_fsync: Literal["interval", "always"] = "interval"


class CompactionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Moving the oldest turns from the buffer into the log."""

    retry_seconds: Annotated[
        float, "a write that failed is tried again after 5 s, then ever more rarely, at least every 30 s"
    ] = 5.0


class ChunkingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Cutting turns into the chunks that are stored and recalled. Tokens are cl100k tokens."""

    min_tokens: Annotated[int, "a chunk has at least 50 tokens, unless its turn ends before"] = 50
    max_tokens: Annotated[int, "a chunk has at most 300 tokens"] = 300


class DedupeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Leaving out repetitions within one compaction."""

    cosine: Annotated[float, "chunks with the same words count as one from a similarity of 0.99 on"] = 0.99


class SegmentSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The files of the log."""

    max_entries: Annotated[int, "a segment has 5,000 entries, then it is sealed and gets its vector index"] = 5000


class RetrievalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Finding the chunks that matter for the current question."""

    question: Literal["auto", "table", "model"] = "auto"
    """The vectors that find chunks by meaning: the question table's, which cost nothing, but bring something for every
    question; the embedding model's; or the model's only if the table and words leave silence open."""
    top_k: Annotated[int, "as many chunks are recalled as fit injection.budget_tokens"] = 0
    min_score: Annotated[float, Meta(ge=0, le=1)] = 0.06
    lexical_weight: Annotated[float, "the share of words (BM25) beside meaning in a score, as measured"] = 0.65
    feedback_weight: Annotated[float, "a fifth of a score is the likeness to the five best chunks, as measured"] = 0.2
    neighbour_weight: Annotated[float, "a short chunk gets 0.3 of its neighbours' relevance, as measured"] = 0.3
    time_weight: Annotated[float, "what was said at a time that a question names counts up to three times"] = 2.0
    recall_budget_ms: Annotated[int, Meta(ge=1, le=600_000)] = 20
    timeout_ms: Annotated[int, "a recall that takes longer than two seconds is skipped (degraded:timeout)"] = 2000
    global_topics: tuple[TopicName, ...] = ()


class InjectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Putting recalled chunks into the prompt."""

    budget_tokens: Annotated[int, Meta(ge=64, le=1_000_000)] = 2000
    sticky_tokens: Annotated[
        int, "blocks of earlier turns have 4,000 tokens together, a quarter of the window at most"
    ] = 4000
    pressure_ratio: Annotated[float, "context_pressure is signalled from 0.8 on, context_overflow above 1"] = 0.8
    freeze_seconds: Annotated[float, "a request that is repeated within two minutes is a retry: same block"] = 120.0


class TopicsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which topic a request belongs to."""

    header: HeaderName = ""
    from_user: bool = False


class ConversationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The live conversations."""

    max_open: Annotated[int, "256 conversations are kept in memory, and the others stored"] = 256
    header: HeaderName = ""
    history: Literal["client", "daemon"] = "client"


class IngestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and text that are not remembered, and secrets that are replaced."""

    programs: bool = True
    ignore: tuple[Text, ...] | None = None
    ignore_system: tuple[Text, ...] | None = None
    strip: tuple[Text, ...] | None = None
    redact: bool = False
    redact_builtin: tuple[RedactionName, ...] = get_args(RedactionName)
    redact_patterns: dict[PatternName, Text] = {}
    redact_persons: tuple[PersonName, ...] = ()
    redact_countries: Annotated[tuple[CountryCode, ...], Meta(max_length=10)] = ()
    redact_words: Annotated[tuple[ListedWord, ...], Meta(max_length=10_000)] = ()
    reindex_seconds: Annotated[
        float, "sources are read again every five minutes, and when files change; `memd add` reads once"
    ] = 300.0


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the `sources`: a folder whose files are remembered."""

    path: Text
    """The folder; relative to the settings' file."""
    topic: TopicName = "default"
    """The topic of its documents; auto: the topic named like the folder."""
    exclude: tuple[Text, ...] = ()
    """Names, patterns or paths of files and folders in it to leave out."""
    formats: tuple[Annotated[str, Meta(pattern=r"^[.]?[A-Za-z0-9]{1,16}$")], ...] = ()
    """Suffixes of the files to read; empty: all readable ones."""
    follow_links: bool = False
    """Follow links that lead out of the folder."""


class EmbeddingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model that turns text into vectors."""

    model: Text = "bundled"
    threads: Annotated[int, "a text is embedded by one thread"] = 1
    idle_unload_seconds: Seconds = 0.0
    query_prefix: Prefix = "auto"
    text_prefix: Prefix = "auto"
    url: str = ""
    name: Annotated[str, Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    api_key: str = ""


class RerankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A reranker that reorders the best candidates."""

    url: str = ""
    name: Annotated[str, Meta(max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
    api_key: str = ""
    timeout_ms: Annotated[int, "a question waits half a second for the reranker, then the order stays"] = 500


class LimitsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what a client or the upstream may send."""

    body_bytes_max: Annotated[int, Meta(ge=1_024, le=1 << 32)] = 100 * 1024 * 1024
    """Size of a request body; larger ones get 413."""
    bodies_bytes_max: Annotated[
        int, "the bodies of all requests have 512 MB, or limits.body_bytes_max where that is more"
    ] = 512 * 1024 * 1024
    capture_bytes_max: Annotated[int, "at most 8 MB of a reply are remembered"] = 8 * 1024 * 1024
    connections_max: Annotated[int, "1,000 clients may be connected, fewer where the limit of descriptors is low"] = (
        1000
    )
    idle_seconds: Annotated[float, "a connection may wait 75 s for its next request or for more of a body"] = 75.0


class ReceiptsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The record of what memory did in each turn: the question, the block, the scores, the reply."""

    enabled: bool = True
    bytes_max: Annotated[
        int, "receipts have 32 MB, about 2,000 turns; when they are full, the oldest half is dropped"
    ] = 32 * 1024 * 1024


class AuditSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The record of who read, wrote, corrected, erased and exported what."""

    record: Literal["auto", "always", "never"] = "auto"
    keep_months: Annotated[int, Meta(ge=0, le=1_200)] = 24


class ShutdownSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Ending memd."""

    grace_seconds: Annotated[float, "replies in flight have 10 s when memd ends"] = 10.0


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Messages on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    content: bool = False


TOKEN_CHARACTERS_MIN = 16
REMEDY_IF_SHORT = "take a longer one, for example what `openssl rand -hex 24` prints"
PRINCIPAL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$(?!\n)"
TopicPattern = Annotated[str, Meta(pattern=r"^[*A-Za-z0-9][*A-Za-z0-9._-]{0,127}$(?!\n)")]


class TokenSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `auth.tokens`: its principal, topics and rights."""

    name: Annotated[str, Meta(pattern=PRINCIPAL_NAME)]
    token_sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")]
    """SHA-256 of the token, in hexadecimal digits."""
    topics: Annotated[tuple[TopicPattern, ...], Meta(min_length=1, max_length=64)]
    """Patterns of topic names; `*` matches any characters."""
    rights: Annotated[tuple[Right, ...], Meta(min_length=1)]

    @property
    def principal(self) -> Principal:
        """The principal to whom the token belongs."""
        return Principal(self.name, self.topics, frozenset(self.rights))


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may use memd."""

    token: str = ""
    tokens: tuple[TokenSettings, ...] = ()

    @property
    def is_short(self) -> bool:
        """True if the token is short enough to be guessed."""
        return 0 < len(self.token) < TOKEN_CHARACTERS_MIN

    @property
    def is_closed(self) -> bool:
        """True if a token is needed."""
        return bool(self.token or self.tokens)


def known_principals(auth: AuthSettings) -> Mapping[bytes, Principal]:
    """Return the principals by the SHA-256 of their tokens; empty if no token is needed."""
    known = {bytes.fromhex(one.token_sha256): one.principal for one in auth.tokens}
    return known | ({digest_of(auth.token): OWNER} if auth.token else {})


def token_changes(before: AuthSettings, now: AuthSettings) -> str:
    """Return which tokens were added, removed or changed, by name; empty if none."""
    old, new = ({one.name: one for one in auth.tokens} for auth in (before, now))
    changed = [name for name in old.keys() & new.keys() if _held(old[name]) != _held(new[name])]
    if before.token and now.token and before.token != now.token:
        changed.append(OWNER_NAME)
    added, gone = new.keys() - old.keys(), old.keys() - new.keys()
    if bool(before.token) != bool(now.token):
        (added if now.token else gone).add(OWNER_NAME)
    groups = (("added", added), ("gone", gone), ("changed", changed))
    return "; ".join(f"{word}: {', '.join(sorted(names))}" for word, names in groups if names)


def _held(one: TokenSettings) -> tuple[object, ...]:
    return one.token_sha256.lower(), one.topics, one.rights


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, one group per field."""

    listen: ListenSettings = ListenSettings()
    admin: AdminSettings = AdminSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    data_dir: Path = Path("memory")
    sources: tuple[SourceSettings, ...] = ()
    retention: dict[
        Annotated[str, Meta(pattern=BEGINNING_OF_TOPIC, min_length=1)], Annotated[int, Meta(ge=0, le=36_500)]
    ] = {}
    buffer: BufferSettings = BufferSettings()
    compaction: CompactionSettings = CompactionSettings()
    chunking: ChunkingSettings = ChunkingSettings()
    dedupe: DedupeSettings = DedupeSettings()
    segment: SegmentSettings = SegmentSettings()
    store: StoreSettings = StoreSettings()
    cluster: ClusterSettings = ClusterSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    injection: InjectionSettings = InjectionSettings()
    topics: TopicsSettings = TopicsSettings()
    conversation: ConversationSettings = ConversationSettings()
    ingest: IngestSettings = IngestSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    rerank: RerankSettings = RerankSettings()
    auth: AuthSettings = AuthSettings()
    encryption: EncryptionSettings = EncryptionSettings()
    backup: BackupSettings = BackupSettings()
    limits: LimitsSettings = LimitsSettings()
    receipts: ReceiptsSettings = ReceiptsSettings()
    audit: AuditSettings = AuditSettings()
    shutdown: ShutdownSettings = ShutdownSettings()
    log: LogSettings = LogSettings()
