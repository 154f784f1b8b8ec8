"""A vhost-user front end with a guest behind it, as small as it can be: one queue, in memory that it shares."""

import array
import contextlib
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator

# vhost-user, "Front-end message types".
GET_FEATURES, SET_FEATURES, SET_OWNER, SET_MEM_TABLE, SET_LOG_BASE = 1, 2, 3, 5, 6
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE, SET_VRING_KICK, SET_VRING_CALL = 8, 9, 10, 12, 13
GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, SET_VRING_ENABLE = 15, 16, 18
VERSION, NEED_REPLY = 1, 8
LOG_SHMFD, REPLY_ACK = 1 << 1, 1 << 3
# virtio 1.2, sections 5.1.3 and 6.
LOG_ALL, VERSION_1, PROTOCOL_FEATURES = 1 << 26, 1 << 32, 1 << 30
DESC_WRITE = 2
NO_NOTIFY = 1
DESCRIPTOR = struct.Struct("<QIHH")
HEADER = struct.Struct("<BBHHHHH")

RING = 1024
RING_SPACE, AVAIL, USED = 0x10000, 0x4000, 0x8000
TABLES, FRAMES = 2 * RING_SPACE, 4 * RING_SPACE
SLOT = 0x11000
SLOTS = 64
"""Chains in flight: a full turn of a dispatcher."""
ROOM = 2048
"""Bytes of a receive buffer."""
MEMORY = FRAMES + max(SLOTS * SLOT, RING * ROOM)
LARGE_AT = 1 << 32
"""Guest address of a second region."""
PATIENCE_S = 30


class Region:
    """Memory that the front end shares."""

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.fd = os.memfd_create("guest")
        os.ftruncate(self.fd, size)

    def entry(self) -> bytes:
        """As the memory table lists it; its address in the front end is that in the guest."""
        return struct.pack("<QQQQ", self.address, self.size, self.address, 0)


class Guest:
    """A front end with one pair of queues, of which it uses one."""

    def __init__(self, path: str, queue: int, features: int = 0) -> None:
        self.path, self.queue = path, queue
        self.features = features | VERSION_1 | PROTOCOL_FEATURES
        own = Region(0, MEMORY)
        self.regions = [own]
        self.memory = mmap.mmap(own.fd, MEMORY)
        self.base = queue * RING_SPACE
        self.kick, self.call = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        self.taken = 0
        self.seen = 0
        self.stream: socket.socket | None = None

    def message(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = (), answers: bool = False) -> bytes:
        """Sends a message and waits until it is answered: with a payload, or with whether it was accepted."""
        flags = VERSION | (0 if answers else NEED_REPLY)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.stream.sendmsg([struct.pack("<III", request, flags, len(payload)) + payload], ancillary)
        size = struct.unpack("<III", self.stream.recv(12, socket.MSG_WAITALL))[2]
        answer = self.stream.recv(size, socket.MSG_WAITALL) if size else b""
        if not answers and answer != bytes(8):
            sys.exit(f"vnetd refused request {request}")
        return answer

    def share(self) -> None:
        """Sends the memory table."""
        table = struct.pack("<II", len(self.regions), 0) + b"".join(region.entry() for region in self.regions)
        self.message(SET_MEM_TABLE, table, tuple(region.fd for region in self.regions))

    def connect(self) -> None:
        """Connects and starts the ring at its beginning."""
        if self.stream:
            self.stream.close()
        for at in (AVAIL, USED):
            self.memory[self.base + at : self.base + at + 4] = bytes(4)
        self.seen = 0
        self.stream = connected(self.path)
        self.stream.sendall(struct.pack("<III", SET_OWNER, VERSION, 0))
        self.message(GET_FEATURES, answers=True)
        self.message(GET_PROTOCOL_FEATURES, answers=True)
        words = struct.pack("<IIIQ", SET_PROTOCOL_FEATURES, VERSION, 8, REPLY_ACK | LOG_SHMFD)
        self.stream.sendall(words)
        self.message(SET_FEATURES, struct.pack("<Q", self.features))
        self.share()
        if self.features & LOG_ALL:
            size = 2 * (LARGE_AT >> 12) // 8
            self.message(SET_LOG_BASE, struct.pack("<QQ", size, 0), (Region(0, size).fd,), answers=True)
        self.message(SET_VRING_NUM, struct.pack("<II", self.queue, RING))
        self.message(SET_VRING_BASE, struct.pack("<II", self.queue, 0))
        rings = self.base, self.base + USED, self.base + AVAIL, 0
        self.message(SET_VRING_ADDR, struct.pack("<IIQQQQ", self.queue, 0, *rings))
        for request, fd in ((SET_VRING_KICK, self.kick), (SET_VRING_CALL, self.call)):
            self.message(request, struct.pack("<Q", self.queue), (fd,))
        self.message(SET_VRING_ENABLE, struct.pack("<II", self.queue, 1))

    def describe(self, at: int, address: int, size: int, flags: int, after: int = 0) -> None:
        """Writes a descriptor at an offset of the guest's memory."""
        DESCRIPTOR.pack_into(self.memory, at, address, size, flags, after)

    def slots(self, heads: list[int]) -> None:
        """Writes the available ring: these chains in turn."""
        ring = [heads[index % len(heads)] for index in range(RING)]
        struct.pack_into(f"<{RING}H", self.memory, self.base + AVAIL + 4, *ring)

    def offer(self, count: int) -> int:
        """Makes chains available until `count` are; returns how many the device has used since the last call."""
        done = len(list(self.used()))
        self.show(self.seen + count)
        if not self.memory[self.base + USED] & NO_NOTIFY:
            self.notify()
        return done

    def used(self) -> Iterator[tuple[int, int]]:
        """Heads and lengths of the chains that the device has used since the last call."""
        (used,) = struct.unpack_from("<H", self.memory, self.base + USED + 2)
        for index in range(self.seen, self.seen + ((used - self.seen) & 0xFFFF)):
            yield struct.unpack_from("<II", self.memory, self.base + USED + 4 + 8 * (index % RING))
            self.taken += 1
        self.seen = used

    def show(self, available: int) -> None:
        """Writes the available index."""
        at, now = self.base + AVAIL + 2, struct.pack("<H", available & 0xFFFF)
        if self.memory[at : at + 2] != now:
            self.memory[at : at + 2] = now

    def notify(self) -> None:
        """Kicks the device."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.kick, 1)


def connected(path: str) -> socket.socket:
    """A connection to an interface's socket, which vnetd may not listen at yet."""
    end = time.monotonic() + PATIENCE_S
    while True:
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(PATIENCE_S)
        try:
            stream.connect(path)
        except OSError:
            stream.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return stream


def receive_whole(guest: Guest) -> None:
    """Every chain is a buffer of ROOM bytes."""
    for index in range(RING):
        guest.describe(guest.base + 16 * index, FRAMES + ROOM * index, ROOM, DESC_WRITE)
    guest.slots(list(range(RING)))
