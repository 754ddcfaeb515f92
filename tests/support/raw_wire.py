"""Both ends of a connection as bytes: an upstream that plays a script, and a client that says and reads what it likes.

Rule: sockets and threads, no HTTP library: what is compared is what was on the wire.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

SECONDS_MAX = 120.0
PROPS = b'{"default_generation_settings":{"n_ctx":4096},"model_alias":"raw"}'


def answer(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """A whole answer with its length."""
    return b"\r\n".join([b"HTTP/1.1 " + status, *headers, b"Content-Length: %d" % len(body), b"", body])


def request(method: bytes, target: bytes, *headers: bytes, body: bytes | None = None) -> bytes:
    """A whole request."""
    length = [] if body is None else [b"Content-Length: %d" % len(body)]
    return b"\r\n".join([method + b" " + target + b" HTTP/1.1", b"Host: memd", *headers, *length, b"", body or b""])


def chunked(*parts: bytes) -> bytes:
    """Parts in the chunked encoding, with the last, empty one."""
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


class Peer:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS_MAX)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is sent is there, and not 40 ms later
        self._socket = connection
        self._left = b""
        self.head = b""
        """The last request or answer up to its empty line, that line not included."""
        self.heads = 0
        """How many came."""
        self.body = b""
        """What `read_body` last returned."""

    def send(self, data: bytes) -> None:
        """Put bytes on the wire."""
        self._socket.sendall(data)

    def read_head(self) -> bytes:
        """A request line or status line with its headers; empty at the end of the connection."""
        while b"\r\n\r\n" not in self._left:
            data = self._socket.recv(1 << 16)
            if not data:
                return b""
            self._left += data
        self.head, self._left = self._left.split(b"\r\n\r\n", 1)
        self.heads += 1
        return self.head

    def read(self, size: int) -> bytes:
        """That many bytes, or fewer where the connection ends."""
        while len(self._left) < size:
            data = self._socket.recv(1 << 20)
            if not data:
                break
            self._left += data
        data, self._left = self._left[:size], self._left[size:]
        return data

    def read_some(self) -> bytes:
        """What has come, or comes next; empty at the end of the connection."""
        data, self._left = self._left, b""
        return data or self._socket.recv(1 << 16)

    def is_readable(self, seconds: float) -> bool:
        """Whether something comes within that time, be it the end."""
        return bool(self._left) or bool(select.select([self._socket], [], [], seconds)[0])

    def read_body(self) -> bytes:
        """The body that the last head announced."""
        if b"chunked" in (self.header(b"Transfer-Encoding") or b"").lower():
            self.body = b"".join(iter(self.read_chunk, b""))
        else:
            self.body = self.read(int(self.header(b"Content-Length") or 0))
        return self.body

    def read_chunk(self) -> bytes:
        """The next chunk of a chunked body; empty for the last, or where the connection ends."""
        line = b""
        while not line.endswith(b"\r\n"):
            byte = self.read(1)
            if not byte:
                return b""
            line += byte
        data = self.read(int(line, 16))
        self.read(2)
        return data

    def read_to_end(self) -> bytes:
        """Everything until the other end closes; what a broken connection still gave."""
        parts = [self._left]
        self._left = b""
        try:
            while data := self._socket.recv(1 << 20):
                parts.append(data)
        except ConnectionError:
            pass
        return b"".join(parts)

    def header(self, name: bytes) -> bytes | None:
        """A header of the last head."""
        found = self.headers(name)
        return found[0] if found else None

    def headers(self, name: bytes) -> list[bytes]:
        """All headers of that name of the last head, in order."""
        lines = [line.partition(b":") for line in self.head.split(b"\r\n")[1:]]
        return [value.strip() for key, _, value in lines if key.lower() == name.lower()]

    def wait_until_closed(self) -> float:
        """Seconds until the other end closes."""
        started = time.monotonic()
        self.read_to_end()
        return time.monotonic() - started

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def abort(self) -> None:
        """End the connection as a crash does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()


Script = Callable[[Peer], None]


def answering(said: bytes | Script) -> Script:
    """A script that reads the whole request, and then says this, or does it."""

    def script(peer: Peer) -> None:
        peer.read_body()
        if isinstance(said, bytes):
            peer.send(said)
        else:
            said(peer)

    return script


class RawUpstream:
    """Plays `script` for each request but those with which memd asks about the model."""

    def __init__(self) -> None:
        self.url = ""
        self.heads: list[bytes] = []
        """Of the requests that came since the script was set."""
        self.script = answering(answer(b"{}"))

    @property
    def script(self) -> Script:
        """Called when a request's head has been read; it reads the body itself."""
        return self._script

    @script.setter
    def script(self, played: Script) -> None:
        self._script = played
        self.heads.clear()


@contextmanager
def raw_upstream(props: bytes = PROPS, tls: ssl.SSLContext | None = None) -> Iterator[RawUpstream]:
    """Listen on a free loopback port until the block is left.

    Args:
        props: the answer to `/props`.
        tls: the server's side, for an address with https.
    """
    upstream = RawUpstream()
    listener = socket.create_server(("127.0.0.1", 0))
    upstream.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"

    def serve(connection: socket.socket) -> None:
        try:
            peer = Peer(connection if tls is None else tls.wrap_socket(connection, server_side=True))
        except OSError:  # the other side does not trust the certificate
            connection.close()
            return
        try:
            while head := peer.read_head():
                if head.startswith(b"GET /props "):
                    peer.send(answer(props))
                elif any(path in head for path in (b"/apply-template ", b"/input_tokens ", b"/count_tokens ")):
                    peer.read_body()
                    peer.send(answer(b"{}", status=b"404 Not Found"))
                else:
                    upstream.heads.append(head)
                    upstream.script(peer)
        except OSError:
            pass  # the daemon or the script closed it
        finally:
            peer.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield upstream
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def connected(base_url: str) -> Peer:
    """A client's end of a new connection to the daemon."""
    parts = urlsplit(base_url)
    return Peer(socket.create_connection((parts.hostname, parts.port), timeout=SECONDS_MAX))
