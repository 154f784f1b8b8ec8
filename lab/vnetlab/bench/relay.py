"""Relays TCP connections with blocking sockets, one thread per direction: relay.py PORT TO_ADDRESS TO_PORT."""

import contextlib
import socket
import sys
import threading

BUFFER_BYTES = 256 << 10


def carry(source: socket.socket, destination: socket.socket) -> None:
    """Copies bytes until end of stream, then shuts the other side down."""
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    with contextlib.suppress(OSError):
        while length := source.recv_into(buffer):
            destination.sendall(view[:length])
    with contextlib.suppress(OSError):
        destination.shutdown(socket.SHUT_WR)


def main() -> None:
    """Accepts connections until killed."""
    port, address, to = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with socket.create_server(("", port), backlog=64) as listener:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((address, to), timeout=5)
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((near, far), (far, near)):
                threading.Thread(target=carry, args=ends, daemon=True).start()


main()
