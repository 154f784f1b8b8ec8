"""Numbered UDP datagrams whose content depends on their number, to find corruption and duplicates.

Usage: udp_integrity.py take COUNT | udp_integrity.py send COUNT ADDRESS

Each datagram is fragmented into several datagrams of the underlay. The receiver prints how many different datagrams
arrived, how many arrived more than once, and how many were corrupted.
"""

import hashlib
import socket
import sys
import time

from inet import END, NUMBER, end, receiver

PORT = 7008
LEN = 8000
PER_S = 1000


def content(number: int) -> bytes:
    """The bytes of datagram `number`."""
    return NUMBER.pack(number) + hashlib.shake_128(NUMBER.pack(number)).digest(LEN - NUMBER.size)


def send(count: int, address: str) -> None:
    own = socket.socket(type=socket.SOCK_DGRAM)
    own.connect((address, PORT))
    begin = time.monotonic()
    for number in range(count):
        own.send(content(number))
        time.sleep(max(0.0, begin + number / PER_S - time.monotonic()))
    end([own], repeats=20, interval_s=0.01)


def take(count: int) -> None:
    own = receiver(PORT)
    own.settimeout(30)
    print("ready", flush=True)
    came: set[int] = set()
    again = wrong = 0
    while True:
        datagram = own.recv(65536)
        (number,) = NUMBER.unpack_from(datagram)
        if datagram == NUMBER.pack(END):
            break
        wrong += number >= count or datagram != content(number)
        again += number in came
        came.add(number)
    print(len(came), again, wrong)


if sys.argv[1] == "take":
    take(int(sys.argv[2]))
else:
    send(int(sys.argv[2]), sys.argv[3])
