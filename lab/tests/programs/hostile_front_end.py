"""Two vhost-user front ends that attack the vnetd that serves them.

Usage: hostile_front_end.py ATTACK SENDER RECEIVER SENDER_MAC RECEIVER_MAC

SENDER and RECEIVER are sockets of two interfaces. The guest at SENDER sends frames to that at RECEIVER until SIGTERM;
then the program prints how many vnetd has taken, for how long (s), and how much processor this process used (s). It
writes frames and descriptors once, and sending makes chains available again, so it uses little.

`segments`: super-frames that vnetd must cut into 1 364 segments each.
`waiters`: 10^5 waiters at each eventfd that vnetd signals or reads.
`unmapping`: a memory table of 512 MiB, whose pages vnetd has touched, is replaced in a loop.
`truncation`: the file of frames is truncated while they are sent, and the front end reconnects.
`chains`: frames in 254 pieces, and receive chains of 254 descriptors of 4 GiB with a dirty log.
"""

import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

from front_end import (
    DESC_WRITE,
    FRAMES,
    HEADER,
    LARGE_AT,
    LOG_ALL,
    RING,
    SLOT,
    SLOTS,
    TABLES,
    Guest,
    Region,
    receive_whole,
)

# virtio 1.2, sections 5.1.3 and 6.
CSUM, HOST_TSO4, INDIRECT = 1 << 0, 1 << 11, 1 << 28
DESC_NEXT, DESC_INDIRECT = 1, 4
NEEDS_CSUM, GSO_TCPV4 = 1, 1

PIECES = 254
WAITERS, DESCRIPTORS = 100_000, 250
LARGE = 512 << 20
FAULT_AROUND = 64 << 10
"""A page fault maps this much."""
PAUSE_S = 0.0003


def frame(source: str, to: str, size: int, gso_size: int = 0) -> bytes:
    """A virtio-net header and a TCP segment of `size` bytes with partial checksum, to be cut if `gso_size` says so."""
    kind = GSO_TCPV4 if gso_size else 0
    header = HEADER.pack(NEEDS_CSUM, kind, 54 if gso_size else 0, gso_size, 34, 16, 0)
    addresses = bytes.fromhex((to + source).replace(":", "")) + b"\x08\x00"
    ends = socket.inet_aton("198.18.0.1") + socket.inet_aton("198.18.0.2")
    packet = struct.pack("!BBHHHBBH", 0x45, 0, size - 14, 0, 0x4000, 64, 6, 0) + ends
    segment = struct.pack("!HHIIBBHHH", 0x2000, 0x2001, 1, 1, 0x50, 0x10, 0xFFFF, 0, 0)
    return (header + addresses + packet + segment).ljust(len(header) + size, b"Z")


def send_whole(guest: Guest, content: bytes) -> None:
    """Every chain is one descriptor."""
    for slot in range(SLOTS):
        at = FRAMES + slot * SLOT
        guest.memory[at : at + len(content)] = content
        guest.describe(guest.base + 16 * slot, at, len(content), 0)
    guest.slots(list(range(SLOTS)))


def send_in_pieces(guest: Guest, content: bytes, places: Callable[[int, int], int], pieces: int) -> None:
    """Every chain is an indirect table: the headers, then single bytes at `places(slot, piece)`."""
    room = 16 * (pieces + 1)
    for slot in range(SLOTS):
        table, at = FRAMES + slot * SLOT, FRAMES + slot * SLOT + 0x2000
        guest.memory[at : at + len(content)] = content
        guest.describe(table, at, len(content), DESC_NEXT, 1)
        for piece in range(pieces):
            last = piece + 1 == pieces
            guest.describe(table + 16 * (piece + 1), places(slot, piece), 1, 0 if last else DESC_NEXT, piece + 2)
        guest.describe(guest.base + 16 * slot, table, room, DESC_INDIRECT)
    guest.slots(list(range(SLOTS)))


def receive_in_huge_pieces(guest: Guest) -> None:
    """All chains are one table, whose descriptors cover 4 GiB each, but the first: it ends the frame's first byte."""
    for piece in range(PIECES):
        last = piece + 1 == PIECES
        size = 13 if piece == 0 else (1 << 32) - 4096
        flags = DESC_WRITE | (0 if last else DESC_NEXT)
        guest.describe(TABLES + 16 * piece, LARGE_AT + 16 * piece, size, flags, piece + 1)
    for index in range(RING):
        guest.describe(guest.base + 16 * index, TABLES, 16 * PIECES, DESC_INDIRECT)
    guest.slots(list(range(RING)))


def crowd(event: int) -> list[object]:
    """Adds 10^5 waiters to an eventfd: epoll sets, each with many descriptors of it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    copies = [os.dup(event) for _ in range(DESCRIPTORS)]
    sets = [select.epoll() for _ in range(WAITERS // DESCRIPTORS)]
    for each in sets:
        for copy in copies:
            each.register(copy, select.EPOLLIN)
    return [copies, sets]


Step = Callable[[], None]
"""A step of an attack, after each burst."""


def run(step: Step | None, sender: Guest, receiver: Guest, paced: int = 0) -> None:
    """Sends and receives until SIGTERM, and until vnetd has taken a frame; a step after each burst.

    As fast as vnetd takes frames, or `paced` at a time. vnetd may take none at first: the attack before may have used
    up the interface's allowance.
    """
    over = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal over
        over = True

    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    begin, used = time.monotonic(), time.process_time()
    while not (over and sender.taken):
        sender.offer(paced or SLOTS)
        receiver.offer(RING)
        if step:
            step()
        time.sleep(PAUSE_S)
    print(sender.taken, time.monotonic() - begin, time.process_time() - used, flush=True)


def start(sender: Guest, receiver: Guest) -> None:
    receiver.connect()
    sender.connect()


def segments(sender: Guest, receiver: Guest, ends: tuple[str, str]) -> None:
    send_whole(sender, frame(*ends, 65_526, 48))
    start(sender, receiver)
    run(None, sender, receiver)


def waiters(sender: Guest, receiver: Guest, ends: tuple[str, str]) -> None:
    send_whole(sender, frame(*ends, 60))
    kicks = sender.kick, receiver.kick
    kept = [crowd(event) for event in (*kicks, sender.call, receiver.call)]
    start(sender, receiver)

    def wake() -> None:
        # Kicks without a pause: vnetd takes few frames meanwhile.
        for event in kicks:
            os.eventfd_write(event, 1)

    run(wake, sender, receiver, paced=8)
    del kept


def unmapping(sender: Guest, receiver: Guest, ends: tuple[str, str]) -> None:
    large = Region(LARGE_AT, LARGE)
    os.posix_fallocate(large.fd, 0, LARGE)
    sender.regions.append(large)
    stride = LARGE // SLOTS
    send_in_pieces(
        sender, frame(*ends, 60), lambda slot, piece: LARGE_AT + slot * stride + piece * FAULT_AROUND, stride >> 16
    )
    touched = 0

    def replace() -> None:
        nonlocal touched
        if sender.taken >= touched + 2 * SLOTS:
            sender.share()
            touched = sender.taken

    start(sender, receiver)
    run(replace, sender, receiver)


def truncation(sender: Guest, receiver: Guest, ends: tuple[str, str]) -> None:
    file = Region(LARGE_AT, SLOTS << 16)
    sender.regions.append(file)
    send_in_pieces(sender, frame(*ends, 60), lambda slot, piece: LARGE_AT + (slot << 16) + (piece << 12), 16)
    rounds = 0

    def truncate() -> None:
        nonlocal rounds
        rounds += 1
        if rounds % 4:
            return
        sender.offer(SLOTS)
        os.ftruncate(file.fd, 0)
        time.sleep(PAUSE_S)
        os.ftruncate(file.fd, file.size)
        sender.connect()

    start(sender, receiver)
    run(truncate, sender, receiver)


def chains(sender: Guest, receiver: Guest, ends: tuple[str, str]) -> None:
    content = frame(*ends, 60)
    send_in_pieces(sender, content, lambda slot, piece: FRAMES + slot * SLOT + 0x3000 + piece, PIECES)
    receiver.features |= INDIRECT | LOG_ALL
    receiver.regions.append(Region(LARGE_AT, 1 << 32))
    receive_in_huge_pieces(receiver)
    start(sender, receiver)
    run(None, sender, receiver)


def main() -> None:
    attack, to_sender, to_receiver, source, to = sys.argv[1:]
    sender = Guest(to_sender, 1, CSUM | HOST_TSO4 | INDIRECT)
    receiver = Guest(to_receiver, 0)
    receive_whole(receiver)
    attacks = (segments, waiters, unmapping, truncation, chains)
    named = {each.__name__: each for each in attacks}
    named[attack](sender, receiver, (source, to))


main()
