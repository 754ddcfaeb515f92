"""Every error memd raises on purpose, in one tree.

Rule: a message says what happened, to which file or field, and what to do now. Code outside this module raises one of
these or lets a genuine bug surface as itself; it never wraps a bug in a `MemdError`.
"""

from __future__ import annotations


class MemdError(Exception):
    """Root of the tree; its text is meant to be shown to a person as it stands."""

    status, kind = 503, "unavailable"
    """Of the answer of a route of memd's own that is refused with it: the HTTP status and the type of the error."""


class WrongRequest(MemdError):
    """The base of what whoever asks has to ask otherwise."""

    status, kind = 400, "invalid_request_error"


class ConfigError(MemdError):
    """A setting is unknown, of the wrong type or out of range; names the key, the line and the remedy."""


class BadTopicId(WrongRequest):
    """A topic id that does not match `entries.TOPIC_ID_PATTERN`; such a name never reaches the file system."""


class BadRequestBody(MemdError):
    """A request body that memd cannot read as a chat request; it is forwarded untouched."""


class BadMemoryIn(MemdError):
    """A `memory_in` that does not have the documented shape; the request goes on without memory."""


class BadNote(MemdError):
    """A note that cannot be kept; names the member and quotes nothing of it."""


class BadDocument(WrongRequest):
    """A file that cannot be read as a document; says why, and not which."""


class BadSource(WrongRequest):
    """A source of documents that cannot be looked at now; names it and says what becomes of its documents."""


class BadImport(MemdError):
    """A file to be imported that cannot be read or is not what it should be; names the file and the line."""


class EmptyImport(BadImport):
    """A conversation in which nothing was said; programs export many of those."""


class EmbeddingError(MemdError):
    """The embedding model could not be loaded or failed on a text."""


class WrongModel(EmbeddingError, ConfigError):
    """`embedding.model` names none that there is."""


class ModelLoading(EmbeddingError):
    """The embedding model is not in memory yet, and will be soon."""


class RerankError(MemdError):
    """The reranker did not answer, or not with an order."""


class UpstreamError(MemdError):
    """The model server could not be started or reached."""


class BadQuestion(WrongRequest):
    """A search that cannot be made as it was asked for."""


class NotFound(BadQuestion):
    """The topic, chunk, entry or turn that a question names does not exist."""

    status, kind = 404, "not_found"


class UnknownTopic(NotFound):
    """A question names a topic that does not exist: wrong usage, unlike a chunk that is not there."""

    kind = "unknown_topic"


class Forbidden(MemdError):
    """A principal asks for what it has no right to; the same words whether or not the topic exists."""

    status, kind = 403, "permission_error"

    def __init__(self, message: str, topic_id: str = "") -> None:
        """`topic_id`: that for which the right is missing; empty: not of one alone."""
        super().__init__(message)
        self.topic_id = topic_id


class ErasedForGood(MemdError):
    """A text to be remembered, or to take the place of another, was erased with `--forbid` and is not stored again."""

    status, kind = 409, "erased"


class DaemonError(MemdError):
    """A running daemon refused what a command asked of it, or went away."""


class RightMissing(DaemonError):
    """A running daemon wants a token from a command, another one, or one with more rights."""


class OAuthRefused(MemdError):
    """A request of OAuth that is refused."""

    def __init__(self, code: str, message: str) -> None:
        """`code`: what RFC 6749, 7591 or 8707 calls the reason."""
        super().__init__(message)
        self.code = code


class AddressUnusable(MemdError):
    """The daemon cannot listen on an address: others have it, or it is none of this machine."""


class StoreError(MemdError):
    """The log on disk could not be read or written as asked; nothing that was acknowledged is affected."""


Refused = dict[str, StoreError]
"""Topics that cannot be read, each with the reason."""


class ErasedMeanwhile(StoreError):
    """The text of an entry was erased since the snapshot was taken that it is looked for in: it is not there."""


class StoreLocked(StoreError):
    """Another daemon holds the data directory."""


class WrongKey(StoreError):
    """The key of an encrypted data directory is missing, damaged or another one; nothing was written."""


class StoreWriteFailed(StoreError):
    """An append or a file replacement did not become durable; the caller keeps what it wanted to write."""


class ReadOnlyDisk(StoreWriteFailed):
    """The write failed because the file system is mounted read-only."""


class DiskFull(StoreWriteFailed):
    """The write failed because the disk (or a quota) is full."""


class FileReplaced(StoreWriteFailed):
    """The path that is appended to names another file now, which is not memd's to change, or none."""

    def __init__(self, path: str) -> None:
        """`path` of the file."""
        super().__init__(
            f"{path}: is another file than before, or gone: something else replaced it; nothing more is appended, "
            "restart memd"
        )


class Fenced(StoreWriteFailed):
    """The topic is another one's to write by now: whoever has it stores what is said in it from then on."""


class InDoubt(StoreWriteFailed):
    """The store was asked to keep something, and its answer was lost; it says so itself once it can be reached."""


class Behind(StoreWriteFailed):
    """Another daemon has appended to the topic at this moment."""


class MadeAnew(StoreWriteFailed):
    """Another daemon has stored something that concerns the same since this was made: it has to be made again."""


class Rewritten(StoreError):
    """The rows of a shared topic were rewritten, or removed: the copy of them here is dropped and read anew."""


class MoveRefused(StoreError):
    """A topic that is not moved, because something would be lost; others may be."""


class CorruptFile(StoreError):
    """A file's bytes do not match their checksums where an interrupted write cannot be the reason."""


class ShortLogFile(CorruptFile):
    """A full segment has fewer bytes than when it was sealed."""

    def __init__(self, message: str, gap: tuple[int, int]) -> None:
        """`gap`: (start, end) of the bytes that it lacks."""
        super().__init__(message)
        self.gap = gap


class ForeignFile(StoreError):
    """A file that this version must not touch: not memd's, of a newer format, or of another vector dimension."""


class BucketError(StoreError):
    """The bucket of the backup could not be read or written; nothing on the disk is affected."""


class NotOurBucket(BucketError):
    """There is another backup at the bucket's prefix, or another daemon writes there: nothing was written."""


class ObjectMissing(BucketError):
    """An object that another one names is not in the bucket, or a round between two that are there."""
