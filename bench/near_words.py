"""Makes the table of near words: for each English stem among the model's word pieces the three stems nearest to it.

    python bench/near_words.py FILE.npz

Nearness is the cosine of the rows of the question table (fit_table.py); a stem's row is the sum of those of its words.
Run it again when the question table, or what `analyzer` makes of English words, has changed: the table holds terms.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from memd.assets import model_dir, question_table_dir
from memd.embedding.local import tokenizer_in
from memd.store.lexical.analyzer import is_stopword
from memd.store.lexical.postings import query_keys

NEAR, LIKENESS_MIN = 3, 0.4
CHARACTERS_MIN = 3
AT_ONCE = 512


def main() -> None:
    """Make the table and print some of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    rows = np.load(question_table_dir() / "rows.npy")
    sums: dict[int, np.ndarray] = {}
    words: dict[int, str] = {}
    for word, piece in sorted(tokenizer_in(model_dir()).get_vocab().items()):
        keys = query_keys(word, frozenset()).tolist() if word.isascii() and word.isalpha() else []
        if len(word) < CHARACTERS_MIN or len(keys) != 1 or is_stopword(word):
            continue
        row = rows[piece].astype(np.float32)
        sums[keys[0]] = sums.get(keys[0], 0) + row / max(float(np.linalg.norm(row)), 1e-9)
        words.setdefault(keys[0], word)
    terms = np.array(sorted(sums), np.uint32)
    vectors = np.stack([sums[term] for term in terms.tolist()])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    near, likeness = np.zeros((len(terms), NEAR), np.uint32), np.zeros((len(terms), NEAR), np.uint8)
    for start in range(0, len(terms), AT_ONCE):
        cosine = vectors[start : start + AT_ONCE] @ vectors.T
        own = np.arange(len(cosine))
        cosine[own, start + own] = -1
        best = np.argsort(-cosine, axis=1, kind="stable")[:, :NEAR]
        found = np.take_along_axis(cosine, best, axis=1)
        near[start + own] = np.where(found >= LIKENESS_MIN, terms[best], 0)
        likeness[start + own] = np.where(found >= LIKENESS_MIN, np.round(255 * found.clip(0, 1)), 0)
    np.savez(file, terms=terms, near=near, likeness=likeness)
    print(f"{len(terms):,} stems, {np.count_nonzero(near):,} near ones, {file.stat().st_size:,} bytes")
    for word in ("kid", "buy", "error", "port"):
        at = int(np.searchsorted(terms, query_keys(word, frozenset())[0]))
        print(
            word,
            [
                (words[one], value / 255)
                for one, value in zip(near[at].tolist(), likeness[at].tolist(), strict=True)
                if one
            ],
        )


if __name__ == "__main__":
    main()
