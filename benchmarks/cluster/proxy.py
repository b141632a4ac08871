"""A TCP proxy that counts bytes and gRPC calls.

gRPC uses HTTP/2. Each gRPC call opens a stream, and the client then sends one
frame of the type HEADERS. The proxy therefore counts these frames.
"""

import dataclasses
import socket
import threading

# Number of bytes that a client sends before its first frame.
_PREFACE = 24
# Size of a frame's header: length (3 bytes), type, flags and stream (4 bytes).
_FRAME_HEADER = 9
_HEADERS = 1
_BUFFER = 1 << 20


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic through one or several proxies, in both directions.

    Attributes:
      num_bytes: Bytes of TCP payload.
      num_calls: Number of gRPC calls that clients have started.
    """

    num_bytes: int = 0
    num_calls: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.num_bytes + other.num_bytes, self.num_calls + other.num_calls
        )

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.num_bytes - other.num_bytes, self.num_calls - other.num_calls
        )


class CallCounter:
    """Counts the gRPC calls in the bytes that a client sends.

    >>> counter = CallCounter()
    >>> ping = b"\\0\\0\\1" b"\\6\\0" b"\\0\\0\\0\\0" b"?"
    >>> headers = b"\\0\\0\\2" b"\\1\\4" b"\\0\\0\\0\\1" b"??"
    >>> sent = b"P" * 24 + ping + headers + headers
    >>> counter.read(sent[:40]), counter.read(sent[40:])
    (0, 2)
    """

    def __init__(self):
        """Initializes the counter for the start of a connection."""
        self._to_skip = _PREFACE
        self._header = b""

    def read(self, data: bytes) -> int:
        """Consumes the next bytes and returns the number of new calls."""
        num_calls, at = 0, 0
        while True:
            skipped = min(self._to_skip, len(data) - at)
            at += skipped
            self._to_skip -= skipped
            if self._to_skip:
                return num_calls
            added = data[at : at + _FRAME_HEADER - len(self._header)]
            at += len(added)
            self._header += added
            if len(self._header) < _FRAME_HEADER:
                return num_calls
            num_calls += self._header[3] == _HEADERS
            self._to_skip = int.from_bytes(self._header[:3], "big")
            self._header = b""


class Proxy:
    """Forwards TCP connections from a free port of 127.0.0.1 to a target.

    Attributes:
      address: Address on which the proxy listens, `host:port`.
    """

    def __init__(self, target: str):
        """Starts the proxy.

        Args:
          target: Address to which connections are forwarded, `host:port`.
        """
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def traffic(self) -> Traffic:
        """Returns the traffic since the start of the proxy."""
        with self._lock:
            return self._traffic

    def close(self) -> None:
        """Stops accepting connections."""
        self._listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # `close` was called.
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # The target is not ready. The client will retry.
                client.close()
                continue
            for source, sink, counter in (
                (client, server, CallCounter()),
                (server, client, None),
            ):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(
                    target=self._pass_on,
                    daemon=True,
                    args=(source, sink, counter),
                ).start()

    def _pass_on(
        self,
        source: socket.socket,
        sink: socket.socket,
        counter: CallCounter | None,
    ):
        try:
            while data := source.recv(_BUFFER):
                with self._lock:
                    self._traffic += Traffic(
                        len(data), counter.read(data) if counter else 0
                    )
                sink.sendall(data)
        except OSError:  # A peer closed the connection.
            pass
        for connection in (source, sink):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
