"""Numbered UDP datagrams whose content tells what it should be: parcels.py take COUNT, parcels.py send COUNT ADDRESS.

Each is as large as a frame of several datagrams of the underlay. The receiver prints how many different ones came, how
many came again, and how many were not what was sent.
"""

import contextlib
import hashlib
import socket
import struct
import sys
import time

PORT = 7008
LEN = 8000
PER_S = 1000
END = 2**32 - 1
END_REPEATS = 20
SO_RCVBUFFORCE = 33
"""socket(7); Python has no name for it."""
NUMBER = struct.Struct("!I")


def parcel(number: int) -> bytes:
    """What datagram `number` has to be."""
    return NUMBER.pack(number) + hashlib.shake_128(NUMBER.pack(number)).digest(LEN - NUMBER.size)


def send(count: int, address: str) -> None:
    own = socket.socket(type=socket.SOCK_DGRAM)
    own.connect((address, PORT))
    begin = time.monotonic()
    for number in range(count):
        own.send(parcel(number))
        time.sleep(max(0.0, begin + number / PER_S - time.monotonic()))
    for _ in range(END_REPEATS):
        time.sleep(0.01)
        # The receiver may have ended already.
        with contextlib.suppress(ConnectionRefusedError):
            own.send(NUMBER.pack(END))


def take(count: int) -> None:
    own = socket.socket(type=socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    own.bind(("", PORT))
    own.settimeout(30)
    print("ready", flush=True)
    came: set[int] = set()
    again = wrong = 0
    while True:
        datagram = own.recv(65536)
        (number,) = NUMBER.unpack_from(datagram)
        if datagram == NUMBER.pack(END):
            break
        wrong += number >= count or datagram != parcel(number)
        again += number in came
        came.add(number)
    print(len(came), again, wrong)


if sys.argv[1] == "take":
    take(int(sys.argv[2]))
else:
    send(int(sys.argv[2]), sys.argv[3])
