"""A TCP stream with known content, compared as it arrives: fast enough not to limit what is measured.

Usage: bystander.py take ADDRESS | bystander.py send ADDRESS SECONDS

`take` answers each connection with the number of bytes that have arrived as sent, or with "damaged". `send` prints the
bytes that arrived per second.
"""

import random
import socket
import sys
import time

PORT = 7011
BLOCK = random.Random(7).randbytes(256 << 10)
"""What a stream repeats."""
PATIENCE_S = 60


def take(address: str) -> None:
    room = bytearray(len(BLOCK))
    with socket.create_server((address, PORT)) as listener:
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                total, whole = 0, True
                while size := connection.recv_into(room, len(room), socket.MSG_WAITALL):
                    total += size
                    whole &= room == BLOCK if size == len(room) else room[:size] == BLOCK[:size]
                connection.sendall(str(total).encode() if whole else b"damaged")


def send(address: str, seconds: float) -> None:
    with socket.create_connection((address, PORT), PATIENCE_S) as own:
        own.settimeout(PATIENCE_S)
        sent, begin = 0, time.monotonic()
        while time.monotonic() < begin + seconds:
            own.sendall(BLOCK)
            sent += len(BLOCK)
        own.shutdown(socket.SHUT_WR)
        answer = own.recv(64, socket.MSG_WAITALL)
        if answer != str(sent).encode():
            sys.exit(f"{sent} bytes sent, and the answer is {answer.decode()}")
        print(sent / (time.monotonic() - begin))


if sys.argv[1] == "take":
    take(sys.argv[2])
else:
    send(sys.argv[2], float(sys.argv[3]))
