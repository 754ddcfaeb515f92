"""The files that memd bundles so that it works offline: the embedding model, its question
table and the tokenizer ranks.

Rule: only this module knows where they lie. What they are and where they come from is in PROVENANCE.md.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def model_dir() -> Path:
    """The folder of the bundled embedding model: `model.onnx`, `tokenizer.json` and their configuration."""
    return _HERE / "minilm"


def table_dir() -> Path:
    """The folder of the question table (`memd.embedding.table`): `rows.npy`, `scale.npy`, `idf.npy` and `table.json`,
    which has the fingerprint of the model that it belongs to."""
    return _HERE / "table"


def ranks_bytes() -> bytes:
    """The file `cl100k_base.tiktoken` (1.7 MB): a line per token, its bytes in base64, a space, its rank.

    Raises:
        OSError: the package was installed without its data files.
    """
    return (_HERE / "tiktoken" / "cl100k_base.tiktoken").read_bytes()


def calibration_pairs() -> bytes:
    """A JSON object: language code to pairs of a sentence and a question that it answers; the same ones in each."""
    return (_HERE / "calibration_pairs.json").read_bytes()


def calibration_questions() -> bytes:
    """A JSON object: language code to `memory`, questions about what somebody said or stored, and `world`, questions
    that need none of it, requests and small talk; the same ones in each. None of them is in `bench/data`."""
    return (_HERE / "calibration_questions.json").read_bytes()
