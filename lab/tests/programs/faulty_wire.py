"""A wire that loses, duplicates and reorders UDP datagrams.

Usage: faulty_wire.py PORT,PEER PORT,PEER LOSS,REPEAT,DELAY SEED

A datagram that arrives at one port is forwarded from the other port to that port's peer. Fault rates are in
thousandths, drawn from one seeded generator for each datagram that carries frames or a fragment; probes and keepalives
are not affected, so that they do not change the sequence. A delayed datagram is overtaken by up to DISTANCE others. On
SIGTERM the program prints its counts.
"""

import json
import random
import select
import signal
import sys

from inet import receiver

DISTANCE = 12
BUFFER_BYTES = 32 << 20
QUIET_S = 0.02
"""Maximum delay in seconds if no datagram arrives to overtake."""
FRAMES = (0x10, 0x11)
"""First bytes of native datagrams with a frame or fragment, and with a bundle."""


class End:
    """One end of the wire."""

    def __init__(self, text: str) -> None:
        port, peer = text.split(",")
        self.peer = (peer, 9000)
        self.socket = receiver(int(port), BUFFER_BYTES)
        self.turn = 0
        self.delayed: list[tuple[int, bytes]] = []

    def send_due(self, turn: float) -> None:
        """Sends the datagrams whose delay ends at `turn`."""
        due = [entry for entry in self.delayed if entry[0] <= turn]
        self.delayed = [entry for entry in self.delayed if entry[0] > turn]
        for _, datagram in due:
            self.socket.sendto(datagram, self.peer)


ends = [End(sys.argv[1]), End(sys.argv[2])]
loss, repeat, delay = (int(word) / 1000 for word in sys.argv[3].split(","))
chance = random.Random(int(sys.argv[4]))
counts = {"carried": 0, "lost": 0, "repeated": 0, "delayed": 0}
print("ready", flush=True)


def end(*_: object) -> None:
    print(json.dumps(counts), flush=True)
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
while True:
    ready, _, _ = select.select([one.socket for one in ends], [], [], QUIET_S)
    for here, there in (ends, ends[::-1]):
        if here.socket not in ready:
            there.send_due(float("inf"))
            continue
        datagram = here.socket.recv(65536)
        if datagram[0] not in FRAMES:
            there.socket.sendto(datagram, there.peer)
            continue
        there.turn += 1
        counts["carried"] += 1
        draws = chance.random() < loss, chance.random() < repeat, chance.random() < delay, chance.randint(1, DISTANCE)
        if draws[0]:
            counts["lost"] += 1
        elif draws[2]:
            counts["delayed"] += 1
            there.delayed.append((there.turn + draws[3], datagram))
        else:
            there.socket.sendto(datagram, there.peer)
        if draws[1] and not draws[0]:
            counts["repeated"] += 1
            there.socket.sendto(datagram, there.peer)
        there.send_due(there.turn)
