"""Every error memd raises on purpose, in one tree.

Rule: a message says what happened, to which file or field, and what to do now. Code outside this module raises one of
these or lets a genuine bug surface as itself; it never wraps a bug in a `MemdError`.
"""

from __future__ import annotations


class MemdError(Exception):
    """Root of the tree; its text is shown to people unchanged."""

    status, kind = 503, "unavailable"
    """HTTP status and error type when one of memd's own routes refuses a request with it."""


class WrongRequest(MemdError):
    """Base of errors that the caller can avoid with another request."""

    status, kind = 400, "invalid_request_error"


class ConfigError(MemdError):
    """A setting is unknown, of the wrong type or out of range; the text names the key, the line and the remedy."""


class BadTopicId(WrongRequest):
    """A topic id that does not match `entries.TOPIC_ID_PATTERN`; such a name never reaches the file system."""


class BadRequestBody(MemdError):
    """A request body that memd cannot read as a chat request; it is forwarded untouched."""


class BadMemoryIn(MemdError):
    """A `memory_in` without the documented shape; the request goes on without memory."""


class BadNote(MemdError):
    """A note that cannot be stored; the text names the member and quotes nothing of it."""


class BadDocument(WrongRequest):
    """A file that cannot be read as a document; the text gives the reason but not the file."""


class BadSource(WrongRequest):
    """A source of documents that cannot be read now; the text names it and says what happens to its documents."""


class BadImport(MemdError):
    """An import file that cannot be read or is malformed; the text names the file and the line."""


class EmptyImport(BadImport):
    """A conversation without messages; exports contain many of those."""


class EmbeddingError(MemdError):
    """The embedding model could not be loaded or failed on a text."""


class WrongModel(EmbeddingError, ConfigError):
    """`embedding.model` names no existing model."""


class ModelLoading(EmbeddingError):
    """The embedding model is still loading."""


class RerankError(MemdError):
    """The reranker did not answer, or not with a ranking."""


class UpstreamError(MemdError):
    """The model server could not be started or reached."""


class BadQuestion(WrongRequest):
    """A search whose parameters cannot be satisfied."""


class NotFound(BadQuestion):
    """The topic, chunk, entry or turn named in a request does not exist."""

    status, kind = 404, "not_found"


class UnknownTopic(NotFound):
    """The topic named in a request does not exist: wrong usage, unlike a missing chunk."""

    kind = "unknown_topic"


class Forbidden(MemdError):
    """A principal lacks a right; the text is the same whether or not the topic exists."""

    status, kind = 403, "permission_error"

    def __init__(self, message: str, topic_id: str = "") -> None:
        """`topic_id`: the topic without the right; empty if there is not exactly one."""
        super().__init__(message)
        self.topic_id = topic_id


class ErasedForGood(MemdError):
    """A text to be stored was erased with `--forbid` and is not stored again."""

    status, kind = 409, "erased"


class DaemonError(MemdError):
    """A running daemon refused a command's request, or went away."""


class RightMissing(DaemonError):
    """A running daemon requires a token from the command, a different one, or one with more rights."""


class OAuthRefused(MemdError):
    """A refused OAuth request."""

    def __init__(self, code: str, message: str) -> None:
        """`code`: the error code of RFC 6749, 7591 or 8707."""
        super().__init__(message)
        self.code = code
        self.back = ""
        """The URL that reports it to the client; empty if the client may not be told."""


class AddressUnusable(MemdError):
    """The daemon cannot listen on an address: it is in use, or not an address of this machine."""


class StoreError(MemdError):
    """The log on disk could not be read or written as asked; nothing that was acknowledged is affected."""


Refused = dict[str, StoreError]
"""Topics that cannot be read, with their errors."""


class ErasedMeanwhile(StoreError):
    """The text of an entry was erased after the snapshot was taken."""


class StoreLocked(StoreError):
    """Another daemon holds the data directory."""


class WrongKey(StoreError):
    """The key of an encrypted data directory is missing, damaged or wrong; nothing was written."""


class DamagedKey(WrongKey):
    """A key file is missing or damaged: what it encrypts is lost until it is put back, out of a backup."""


class StoreWriteFailed(StoreError):
    """An append or a file replacement did not become durable; the caller keeps the data."""


class ReadOnlyDisk(StoreWriteFailed):
    """The write failed because the file system is mounted read-only."""


class DiskFull(StoreWriteFailed):
    """The write failed because the disk (or a quota) is full."""


class FileReplaced(StoreWriteFailed):
    """The path being appended to now names no file, or one that memd did not create and must not change."""

    def __init__(self, path: str) -> None:
        """`path`: of the file."""
        super().__init__(
            f"{path}: is another file than before, or gone: something else replaced it; nothing more is appended, "
            "restart memd"
        )


class Fenced(StoreWriteFailed):
    """Another daemon has become the topic's writer, and stores its messages from now on."""


class InDoubt(StoreWriteFailed):
    """A write to the store whose answer was lost; the store reports the outcome once it is reachable again."""


class Behind(StoreWriteFailed):
    """Another daemon appended to the topic at the same time."""


class MadeAnew(StoreWriteFailed):
    """Another daemon has stored a conflicting change since this one was prepared: it must be prepared again."""


class Rewritten(StoreError):
    """The rows of a shared topic were rewritten or removed: the local copy is dropped and read again."""


class MoveRefused(StoreError):
    """A topic that is not moved because data would be lost; other topics may be."""


class CorruptFile(StoreError):
    """A file's bytes do not match their checksums, and an interrupted write cannot be the cause."""


class ShortLogFile(CorruptFile):
    """A full segment has fewer bytes than when it was sealed."""

    def __init__(self, message: str, gap: tuple[int, int]) -> None:
        """`gap`: (start, end) of the missing bytes."""
        super().__init__(message)
        self.gap = gap


class ForeignFile(StoreError):
    """A file that this version must not touch: not memd's, of a newer format, or with another vector dimension."""


class BucketError(StoreError):
    """The backup's bucket could not be read or written; nothing on disk is affected."""


class NotOurBucket(BucketError):
    """The bucket's prefix has another backup, or another daemon writes there; nothing was written."""


class ObjectMissing(BucketError):
    """An object that another one refers to is missing from the bucket, or a round between two existing ones."""
