"""A virtual machine without vhost-user: opens a TAP as QEMU does, for a guest that is a network namespace.

Usage: tap_guest.py TAP NAMESPACE DEVICE

The guest's DEVICE is another TAP, in NAMESPACE. Frames move between both with their virtio-net headers. Prints a line
when both exist, and runs until its standard input ends.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
from pathlib import Path

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
CHECKSUM, TSO4, TSO6 = 1, 2, 4
CLONE_NEWNET = 0x40000000
FRAME_MAX = 1 << 17


def open_tap(name: str) -> int:
    """Creates a TAP in this process's network namespace."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tap, TUNSETOFFLOAD, CHECKSUM | TSO4 | TSO6)
    return tap


def move(source: int, destination: int) -> None:
    """Moves all waiting frames from one TAP to another."""
    while True:
        try:
            frame = os.read(source, FRAME_MAX)
        except OSError:
            # None waits, or the device is down.
            return
        try:
            os.write(destination, frame)
        except OSError:
            # The other device is down.
            continue


def main(tap: str, namespace: str, device: str) -> None:
    outside = open_tap(tap)
    with Path(f"/run/netns/{namespace}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    inside = open_tap(device)
    print("ready", flush=True)
    while True:
        ready = select.select([0, outside, inside], [], [])[0]
        if 0 in ready:
            return
        if outside in ready:
            move(outside, inside)
        if inside in ready:
            move(inside, outside)


if __name__ == "__main__":
    main(*sys.argv[1:])
