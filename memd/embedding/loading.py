"""From the setting `embedding.model` to an `Embedder`.

Rule: a kind of embedder has a module of its own, which is imported only when one is loaded: fastembed's takes half a
second, and `memd --help` or `memd export` need none.
"""

from __future__ import annotations

from memd.embedding.embedder import Embedder

BUNDLED = "bundled"


def load_embedder(model: str, threads: int, *, fetch: bool = True) -> Embedder:
    """Load the bundled model (about 0.4 s plus the import) or any text model that fastembed knows and fetches once.

    Args:
        model: `bundled` or a name from fastembed's list, in any case.
        threads: threads of one model call.
        fetch: whether a model that is not on this machine may be fetched.

    Raises:
        EmbeddingError: unknown name, or the files could not be fetched or read.
    """
    if model == BUNDLED:
        from memd.embedding.bundled import load_bundled

        return load_bundled(BUNDLED, threads)
    from memd.embedding.fastembed import load_fastembed

    return load_fastembed(model, threads, fetch=fetch)
