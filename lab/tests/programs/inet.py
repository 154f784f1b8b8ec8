"""Code shared by the programs of this folder: the Internet checksum, and numbered UDP datagrams with an end mark."""

import contextlib
import socket
import struct
import time
from collections.abc import Iterable

NUMBER = struct.Struct("!I")
END = 2**32 - 1
"""The number that ends a flow."""
SO_RCVBUFFORCE = 33
"""socket(7); Python has no name for it."""


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    total = sum(word for (word,) in struct.iter_unpack("!H", data + bytes(len(data) % 2)))
    return ~(total % 0xFFFF) & 0xFFFF


def receiver(port: int, buffer_bytes: int = 64 << 20) -> socket.socket:
    """A UDP socket at `port` with a large receive buffer, even beyond the system's limit."""
    opened = socket.socket(type=socket.SOCK_DGRAM)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, buffer_bytes)
    opened.bind(("0.0.0.0", port))
    return opened


def end(sockets: Iterable[socket.socket], repeats: int, interval_s: float) -> None:
    """Sends the end mark, repeatedly because it may be lost."""
    for _ in range(repeats):
        time.sleep(interval_s)
        for connected in sockets:
            # The receiver may have exited already.
            with contextlib.suppress(ConnectionRefusedError):
                connected.send(NUMBER.pack(END))
