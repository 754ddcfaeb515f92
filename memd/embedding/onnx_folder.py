"""A text model in a folder of this disk, run by ONNX Runtime itself: the bundled one, or a user's own.

Rule: it touches neither the network nor any file outside the folder, and it loads nothing that it does not need:
fastembed, which could run it, gives the same vectors and takes 0.3 s to import, at each start of the daemon and of each
command that embeds.

A folder has the files of a sentence-transformers repository: the graph (`model.onnx`, there or in `onnx/`, or the only
`.onnx` file) and `tokenizer.json`; if they are there, `1_Pooling/config.json`, `config.json`, `tokenizer_config.json`,
`sentence_bert_config.json` and `config_sentence_transformers.json` say how the model is to be used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memd.embedding.pieces import PiecewiseEmbedder, fingerprint_of, tokenizer_in
from memd.embedding.prefixes import Prefixes, prefixes_of
from memd.errors import EmbeddingError, WrongModel
from memd.settings.model import EmbeddingSettings

TOKENS_MAX = 512
"""The most that is read at a time: no chunk is longer, and time grows with the square."""
_DISABLED_OPTIMIZER = "SkipLayerNormFusion"
"""The fused operator that it puts in place of an addition and a normalisation takes five times as long as the two, a
fifth of the whole model's time (bench/NOTES.md, 2026-11-22), and rounds differently: without it the vectors are nearer
to those of the graph in the file."""
_SENTENCE_OUTPUT = "sentence_embedding"
_TOLD_AT_MOST = 5


def load_folder(settings: EmbeddingSettings, folder: Path) -> PiecewiseEmbedder:
    """Load the model in a folder; see `loading.load_embedder`.

    Raises:
        EmbeddingError: a file is missing, or the model cannot be used.
    """
    return _loaded(settings, _Files(settings, folder))


def fingerprint_in(settings: EmbeddingSettings, folder: Path) -> str:
    """The fingerprint that the model in a folder will have, without loading it.

    Raises:
        EmbeddingError: a file is missing.
    """
    return _Files(settings, folder).fingerprint


def fingerprint_without_prefixes(folder: Path) -> str:
    """The fingerprint of a folder's files alone.

    Raises:
        EmbeddingError: a file is missing.
    """
    return _Files(EmbeddingSettings(), folder).without_prefixes


class _Files:
    """The files of a model in a folder."""

    def __init__(self, settings: EmbeddingSettings, folder: Path) -> None:
        self.folder = folder
        self.graph, self.told, paths = _looked_at(folder)
        self.prefixes = prefixes_of(settings, self.told.name, self.told.prefixes)
        try:
            self.without_prefixes = fingerprint_of(folder, [str(path.relative_to(folder)) for path in paths])
        except OSError as error:
            raise EmbeddingError(f"the embedding model in {folder} cannot be used: {error}") from error

    @property
    def fingerprint(self) -> str:
        """See `Embedder.fingerprint`."""
        return self.prefixes.fingerprint(self.without_prefixes)


def _looked_at(folder: Path) -> tuple[Path, _Told, list[Path]]:
    """The graph, its use, and the files that the vectors depend on."""
    if not folder.is_dir():
        raise WrongModel(f"there is no folder {folder}; embedding.model 'path:DIR' names one with an ONNX model")
    graph = _graph_in(folder)
    if not (folder / "tokenizer.json").is_file():
        raise EmbeddingError(f"{folder} has no tokenizer.json; copy it from where the model in {graph.name} comes from")
    told = _Told(folder)
    data = [graph.with_name(f"{graph.name}{ending}") for ending in ("_data", ".data")]
    return graph, told, [graph, folder / "tokenizer.json", *(path for path in data if path.is_file()), *told.files]


def _loaded(settings: EmbeddingSettings, files: _Files) -> PiecewiseEmbedder:
    folder = files.folder
    try:
        model = _Model(folder, files.graph, files.told, settings.threads)
        read = model.tokenizer, model.words_max, model.embed_piece
        return PiecewiseEmbedder(settings.model, files.without_prefixes, *read, files.prefixes)
    except Exception as error:  # neither onnxruntime's errors nor those of the tokenizers share a class below Exception
        raise EmbeddingError(f"the embedding model in {folder} cannot be used: {error}") from error


class _Told:
    """The use of a model as the files beside it tell it; what they do not say has the usual value."""

    def __init__(self, folder: Path) -> None:
        pooling = folder / "1_Pooling" / "config.json"
        self.files = [pooling] if pooling.is_file() else []
        """Those that change the vectors."""
        self.takes_first = bool(_read(pooling).get("pooling_mode_cls_token", False))
        """Whether the vector of the first token is that of the text; else the mean of all is."""
        config = _read(folder / "config.json")
        self.name = f"{config.get('_name_or_path', '')} {folder.name}"
        positions = config.get("max_position_embeddings")
        if isinstance(positions, int) and config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet"):
            positions -= 2  # their positions begin at 2
        trained = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        limits = (trained, _read(folder / "tokenizer_config.json").get("model_max_length"), positions, TOKENS_MAX)
        self.tokens_max = min(limit for limit in limits if isinstance(limit, int) and limit > 0)
        prompts = _read(folder / "config_sentence_transformers.json").get("prompts") or {}
        text = next((prompts[name] for name in ("document", "passage", "text") if name in prompts), "")
        self.prefixes = Prefixes(str(prompts.get("query", "")), str(text)) if any(prompts.values()) else None


class _Model:
    """From a piece of a text to its vector."""

    def __init__(self, folder: Path, graph: Path, told: _Told, threads: int) -> None:
        self.tokenizer = tokenizer_in(folder)
        self.words_max = told.tokens_max - self.tokenizer.num_special_tokens_to_add(False)
        self._takes_first = told.takes_first
        from onnxruntime import InferenceSession, SessionOptions  # here: it takes 30 MB, and the fingerprint needs none

        options = SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        # The arena never gives back what the longest text took; malloc, which does, is as fast (26 MB, measured).
        options.enable_cpu_mem_arena = False
        for pool in ("intra_op", "inter_op"):  # a thread that has nothing to do leaves the processor to others
            options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
        options.add_session_config_entry("optimization.disable_specified_optimizers", _DISABLED_OPTIMIZER)
        # A GPU would give other vectors than the stored ones.
        self._session = InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._inputs = {one.name for one in self._session.get_inputs()}
        if unknown := self._inputs - {"input_ids", "attention_mask", "token_type_ids"}:
            raise ValueError(f"{graph.name} wants {', '.join(sorted(unknown))}, so it is no model that embeds text")
        names = [one.name for one in self._session.get_outputs()]
        self._output = _SENTENCE_OUTPUT if _SENTENCE_OUTPUT in names else names[0]

    def embed_piece(self, piece: str) -> NDArray[np.float32]:
        words = self.tokenizer.encode(piece, add_special_tokens=False)
        words.truncate(self.words_max)  # a piece that begins amid a word may have more than the same text had before
        tokens = np.array([self.tokenizer.post_process(words).ids], np.int64)
        inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        [found] = self._session.run([self._output], {name: inputs[name] for name in self._inputs})
        if found.ndim not in (2, 3):
            raise ValueError(f"its output {self._output} has the shape {found.shape}, so it is no vector of a text")
        if found.ndim == 3:
            vector = found[0, 0] if self._takes_first else found[0].mean(axis=0, dtype=np.float64)
        else:
            vector = found[0]
        return np.asarray(vector / max(np.linalg.norm(vector), 1e-12), np.float32)


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
    """A JSON object; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EmbeddingError(f"{path} cannot be read: {error}; copy it again") from error
    return found if isinstance(found, dict) else {}
