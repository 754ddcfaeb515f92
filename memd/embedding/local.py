"""Models that run in this process: the bundled one with its question table, one in a local folder, or fastembed's.

Rule: each model call gets one piece of a text, about 256 words. A dynamically quantised model, such as the bundled one,
would give a text in a batch a vector that depends on its neighbours. Alone, a text has the same vector, bit for bit, in
any thread and with any number of threads. A model in a folder uses neither the network nor any file outside it.
fastembed could run it with the same vectors, but takes 0.3 s to import, at each start of the daemon and of each command
that embeds; so it is imported only for its own models.

A folder has the files of a sentence-transformers repository: the graph (`model.onnx`, there or in `onnx/`, or the only
`.onnx` file) and `tokenizer.json`. Optional: `1_Pooling/config.json`, `config.json`, `tokenizer_config.json`,
`sentence_bert_config.json` and `config_sentence_transformers.json`, which describe how to use the model.

The question table gives a short text a vector in the model's space without running the model. It has one row per word
piece; the sum of a text's rows, weighted by the pieces' rarity and normalised, approximates the model's vector (cosine
0.86 on held-out texts). Twelve words take 0.05 ms, and 4 ms with the model. The table belongs to one model and names
its fingerprint; bench/fit_table.py makes it.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from memd.assets import model_dir, question_table_dir
from memd.embedding.embedder import NO_PREFIXES, Embedder, Prefixes, prefixes_of
from memd.entries import Vector
from memd.errors import EmbeddingError, WrongModel
from memd.settings.model import EmbeddingSettings
from memd.wording import pip_install

PIECES_MAX = 16
"""Limit on the pieces embedded of one text, half from its head and half from its tail. A full piece costs about 20 ms
on two cores, and a very long message has its request at one end, not within the pasted text."""
_CHARACTERS_MAX = 32_768  # before cutting into pieces: tokenizing 1 MB takes 1.2 s; 16 pieces of prose have 17,000

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class PiecewiseEmbedder(Embedder):
    """An `Embedder` over a loaded model."""

    def __init__(
        self,
        name: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        words_max: int,
        embed_piece: Callable[[str], NDArray[np.float32]],
        prefixes: Prefixes = NO_PREFIXES,
    ) -> None:
        """Make the first call of the model.

        Args:
            fingerprint: of the model without prefixes.
            tokenizer: the model's own, which neither truncates nor pads.
            words_max: word pieces that the model reads, without its special tokens.
            embed_piece: runs the model on a piece without lone surrogates; returns float32 `(dimension,)`.
            prefixes: put in front of each piece.
        """
        self.name = name
        self.fingerprint = prefixes.fingerprint(fingerprint)
        self.batch_texts = 1
        self._tokenizer = tokenizer
        self._prefixes = prefixes
        longest = max(len(tokenizer.encode(prefix, add_special_tokens=False)) for prefix in prefixes)
        self._words_max = max(1, words_max - longest)
        self._embed_piece = embed_piece
        self.dimension = len(self._vector("memd"))

    def pieces(self, text: str) -> list[str]:
        """Cut `text` into pieces that the model can read, between words if possible. There is at least one, and joined
        they equal `text`."""
        if text.isascii() and len(text) < self._words_max:
            return [text]  # most questions: a token has at least one character, and one more may begin the text
        encoding = self._tokenizer.encode(readable(text), add_special_tokens=False)
        if len(encoding) <= self._words_max:
            return [text]
        words, offsets, cuts, start = encoding.word_ids, encoding.offsets, [0], 0
        while start + self._words_max < len(words):
            end = start + self._words_max
            while end > start and words[end] == words[end - 1]:
                end -= 1
            start = end if end > start else start + self._words_max  # no words, or one longer than a piece
            cuts.append(offsets[start][0])
        return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)])]

    def cut(self, text: str, tokens: int) -> str:
        """See `Embedder.cut`."""
        return cut(text, tokens, self._tokenizer)

    def embed_query(self, text: str) -> NDArray[np.float32]:
        """See `Embedder.embed_query`: at most `PIECES_MAX` pieces, from the head and tail of a longer text."""
        return self._embed_pieces(text, self._prefixes.query)

    def embed_many(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """See `Embedder.embed_many`: the normalised mean of the vectors of a text's pieces."""
        found = np.empty((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            vectors = self._embed_pieces(text, self._prefixes.text)
            found[row] = vectors[0] if len(vectors) == 1 else _unit(vectors.mean(axis=0))
        return found

    def _embed_pieces(self, text: str, prefix: str) -> NDArray[np.float32]:
        if len(text) > _CHARACTERS_MAX:
            text = text[: _CHARACTERS_MAX // 2] + text[-_CHARACTERS_MAX // 2 :]
        pieces = self.pieces(text)
        if len(pieces) > PIECES_MAX:
            pieces = pieces[: PIECES_MAX // 2] + pieces[-PIECES_MAX // 2 :]
        return np.stack([self._vector(prefix + piece) for piece in pieces])

    def _vector(self, piece: str) -> Vector:
        try:
            vector = self._embed_piece(readable(piece))
        except Exception as error:  # onnxruntime's errors share no class below Exception
            raise EmbeddingError(
                f"embedding model {self.name!r} failed on a text of {len(piece)} characters: {error}; "
                "if it happens again, run `memd check` and look at free memory"
            ) from error
        return _unit(np.asarray(vector, dtype=np.float32))


@lru_cache(maxsize=4)
def tokenizer_in(folder: Path) -> Tokenizer:
    """Return the tokenizer in a model's folder, without truncation and padding. Cached, because it takes 15 MB."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def cut(text: str, tokens: int, tokenizer: Tokenizer) -> str:
    """Return the beginning of a text with at most `tokens` word pieces, cut between characters."""
    if len(text) <= tokens:
        return text
    offsets = tokenizer.encode(readable(text), add_special_tokens=False).offsets
    return text if len(offsets) <= tokens else text[: offsets[tokens - 1][1]]


def fingerprint_of(folder: Path, files: Sequence[str]) -> str:
    """Return a fingerprint of the content of a model's files; see `Embedder.fingerprint`."""
    digest = hashlib.sha256()
    for file in files:
        with (folder / file).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:32]


def readable(text: str) -> str:
    """Replace lone surrogates, which JSON allows and UTF-8 does not, one for one by U+FFFD, so that offsets stay."""
    return _LONE_SURROGATES.sub("\ufffd", text)


def _unit(vector: NDArray[np.float32]) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector if norm == 0.0 else (vector / np.float32(norm)).astype(np.float32)


TOKENS_MAX = 512
"""Limit on tokens per call: no chunk is longer, and time grows quadratically."""
_DISABLED_OPTIMIZER = "SkipLayerNormFusion"
"""This optimizer replaces an addition and a normalisation by a fused operator. That is five times as slow, a fifth of
the model's whole time (bench/NOTES.md, 2026-11-22), and rounds differently. Without it, vectors are nearer to those of
the graph in the file."""
_SENTENCE_OUTPUT = "sentence_embedding"
_TOLD_AT_MOST = 5


def load_folder(settings: EmbeddingSettings, folder: Path) -> PiecewiseEmbedder:
    """Load the model in a folder; see `loading.load_embedder`. Raises EmbeddingError: a file is missing, or the model
    cannot be used."""
    files = ModelFiles(settings, folder)
    try:
        tokenizer = tokenizer_in(folder)
        words_max = files.tokens_max - tokenizer.num_special_tokens_to_add(False)
        embed_piece = _graph(files, tokenizer, words_max, settings.threads)
        return PiecewiseEmbedder(
            settings.model, files.of_files_alone, tokenizer, words_max, embed_piece, files.prefixes
        )
    except Exception as error:  # errors of onnxruntime and of the tokenizers share no class below Exception
        raise EmbeddingError(f"the embedding model in {folder} cannot be used: {error}") from error


class ModelFiles:
    """The files of an unloaded model in a folder, and the parameters in them; missing ones have the usual value."""

    def __init__(self, settings: EmbeddingSettings, folder: Path) -> None:
        """Read the files. Raises EmbeddingError: a file is missing."""
        if not folder.is_dir():
            raise WrongModel(f"there is no folder {folder}; embedding.model 'path:DIR' names one with an ONNX model")
        self.folder = folder
        self.graph = graph = _graph_in(folder)
        if not (folder / "tokenizer.json").is_file():
            raise EmbeddingError(
                f"{folder} has no tokenizer.json; copy it from where the model in {graph.name} comes from"
            )
        pooling, config = folder / "1_Pooling" / "config.json", _read(folder / "config.json")
        self.takes_first = bool(_read(pooling).get("pooling_mode_cls_token", False))
        """The text's vector is that of its first token; otherwise the mean over all tokens."""
        positions = config.get("max_position_embeddings")
        if isinstance(positions, int) and config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
            positions -= 2  # their positions begin at 2
        trained = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        limits = (trained, _read(folder / "tokenizer_config.json").get("model_max_length"), positions, TOKENS_MAX)
        self.tokens_max = min(limit for limit in limits if isinstance(limit, int) and limit > 0)
        prompts = _read(folder / "config_sentence_transformers.json").get("prompts") or {}
        text = next((prompts[name] for name in ("document", "passage", "text") if name in prompts), "")
        own = Prefixes(str(prompts.get("query", "")), str(text)) if any(prompts.values()) else None
        self.prefixes = prefixes_of(settings, f"{config.get('_name_or_path', '')} {folder.name}", own)
        beside = (graph.with_name(f"{graph.name}_data"), graph.with_name(f"{graph.name}.data"), pooling)
        paths = [graph, folder / "tokenizer.json", *(path for path in beside if path.is_file())]
        try:
            self.of_files_alone = fingerprint_of(folder, [str(path.relative_to(folder)) for path in paths])
        except OSError as error:
            raise EmbeddingError(f"the embedding model in {folder} cannot be used: {error}") from error

    @property
    def fingerprint(self) -> str:
        """See `Embedder.fingerprint`."""
        return self.prefixes.fingerprint(self.of_files_alone)


def _graph(
    files: ModelFiles, tokenizer: Tokenizer, words_max: int, threads: int
) -> Callable[[str], NDArray[np.float32]]:
    """Load a graph; return the function that runs it on a piece of text."""
    from onnxruntime import InferenceSession, SessionOptions  # here: it takes 30 MB, and the fingerprint needs none

    options = SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    # The memory of a run stays in the arena: 13 MB; 30 with a memory pattern per text length. Without the arena,
    # malloc as the daemon tunes it returns all of it each time: 1,000 page faults, a quarter of a run's time.
    options.enable_mem_pattern = False
    for pool in ("intra_op", "inter_op"):  # idle threads leave the processor to others
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    options.add_session_config_entry("optimization.disable_specified_optimizers", _DISABLED_OPTIMIZER)
    # A GPU would give vectors that differ from the stored ones.
    session = InferenceSession(files.graph, options, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    if unknown := wanted - {"input_ids", "attention_mask", "token_type_ids"}:
        raise ValueError(f"{files.graph.name} wants {', '.join(sorted(unknown))}, so it is no model that embeds text")
    names = [one.name for one in session.get_outputs()]
    output = _SENTENCE_OUTPUT if _SENTENCE_OUTPUT in names else names[0]

    def embed_piece(piece: str) -> NDArray[np.float32]:
        words = tokenizer.encode(piece, add_special_tokens=False)
        words.truncate(words_max)  # a piece that begins within a word may have more tokens than in its text
        ids = np.array([tokenizer.post_process(words).ids], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        [found] = session.run([output], {name: inputs[name] for name in wanted})
        if found.ndim == 2:
            return np.asarray(found[0], np.float32)
        if found.ndim != 3:
            raise ValueError(f"its output {output} has the shape {found.shape}, so it is no vector of a text")
        return np.asarray(found[0, 0] if files.takes_first else found[0].mean(axis=0, dtype=np.float64), np.float32)

    return embed_piece


def _graph_in(folder: Path) -> Path:
    for usual in (folder / "model.onnx", folder / "onnx" / "model.onnx"):
        if usual.is_file():
            return usual
    found = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    if len(found) == 1:
        return found[0]
    if not found:
        raise EmbeddingError(f"{folder} has no model.onnx, there or in onnx/; put the model's graph there")
    names = ", ".join(str(path.relative_to(folder)) for path in found[:_TOLD_AT_MOST])
    raise EmbeddingError(f"{folder} has several graphs ({names}); name the one to use model.onnx")


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EmbeddingError(f"{path} cannot be read: {error}; copy it again") from error
    return found if isinstance(found, dict) else {}


FINGERPRINT = "58247efaa8d67cc0c7bb8bc9910c7088"
"""Fingerprint of the bundled model's files."""
DIMENSION = 384
"""Dimension of its vectors."""
OWN_NAMES = ("bundled", "multilingual")
_KNOWN = "'bundled', 'multilingual', 'http', 'path:DIR'"
_INSTALL = pip_install("memd-proxy[fastembed]")


def load_bundled(settings: EmbeddingSettings) -> PiecewiseEmbedder:
    """Load the bundled model; see `loading.load_embedder`. Raises EmbeddingError: its files are missing or damaged."""
    try:
        return load_folder(settings, model_dir())
    except EmbeddingError as error:
        raise EmbeddingError(f"the bundled embedding model could not be loaded: {error}; reinstall memd") from error


def load_fastembed(settings: EmbeddingSettings, *, fetch: bool) -> PiecewiseEmbedder:
    """Load a text model that fastembed knows; see `loading.load_embedder`. Raises EmbeddingError: unknown name,
    fastembed is not installed, or the files could not be fetched or read."""
    model = settings.model
    try:
        from fastembed import TextEmbedding  # it takes half a second to import
    except ImportError:
        near = difflib.get_close_matches(model, OWN_NAMES, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"if it is one that fastembed knows: {_INSTALL}"
        raise WrongModel(f"embedding.model {model!r} is none of {_KNOWN}; {hint}") from None

    known = {str(entry["model"]): entry for entry in TextEmbedding.list_supported_models()}
    name = next((name for name in known if name.lower() == model.lower()), None)
    if name is None:
        near = difflib.get_close_matches(model, [*OWN_NAMES, *known], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise WrongModel(f"embedding.model {model!r} is neither {_KNOWN} nor a model that fastembed knows{hint}")
    try:
        engine: Any = TextEmbedding(name, threads=settings.threads, local_files_only=not fetch).model
        folder = Path(engine._model_dir)  # fastembed has no public name for it
        files = [known[name]["model_file"], *known[name]["additional_files"], "tokenizer.json"]
        return _fetched_embedder(settings, name, engine, fingerprint_of(folder, files))
    except EmbeddingError:
        raise
    except Exception as error:  # fetching and loading raise any error of the HTTP client, the hub and onnxruntime
        if not fetch:
            raise EmbeddingError(
                f"embedding.model {model!r} is not on this machine, or not whole; `memd serve` fetches it once"
            ) from error
        raise EmbeddingError(
            f"embedding.model {model!r} could not be loaded: {error}; it is fetched once, which needs the network: "
            "try again online, or set embedding.model to 'bundled'"
        ) from error


def _fetched_embedder(settings: EmbeddingSettings, name: str, engine: Any, fingerprint: str) -> PiecewiseEmbedder:
    own = engine.tokenizer
    # A copy, because truncation belongs to the tokenizer, and fastembed's must keep it.
    tokenizer = Tokenizer.from_str(own.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def embed_piece(piece: str) -> NDArray[np.float32]:
        return np.asarray(next(iter(engine.embed([piece], batch_size=1))), dtype=np.float32)

    words_max = own.truncation["max_length"] - own.num_special_tokens_to_add(False)
    prefixes = prefixes_of(settings, name)
    return PiecewiseEmbedder(settings.model, fingerprint, tokenizer, words_max, embed_piece, prefixes)


# The question table

LOOKED_AT_CHARACTERS = 4_000
"""Only the beginning of a longer text is used: no chunk and no part of a question is longer."""


class QuestionTable:
    """The bundled model's table. Thread-safe."""

    def __init__(self, fingerprint: str, tokenizer: Tokenizer) -> None:
        folder = question_table_dir()
        self.fingerprint = fingerprint
        self._rows = np.load(folder / "rows.npy", mmap_mode="r")
        """int8 (pieces, dimension), memory-mapped: only the rows of pieces that occur are read."""
        self._weights = np.load(folder / "scale.npy") * np.load(folder / "idf.npy").astype(np.float32)
        self._tokenizer = tokenizer
        self.dimension: int = self._rows.shape[1]

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the unit vectors of texts, (n, dimension); zeros for a text without known pieces."""
        beginnings = [readable(text[:LOOKED_AT_CHARACTERS]) for text in texts]
        found = np.zeros((len(texts), self.dimension), np.float32)
        # This call of the tokenizer releases the GIL.
        for row, encoding in enumerate(self._tokenizer.encode_batch_fast(beginnings, add_special_tokens=False)):
            ids = np.array(encoding.ids, np.intp)
            found[row] = self._weights[ids] @ self._rows[ids].astype(np.float32)
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)
        return found


@lru_cache(maxsize=8)
def table_of(fingerprint: str) -> QuestionTable | None:
    """Return the table of the model with this fingerprint, or None."""
    if (question_table_dir() / "fingerprint").read_text().strip() != fingerprint:
        return None
    return QuestionTable(fingerprint, tokenizer_in(model_dir()))
