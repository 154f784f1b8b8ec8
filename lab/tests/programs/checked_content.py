"""Data with checked content, by TCP and in UDP datagrams.

Usage: checked_content.py take ADDRESS | stream ADDRESS BYTES | datagrams ADDRESS COUNT SIZE...

`take` answers each connection, and each datagram, with the SHA-256 of what has arrived. The others send random bytes
and fail if an answer is wrong or missing. `datagrams` sends COUNT datagrams of each size, one after the other.
"""

import hashlib
import os
import socket
import sys
import threading
from collections.abc import Callable

PORT = 7008
DATAGRAM_MAX = 65535
PATIENCE_S = 60


def opened(kind: socket.SocketKind, address: str, use: Callable[[socket.socket, tuple], None]) -> socket.socket:
    family, _, _, _, full = socket.getaddrinfo(address, PORT, type=kind)[0]
    own = socket.socket(family, kind)
    own.settimeout(PATIENCE_S)
    if kind == socket.SOCK_DGRAM:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * DATAGRAM_MAX)
    use(own, full)
    return own


def take(address: str) -> None:
    stream = opened(socket.SOCK_STREAM, address, socket.socket.bind)
    datagrams = opened(socket.SOCK_DGRAM, address, socket.socket.bind)
    for own in (stream, datagrams):
        own.settimeout(None)
    stream.listen()

    def answer_datagrams() -> None:
        while True:
            datagram, source = datagrams.recvfrom(DATAGRAM_MAX)
            datagrams.sendto(hashlib.sha256(datagram).digest(), source)

    threading.Thread(target=answer_datagrams, daemon=True).start()
    print("ready", flush=True)
    while True:
        connection, _ = stream.accept()
        with connection:
            digest = hashlib.sha256()
            while chunk := connection.recv(1 << 20):
                digest.update(chunk)
            connection.sendall(digest.digest())


def check(answer: bytes, digest: "hashlib._Hash", what: str) -> None:
    if answer != digest.digest():
        sys.exit(f"{what} arrived damaged")


def stream(address: str, size: int) -> None:
    digest, left = hashlib.sha256(), size
    with opened(socket.SOCK_STREAM, address, socket.socket.connect) as own:
        while left:
            chunk = os.urandom(min(left, 1 << 20))
            digest.update(chunk)
            own.sendall(chunk)
            left -= len(chunk)
        own.shutdown(socket.SHUT_WR)
        with own.makefile("rb") as answer:
            check(answer.read(), digest, f"a stream of {size} bytes")


def datagrams(address: str, count: int, sizes: list[int]) -> None:
    with opened(socket.SOCK_DGRAM, address, socket.socket.connect) as own:
        for size in sizes:
            for _ in range(count):
                content = os.urandom(size)
                own.send(content)
                try:
                    answer = own.recv(DATAGRAM_MAX)
                except TimeoutError:
                    sys.exit(f"a datagram of {size} bytes is lost")
                check(answer, hashlib.sha256(content), f"a datagram of {size} bytes")


_, command, to, *numbers = sys.argv
if command == "take":
    take(to)
elif command == "stream":
    stream(to, int(numbers[0]))
else:
    datagrams(to, int(numbers[0]), [int(size) for size in numbers[1:]])
