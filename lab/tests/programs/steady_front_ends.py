"""Guests without an operating system send frames to each other across two hosts until SIGTERM, one every 2 ms.

Usage: steady_front_ends.py FILE SENDER RECEIVER [SENDER RECEIVER ...]

SENDER and RECEIVER are sockets of vhost-user interfaces, one pair for each direction. Nothing is emulated, so times are
those of vnetd and of this machine. Afterwards FILE has, for each pair: the number of frames sent, and the times (s) at
which each arrived, by number. A damaged frame, or one that comes twice, ends the program with an error.
"""

import json
import signal
import struct
import sys
import time
from pathlib import Path

from front_end import FRAMES, HEADER, RING, ROOM, SLOT, SLOTS, Guest, receive_whole

INTERVAL_S = 0.002
END_S = 1.0
"""Frames may be on their way when the last one is sent."""
LEN = 60
FILL = b"\xa5"
EXPERIMENTAL = b"\x88\xb5"
"""EtherType for local experiments (IEEE 802)."""


class Pair:
    """A guest that sends and one that receives."""

    def __init__(self, number: int, sender: str, receiver: str) -> None:
        self.sender, self.receiver = Guest(sender, 1), Guest(receiver, 0)
        source, to = (bytes((2, 0, 0, 0, number, end)) for end in (1, 2))
        self.head = to + source + EXPERIMENTAL
        self.sent, self.arrived = 0, {}
        for slot in range(SLOTS):
            self.sender.describe(self.sender.base + 16 * slot, FRAMES + slot * SLOT, HEADER.size + LEN, 0)
        self.sender.slots(list(range(SLOTS)))
        receive_whole(self.receiver)
        self.receiver.connect()
        self.sender.connect()
        self.receiver.show(RING)

    def send(self) -> None:
        """Sends the next frame, unless vnetd has not taken the last ones."""
        in_flight = self.sent - self.sender.taken - sum(1 for _ in self.sender.used())
        if in_flight < SLOTS:
            at = FRAMES + self.sent % SLOTS * SLOT
            content = bytes(HEADER.size) + self.head + struct.pack("<Q", self.sent)
            self.sender.memory[at : at + HEADER.size + LEN] = content.ljust(HEADER.size + LEN, FILL)
            self.sent += 1
            self.sender.show(self.sent)
        self.sender.notify()

    def receive(self) -> None:
        """Takes what has arrived."""
        now = time.time()
        for slot, length in self.receiver.used():
            at = FRAMES + ROOM * slot
            frame = self.receiver.memory[at + HEADER.size : at + length]
            if frame[: len(self.head)] != self.head:
                continue
            (number,) = struct.unpack_from("<Q", frame, len(self.head))
            if len(frame) != LEN or frame[len(self.head) + 8 :].strip(FILL) or number >= self.sent:
                sys.exit(f"damaged: {frame.hex()}")
            if number in self.arrived:
                sys.exit(f"frame {number} came twice")
            self.arrived[number] = now
        # What has come since is for the next call.
        self.receiver.show(self.receiver.seen + RING)


def main() -> None:
    file, *sockets = sys.argv[1:]
    pairs = [Pair(number, *ends) for number, ends in enumerate(zip(sockets[::2], sockets[1::2], strict=True))]
    until: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: until.append(time.monotonic() + END_S))
    print("ready", flush=True)
    next_at = time.monotonic()
    while not until or time.monotonic() < until[0]:
        if not until and time.monotonic() >= next_at:
            for pair in pairs:
                pair.send()
            next_at += INTERVAL_S
        for pair in pairs:
            pair.receive()
        time.sleep(INTERVAL_S / 10)
    Path(file).write_text(json.dumps([{"sent": pair.sent, "arrived": pair.arrived} for pair in pairs]))


main()
