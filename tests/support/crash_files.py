"""A file system in memory that loses what a real one may lose: the disk of the crash tests.

Rule: stricter than any real disk. It keeps two images: what a running process sees, and what a power cut leaves.
Contents become durable by `sync`, names by `sync_directory` of their directory, and nothing else does it. A rename is
one step: after a power cut either both names show it or neither does, and syncing one of the two directories makes it
durable.

Every call that changes something is counted in `operations`. Counterpart of memd/store/disk.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import count
from pathlib import Path
from typing import Literal

from memd.errors import DiskFull, FileReplaced, StoreError, StoreLocked, StoreWriteFailed
from memd.store.disk import FileChecksum, LocalDisk, Lock, Room, check_file

Loss = Literal["lost", "torn", "zeros", "kept", "reordered"]
"""The effect of a power cut on contents that were not synced: all lost; half of it on disk; the length on disk but only
zeros in it; all on disk (as after a mere kill); or a different one of these for each file, with or without the names
that were not synced, as on a disk that reorders writes."""
LOSSES: tuple[Loss, ...] = ("lost", "torn", "zeros", "kept", "reordered")


class PowerCutError(Exception):
    """The machine is off: raised by the operation that was under way, and by every later one."""


_changes = count(1)


class Inode:
    def __init__(self, data: bytes = b"", changed_at: int | None = None) -> None:
        self.live = bytearray(data)
        self.durable = bytes(data)
        self.changed_at = next(_changes) if changed_at is None else changed_at
        """As strict as can be: after a power cut it is that of what is lost."""

    def change(self) -> bytearray:
        self.changed_at = next(_changes)
        return self.live


class CrashFiles(LocalDisk):
    """See the module. Set `cut_after`, `fail_at` or `bytes_left` to make trouble; `after_power_cut` to go on."""

    def __init__(self) -> None:
        self.operations = 0
        self.log: list[str] = []
        """The operations in words."""
        self.bytes_read: Counter[str] = Counter()
        """Bytes by file name."""
        self.cut_after: int | None = None
        """The power fails during the operation after this many: it has no effect, but a write may be torn."""
        self.fail_at: set[int] = set()
        """Operations (counted from 0) that fail once with an I/O error; a write then leaves half of its data."""
        self.bytes_left: int | None = None
        """Bytes that still fit on the disk."""
        self._live: dict[Path, Inode | None] = {Path("/"): None}  # None: a directory
        self._durable: dict[Path, Inode | None] = {Path("/"): None}
        self._renames: list[tuple[Path, Path]] = []
        self._locked: set[Path] = set()

    @classmethod
    def with_directory(cls, path: Path) -> CrashFiles:
        """A disk on which there is a directory, durably."""
        files = cls()
        files.make_directory(path)
        files.sync_directory(path.parent)
        return files

    def after_power_cut(self, loss: Loss) -> CrashFiles:
        """Return the disk as it is after the machine has restarted."""
        again = CrashFiles()
        # With "kept" the names are on disk as well; otherwise only those that were synced.
        names = self._live if loss == "kept" or (loss == "reordered" and self.operations % 2) else self._durable
        files = {id(inode): inode for inode in names.values() if inode is not None}
        losses = [loss] * len(files)
        if loss == "reordered":
            losses = [LOSSES[(self.operations // 2 + number) % 4] for number in range(len(files))]
        inodes = {
            key: Inode(_left_of(inode, own_loss), inode.changed_at)
            for (key, inode), own_loss in zip(files.items(), losses, strict=True)
        }
        image = {path: None if inode is None else inodes[id(inode)] for path, inode in names.items()}
        reachable = {path: node for path, node in image.items() if all(parent in image for parent in path.parents)}
        again._live, again._durable = reachable, dict(reachable)
        return again

    def contents(self) -> dict[str, bytes]:
        """Return every file as a process sees it."""
        return {str(path): bytes(inode.live) for path, inode in sorted(self._live.items()) if inode is not None}

    def flip(self, path: Path, offset: int) -> None:
        """Flip one bit on disk."""
        inode = self._file(path)
        inode.change()[offset] ^= 0x10
        inode.durable = bytes(inode.live)

    def put(self, path: Path, data: bytes) -> None:
        """Create a durable file."""
        self._live[path] = self._durable[path] = Inode(data)

    # The rest

    def size(self, path: Path) -> int | None:
        inode = self._live.get(path)
        return None if inode is None else len(inode.live)

    def identity(self, path: Path) -> Hashable | None:
        return self._live.get(path)

    def names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self._live if path.parent == directory and path != directory)

    def is_directory(self, path: Path) -> bool:
        return path in self._live and self._live[path] is None

    def read(self, path: Path) -> bytes:
        return self.read_at(path, 0, len(self._file(path).live))

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        data = bytes(self._file(path).live[offset : offset + length])
        self.bytes_read[path.name] += len(data)
        return data

    def read_pieces(self, path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read_at(path, offset, length) for offset, length in pieces]

    def damage_of(self, path: Path) -> str | None:
        return None

    def create(self, path: Path) -> None:
        self._parent(path)
        self._step(f"create {path.name}", path)
        inode = self._live.get(path)
        if inode is None:
            inode = self._live[path] = Inode()
        inode.change()[:] = b""

    def append(self, path: Path, data: bytes, identity: Hashable | None = None) -> None:
        inode, room = self._file(path), self.bytes_left
        if identity not in (None, inode):
            raise FileReplaced(str(path))
        if room is not None and len(data) > room:
            inode.change().extend(data[:room])
            self.bytes_left = 0
            raise DiskFull(f"{path}: the disk is full")
        try:
            self._step(f"write {path.name}", path)
        except StoreWriteFailed:
            inode.change().extend(data[: len(data) // 2])
            raise
        except PowerCutError:
            inode.change().extend(data)  # how much of it is left is for `after_power_cut` to say
            raise
        inode.change().extend(data)
        if room is not None:
            self.bytes_left = room - len(data)

    def sync(self, path: Path) -> None:
        inode = self._file(path)
        self._step(f"sync {path.name}", path)
        inode.durable = bytes(inode.live)

    def close(self, path: Path) -> None:
        pass

    def cut(self, path: Path, size: int) -> None:
        inode = self._file(path)
        self._step(f"truncate {path.name}", path)
        del inode.change()[size:]
        self._step(f"sync {path.name}", path)
        inode.durable = bytes(inode.live)

    def make_directory(self, path: Path) -> None:
        if not self.is_directory(path):
            self._parent(path)
            self._step(f"mkdir {path.name}", path)
            self._live[path] = None

    def rename(self, old: Path, new: Path) -> None:
        if self.is_directory(old):
            self._rename_directory(old, new)
            return
        inode = self._file(old)
        self._parent(new)
        self._step(f"rename {old.name} {new.name}", new)
        del self._live[old]
        self._live[new] = inode
        self._renames.append((old, new))

    def remove(self, path: Path) -> None:
        if path in self._live:
            self._step(f"remove {path.name}", path)
            del self._live[path]

    def sync_directory(self, path: Path) -> None:
        self._step(f"syncdir {path.name}", path)
        directories = {path}
        for old, new in self._renames:
            if old.parent in directories or new.parent in directories:
                for name in (old, new):
                    self._make_durable(name)
        for name in {*self._live, *self._durable}:
            if name.parent == path:
                self._make_durable(name)
        self._renames = [pair for pair in self._renames if path not in (pair[0].parent, pair[1].parent)]

    # The rest

    def link(self, old: Path, new: Path) -> bool:
        return False  # the harder way: a copy, which takes several steps

    def changed_at(self, path: Path) -> int:
        inode = self._live.get(path)
        return 0 if inode is None else inode.changed_at

    def wipe(self, path: Path, by: Path | None = None) -> bool:
        if by is not None or path in self._live:
            inode = self._file(path)
            self.remove(path) if by is None else self.rename(by, path)
            self.sync_directory(path.parent)
            self._step(f"overwrite what was {path.name}", path)
            inode.live = bytearray(len(inode.live))
            inode.durable = bytes(inode.live)
        return True

    def remove_directory(self, path: Path) -> None:
        assert not self.names(path), "it is empty"
        if self.is_directory(path):
            self._step(f"rmdir {path.name}", path)
            del self._live[path]

    def map(self, path: Path, expected: FileChecksum) -> memoryview:
        check_file(self, path, expected)
        return memoryview(self.read(path))

    def lock(self, path: Path) -> Lock:
        if path in self._locked:
            raise StoreLocked(f"{path}: is locked")
        self._locked.add(path)
        return _CrashLock(self._locked, path)

    def confirm_lock(self) -> None:
        assert self._locked

    def is_locked(self, path: Path) -> bool:
        return path in self._locked

    def room(self, directory: Path) -> Room:
        return Room(1 << 40, None, is_read_only=False)

    def try_writing(self, directory: Path, data: bytes) -> None:
        self._step(f"try writing {directory.name}", directory)

    def encrypts(self, path: Path) -> bool:
        return False

    def may_write(self, path: Path) -> bool:
        return True

    def _rename_directory(self, old: Path, new: Path) -> None:
        """In one step and durable at once, with all that is in it, which is no looser than the store is about it."""
        self._step(f"rename {old.name} {new.name}", new)
        for names in (self._live, self._durable):
            for path in [one for one in names if one == old or old in one.parents]:
                names[new / path.relative_to(old)] = names.pop(path)

    def _make_durable(self, name: Path) -> None:
        if name in self._live:
            self._durable[name] = self._live[name]
        else:
            self._durable.pop(name, None)

    def _file(self, path: Path) -> Inode:
        inode = self._live.get(path)
        if inode is None:
            raise StoreError(f"{path}: cannot be read (no such file)")
        return inode

    def _parent(self, path: Path) -> None:
        if not self.is_directory(path.parent):
            raise StoreWriteFailed(f"{path}: no such directory")

    def _step(self, what: str, path: Path) -> None:
        number, self.operations = self.operations, self.operations + 1
        self.log.append(what)
        if self.cut_after is not None and number >= self.cut_after:
            raise PowerCutError(what)
        if number in self.fail_at:
            raise StoreWriteFailed(f"{path}: I/O error (operation {number}: {what})")


def _left_of(inode: Inode, loss: Loss) -> bytes:
    live, durable = bytes(inode.live), inode.durable
    if loss == "kept":
        return live
    if loss == "lost" or not live.startswith(durable):
        return durable
    unsynced = live[len(durable) :]
    return durable + (unsynced[: len(unsynced) // 2] if loss == "torn" else bytes(len(unsynced)))


class _CrashLock(Lock):
    def __init__(self, locked: set[Path], path: Path) -> None:
        self._all = locked
        self._path = path

    def confirm(self) -> None:
        assert self._path in self._all

    def release(self) -> None:
        self._all.discard(self._path)
