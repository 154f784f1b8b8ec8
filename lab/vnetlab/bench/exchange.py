"""Messages to and fro over TCP, timed as MPI benchmarks do. A program of its own: it runs inside containers.

`exchange.py serve ADDRESS PORT` answers; `exchange.py run ADDRESS PORT BYTES SECONDS` measures and prints JSON: the
time of one message one way (half a round trip, the median), and the rate of both directions together when both send at
once.
"""

import json
import socket
import statistics
import struct
import sys
import threading
import time

HEADER = struct.Struct("!BIQ")
"""What follows: 0 to and fro, 1 both at once; how many messages; bytes of each."""
ROUNDS_MIN = 3
ROUNDS_MAX = 100_000


def receive(connection: socket.socket, size: int) -> None:
    """Takes one message."""
    buffer = memoryview(bytearray(min(size, 1 << 20)))
    while size:
        got = connection.recv_into(buffer[: min(size, len(buffer))])
        if not got:
            raise ConnectionError("the other side is gone")
        size -= got


def to_and_fro(connection: socket.socket, count: int, message: bytes) -> list[float]:
    """Sends and takes `count` messages, one after the other; gives the seconds that each round trip took."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        connection.sendall(message)
        receive(connection, len(message))
        times.append(time.perf_counter() - begin)
    return times


def both(connection: socket.socket, count: int, message: bytes) -> float:
    """Sends and takes `count` messages at the same time; gives the seconds it took."""
    begin = time.perf_counter()
    sender = threading.Thread(target=lambda: [connection.sendall(message) for _ in range(count)])
    sender.start()
    for _ in range(count):
        receive(connection, len(message))
    sender.join()
    return time.perf_counter() - begin


def serve(address: str, port: int) -> None:
    """Answers one client after the other."""
    with socket.create_server((address, port)) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    while header := connection.recv(HEADER.size, socket.MSG_WAITALL):
                        kind, count, size = HEADER.unpack(header)
                        message = bytes(size)
                        if kind:
                            both(connection, count, message)
                            continue
                        for _ in range(count):
                            receive(connection, size)
                            connection.sendall(message)
                except (ConnectionError, struct.error):
                    continue


def run(address: str, port: int, size: int, seconds: float) -> dict[str, float]:
    """Measures for about so long."""
    message = bytes(size)
    with socket.create_connection((address, port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def rounds(count: int) -> list[float]:
            connection.sendall(HEADER.pack(0, count, size))
            return to_and_fro(connection, count, message)

        warm = statistics.median(rounds(10))
        count = max(ROUNDS_MIN, min(ROUNDS_MAX, round(seconds / warm)))
        oneway_s = statistics.median(rounds(count)) / 2
        connection.sendall(HEADER.pack(1, count, size))
        took_s = both(connection, count, message)
    return {"oneway_us": oneway_s * 1e6, "exchange_bps": 2 * 8 * size * count / took_s}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(run(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))))
