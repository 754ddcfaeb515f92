"""The files that memd bundles so that it works offline: the embedding model and the tokenizer ranks.

Rule: only this module knows where they lie. What they are and where they come from is in PROVENANCE.md.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def model_dir() -> Path:
    """The folder of the bundled embedding model: `model.onnx`, `tokenizer.json` and their configuration."""
    return _HERE / "minilm"


def question_table_dir() -> Path:
    """The folder of the question table (`embedding.local`), and the fingerprint of the model that it is of."""
    return _HERE / "question_table"


def near_words_path() -> Path:
    """The table of near words (`store.lexical.postings.near_terms`)."""
    return _HERE / "near_words.npz"


def ranks_bytes() -> bytes:
    """The file `cl100k_base.tiktoken` (1.7 MB): a line per token, its bytes in base64, a space, its rank. Raises
    OSError: the package was installed without its data files."""
    return (_HERE / "tiktoken" / "cl100k_base.tiktoken").read_bytes()


def multilingual_recipe() -> bytes:
    """How the files of the multilingual model are made (`embedding.multilingual`), in MessagePack."""
    return (_HERE / "multilingual.msgpack").read_bytes()


def calibration_pairs() -> bytes:
    """A JSON object: language code to pairs of a sentence and a question that it answers; the same ones in each."""
    return (_HERE / "calibration_pairs.json").read_bytes()


def bike_workshop() -> str:
    """The conversation of the demo: `> ` opens a message of the developer, `< ` one of the assistant."""
    return (_HERE / "bike_workshop.txt").read_text("utf-8")


def words_of(subject: str) -> dict[str, Any]:
    """The words that a subject goes by: `times`, `instructions`, `programs`, `redaction`, `agents`, `exports`,
    `formats`, `consent`, `english`, `neutralising`, `prefixes`."""
    return tomllib.loads((_HERE / f"{subject}.toml").read_text("utf-8"))
