"""The bundled embedding model, run by ONNX Runtime itself.

Rule: it touches neither the network nor any file outside `memd/assets`, and it loads nothing that it does not need:
fastembed, which could run it, gives the same vectors and takes 0.3 s to import, at each start of the daemon and of each
command that embeds.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnxruntime import InferenceSession, SessionOptions
from tokenizers import Tokenizer

from memd.assets import model_dir
from memd.embedding.pieces import PiecewiseEmbedder, fingerprint_of
from memd.errors import EmbeddingError

_WORDS_MAX = 254
"""The 256 that it was trained on, less the tokens that open and close a text."""
_DISABLED_OPTIMIZER = "SkipLayerNormFusion"
"""The fused operator that it puts in place of an addition and a normalisation takes five times as long as the two, a
fifth of the whole model's time (bench/NOTES.md, 2026-11-22), and rounds differently: without it the vectors are nearer
to those of the graph in the file."""


def load_bundled(name: str, threads: int) -> PiecewiseEmbedder:
    """Load the bundled model under the name by which the settings know it; see `loading.load_embedder`.

    Raises:
        EmbeddingError: its files are missing or damaged.
    """
    folder = model_dir()
    try:
        model = _Model(folder, threads)
        fingerprint = fingerprint_of(folder, ["model.onnx", "tokenizer.json"])
        return PiecewiseEmbedder(name, fingerprint, model.tokenizer, _WORDS_MAX, model.embed_piece)
    except Exception as error:  # neither onnxruntime's errors nor those of the tokenizers share a class below Exception
        raise EmbeddingError(
            f"the bundled embedding model in {folder} could not be loaded: {error}; reinstall memd"
        ) from error


class _Model:
    """The mean of the model's last layer, of length one."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        options = SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.add_session_config_entry("optimization.disable_specified_optimizers", _DISABLED_OPTIMIZER)
        # A GPU would give other vectors than the stored ones.
        self._session = InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])

    def embed_piece(self, piece: str) -> NDArray[np.float32]:
        words = self.tokenizer.encode(piece, add_special_tokens=False)
        words.truncate(_WORDS_MAX)  # a piece that begins amid a word may have more than the same text had before
        tokens = np.array([self.tokenizer.post_process(words).ids], np.int64)
        inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        [layer] = self._session.run(None, inputs)
        mean = layer[0].mean(axis=0, dtype=np.float64)
        return np.asarray(mean / max(np.linalg.norm(mean), 1e-12), np.float32)
