"""Sends frames from invented MAC addresses, each a new flow: scanner.py DEVICE TO_MAC COUNT [FLOWS_PER_S].

Without a rate it sends as fast as it can.
"""

import socket
import struct
import sys
import time

EXPERIMENTAL = struct.pack(">H", 0x88B5)
"""EtherType for local experiments (IEEE 802)."""
PAUSE_S = 0.001


def scan(device: str, destination: bytes, count: int, rate: float) -> None:
    """Sends `count` frames, `rate` per second."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as port:
        port.bind((device, 0))
        begin = time.monotonic()
        for number in range(count):
            while number > (time.monotonic() - begin) * rate:
                time.sleep(PAUSE_S)
            port.send(destination + struct.pack(">HI", 0x0200, number) + EXPERIMENTAL + bytes(46))


if __name__ == "__main__":
    device, mac, count, *rest = sys.argv[1:]
    scan(device, bytes.fromhex(mac.replace(":", "")), int(count), float(rest[0]) if rest else float("inf"))
