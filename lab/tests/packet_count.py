"""Counts the packets at a device that match an expression of tcpdump: all of them, and without delay.

The kernel counts each packet that passes the socket's filter before it leaves the device, also if the socket is full.
"""

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from vnetlab.run import run

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
ETH_P_ALL = 3
SO_ATTACH_FILTER = 26
SOL_PACKET, PACKET_STATISTICS = 263, 6
"""packet(7)."""


def in_namespace(namespace: str, work: Callable[[], T]) -> T:
    """The result of `work` in a network namespace. Sockets and files that it opens stay there."""
    results: list[T] = []
    errors: list[Exception] = []

    def enter() -> None:
        try:
            with Path(f"/run/netns/{namespace}").open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)
            results.append(work())
        except Exception as error:
            errors.append(error)

    # setns(2) moves only the calling thread, so a thread of its own enters the namespace and ends there.
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class Packets:
    """A count of packets at a device since the last look."""

    def __init__(self, namespace: str, device: str, expression: str) -> None:
        lines = run(["tcpdump", "-ddd", "-y", "EN10MB", expression]).splitlines()[1:]
        code = b"".join(struct.pack("=HBBI", *map(int, line.split())) for line in lines)
        # struct sock_fprog: the kernel copies the instructions.
        instructions = ctypes.create_string_buffer(code)
        program = struct.pack("@HP", len(lines), ctypes.addressof(instructions))

        def opened() -> socket.socket:
            # Without a protocol it receives nothing before it is bound.
            own = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            own.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            own.bind((device, ETH_P_ALL))
            return own

        self.socket = in_namespace(namespace, opened)

    def new(self) -> int:
        """The number of packets since the last call."""
        return struct.unpack("=II", self.socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
