"""Content codings (RFC 9110 section 8.4): gzip, deflate, br and zstd, unpacked piece by piece.

Rule: no caller unpacks more than it asks for. A kilobyte may hold a gigabyte, so each piece of output is limited, and
callers stop when they have enough.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import brotli
from multidict import MultiMapping

from memd.errors import MemdError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES, MEMBERS_MAX = 4096, 10_000
"""Input bytes per step; and limit on members per body, because 9 bytes can be an empty member that takes 20 µs."""
PART_BYTES_MAX = 256 * 1024
CODINGS_MAX = 3
"""Limit on codings applied one after another; nobody needs more than one."""
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
"""Window of 8 MB, the largest that senders may use (RFC 9659); a larger one would let the sender choose our memory."""


class BadCoding(MemdError):
    """A body cannot be unpacked; the message says why."""


class TooLarge(MemdError):
    """A body unpacks to more than there is room for."""


def codings_of(headers: MultiMapping[str]) -> tuple[str, ...]:
    """Return the content codings of a message in the order of application; empty if there are none."""
    named = ",".join(headers.getall("Content-Encoding", [])).lower().split(",")
    return tuple(coding for name in named if (coding := name.strip()) not in ("", "identity"))


class Unpacker:
    """Unpacks one body with one or more codings; its parts may be split anywhere."""

    def __init__(self, codings: Iterable[str], bytes_max: int) -> None:
        """`codings`: in the order of application. `bytes_max`: limit on the output, also of intermediate steps. Raises
        BadCoding: a coding is unknown, or there are too many."""
        named = tuple(codings)
        if len(named) > CODINGS_MAX:
            raise BadCoding(f"it has {len(named)} content codings, more than {CODINGS_MAX}")
        if unknown := next((one for one in named if one not in _CODINGS), None):
            raise BadCoding(f"its content coding is {unknown[:40]!r}, none of {', '.join(_CODINGS)}")
        self._stages = [_Unpacking(_CODINGS[one], bytes_max) for one in reversed(named)]

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the unpacked bytes, at most about `PART_BYTES_MAX` at a time. Raises BadCoding: the data are invalid;
        TooLarge: they exceed `bytes_max`."""
        parts: Iterable[bytes] = (data,)
        for stage in self._stages:
            parts = stage.feed(parts)
        yield from parts

    @property
    def is_finished(self) -> bool:
        """True if the body is complete."""
        return all(stage.is_finished for stage in self._stages)


def unpacked_parts(data: bytes, codings: Iterable[str], bytes_max: int) -> Iterator[bytes]:
    """Yield a whole body unpacked. Raises BadCoding, TooLarge: as `Unpacker`; BadCoding also if the body is
    incomplete."""
    unpacker = Unpacker(codings, bytes_max)
    yield from unpacker.feed(data)
    if not unpacker.is_finished:
        raise BadCoding("its end is missing")


class _Unpacking:
    """One coding: members (frames) one after another, as gzip and zstd allow."""

    def __init__(self, new: Callable[[bytes], Any], bytes_max: int) -> None:
        self._new = new
        self._left, self._members = bytes_max, 0
        self._member: Any = None

    @property
    def is_finished(self) -> bool:
        return self._member is not None and self._member.eof

    def feed(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        for rest in itertools.chain.from_iterable(map(_pieces, parts)):
            while True:
                if self._member is None or self._member.eof:
                    rest = rest if self._member is None else rest.lstrip(b"\0")  # padding of some senders
                    if not rest:
                        break
                    self._member = self._new(rest)
                    self._members += 1
                    if self._members > MEMBERS_MAX:
                        raise BadCoding(f"it has more than {MEMBERS_MAX:,} members")
                try:
                    part = self._member.decompress(rest, PART_BYTES_MAX)
                except (zlib.error, zstd.ZstdError, brotli.error) as error:
                    raise BadCoding(f"it cannot be unpacked: {error}") from None
                # zstd itself keeps the input that it has not unpacked yet.
                kept = getattr(self._member, "unconsumed_tail", b"")
                rest = self._member.unused_data if self._member.eof else kept
                self._left -= len(part)
                if self._left < 0:
                    raise TooLarge("it unpacks to more than there is room for")
                if part:
                    yield part
                elif not self._member.eof:
                    break  # it needs more input


def _pieces(data: bytes) -> Iterator[bytes]:
    """Yield short pieces: each member copies the rest behind it, and a body may consist of empty members only."""
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))


class _Brotli:
    """A brotli stream with the interface of `zlib.decompressobj`; nothing may follow it."""

    unused_data = b""

    def __init__(self) -> None:
        self._stream = brotli.Decompressor()

    @property
    def eof(self) -> bool:
        return bool(self._stream.is_finished())

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return bytes(self._stream.process(data, output_buffer_limit=max_length))


def _gzip(_: bytes) -> Any:
    return zlib.decompressobj(zlib.MAX_WBITS | 16)


def _deflate(beginning: bytes) -> Any:
    """Return a decompressor for zlib's format, as the standard says, or for raw deflate, which some servers send."""
    is_zlib = beginning[0] & 0x0F == zlib.DEFLATED and beginning[0] >> 4 <= 7
    return zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)


_CODINGS: dict[str, Callable[[bytes], Any]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "br": lambda _: _Brotli(),
    "zstd": lambda _: zstd.ZstdDecompressor(options=_ZSTD_OPTIONS),
    "x-gzip": _gzip,
}
