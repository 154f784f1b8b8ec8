"""Sends frames of mixed sizes to mixed destinations as fast as it can: mixed_frames.py DEVICE COUNT MAC...

Destinations are the given ones, an unknown one, and broadcast. The source is the device's own address, or for one frame
in sixteen a group address, which is never a valid source.
"""

import random
import socket
import sys
from pathlib import Path

SIZES = (14, 60, 64, 65, 128, 256, 512, 1024, 1280, 1500, 1514)
KINDS = 4096
"""Number of different frames, generated before sending and chosen at random."""
UNKNOWN = "02:00:00:00:ff:ff"
BROADCAST = "ff:ff:ff:ff:ff:ff"


def main() -> None:
    device, count, destinations = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    own = Path(f"/sys/class/net/{device}/address").read_text().strip()
    chance = random.Random(1)
    frames = []
    for _ in range(KINDS):
        # Keep flooded frames rare: each is copied to every machine.
        destination = chance.choice([*destinations * 4, UNKNOWN, BROADCAST])
        source = "03:00:00:00:00:01" if chance.random() < 1 / 16 else own
        addresses = bytes.fromhex((destination + source).replace(":", ""))
        frames.append((addresses + b"\x88\xb5").ljust(chance.choice(SIZES), b"\xa5"))
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
        out.bind((device, 0))
        send, choose = out.send, chance.choices
        for _ in range(count // 1000):
            for frame in choose(frames, k=1000):
                try:
                    send(frame)
                except OSError as error:
                    sys.exit(f"{error}: {len(frame)} bytes")


main()
