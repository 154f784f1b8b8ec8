"""Passes one connection on, both ways. Usage: relay.py LISTEN CONNECT, each unix:PATH or tcp:ADDRESS:PORT.

Live migration crosses the underlay by two of them: QEMU itself runs outside the hosts' network namespaces.
"""

import contextlib
import socket
import sys
import threading
import time

BYTES_MAX = 1 << 20
CONNECT_S = 30
"""How long the other end may take to listen."""


def endpoint(text: str) -> tuple[socket.socket, str | tuple[str, int]]:
    """A socket of the kind that `text` names, and its address."""
    kind, _, place = text.partition(":")
    if kind == "unix":
        return socket.socket(socket.AF_UNIX), place
    host, _, port = place.rpartition(":")
    tcp = socket.socket(socket.AF_INET)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return tcp, (host, int(port))


def connect(text: str) -> socket.socket:
    """Connects, and waits until the other end listens."""
    end = time.monotonic() + CONNECT_S
    while True:
        there, address = endpoint(text)
        try:
            there.connect(address)
        except OSError:
            there.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return there


def forward(source: socket.socket, destination: socket.socket) -> None:
    """Passes on what comes until the end of the stream; an error ends both directions."""
    try:
        while data := source.recv(BYTES_MAX):
            destination.sendall(data)
        destination.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, destination):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def main(listen: str, to: str) -> None:
    """Waits for the connection, and passes it on until both directions have ended."""
    listener, address = endpoint(listen)
    listener.bind(address)
    listener.listen(1)
    here, _ = listener.accept()
    listener.close()
    there = connect(to)
    back = threading.Thread(target=forward, args=(there, here))
    back.start()
    forward(here, there)
    back.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
