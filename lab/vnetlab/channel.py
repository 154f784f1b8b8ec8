"""Commands in a guest, over its serial ports.

Serial ports need no driver, address or network in the guest, so they work while those are tested. `guest/init` has the
guest's side and the protocol. A port executes one command at a time, guarded by a lock file; three ports allow three
commands in parallel.
"""

import base64
import contextlib
import fcntl
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

from vnetlab.run import LabError
from vnetlab.topology import Node

PORTS = 3
BEGIN_S = 2
"""A guest that does not begin a command within this time is still busy with an abandoned command."""
INTERRUPT = b"\x03"


def execute(guest: Node, command: Sequence[str], timeout_s: float, output: Callable[[bytes], object]) -> int:
    """Runs a command in a guest, passes its output on as it arrives, and returns its exit status.

    One argument is a complete shell command; several are its words. Raises LabError if the guest does not answer or the
    command exceeds the time limit; this and any other exception interrupts the command.
    """
    text = command[0] if len(command) == 1 else shlex.join(command)
    deadline = time.monotonic() + timeout_s
    with _port(guest, deadline) as connection:
        try:
            pending, token = _begin(guest, connection, text, deadline)
            return _pass_on(guest, connection, pending, token, text, deadline, output)
        except BaseException:
            with contextlib.suppress(OSError):
                connection.sendall(INTERRUPT)
            raise


def _begin(guest: Node, connection: socket.socket, text: str, deadline: float) -> tuple[bytes, str]:
    """Starts the command; returns the bytes after the BEGIN line, and the command's token."""
    encoded = base64.b64encode(text.encode()).decode()
    while True:
        token = secrets.token_hex(8)
        connection.sendall(f"RUN {token} {encoded}\n".encode())
        begun = f"BEGIN {token}\n".encode()
        received = b""
        patience = min(deadline, time.monotonic() + BEGIN_S)
        while begun not in received:
            try:
                received += _receive(guest, connection, patience)
            except TimeoutError:
                break
        else:
            return received.partition(begun)[2], token
        if time.monotonic() > deadline:
            raise LabError(f"{guest.name} accepts no commands", guest.file(".log"))
        connection.sendall(INTERRUPT)
        time.sleep(0.2)


def _pass_on(
    guest: Node,
    connection: socket.socket,
    pending: bytes,
    token: str,
    text: str,
    deadline: float,
    output: Callable[[bytes], object],
) -> int:
    """Passes the command's output on until it ends; returns its exit status."""
    end = f"\nEND {token} ".encode()
    while True:
        before, found, after = pending.partition(end)
        if found and after.endswith(b"\n"):
            output(before)
            return int(after)
        if not found:
            # The last bytes may be the start of the END line.
            ready = max(0, len(pending) - len(end))
            output(pending[:ready])
            pending = pending[ready:]
        try:
            pending += _receive(guest, connection, deadline)
        except TimeoutError as error:
            raise LabError(f"'{text}' on {guest.name} did not end in time") from error


def _receive(guest: Node, connection: socket.socket, deadline: float) -> bytes:
    """The next bytes from the guest; raises TimeoutError at `deadline`."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    received = connection.recv(65536)
    if not received:
        raise LabError(f"{guest.name} has exited", guest.file(".log"))
    return received


@contextlib.contextmanager
def _port(guest: Node, deadline: float) -> Iterator[socket.socket]:
    """Connects to a free port."""
    with contextlib.ExitStack() as stack:
        number = _lock(guest, deadline, stack)
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            connection.connect(str(guest.file(f".serial{number}")))
        except OSError as error:
            raise LabError(f"{guest.name} is not running: {error.strerror}", guest.file(".log")) from error
        yield connection


def _lock(guest: Node, deadline: float, stack: contextlib.ExitStack) -> int:
    """Locks the first free port until `stack` closes; returns its number."""
    try:
        files: list[BinaryIO] = [
            stack.enter_context(guest.file(f".serial{number}.lock").open("wb")) for number in range(1, PORTS + 1)
        ]
    except FileNotFoundError as error:
        raise LabError(f"lab {guest.lab} is not up") from error
    while time.monotonic() < deadline:
        for number, file in enumerate(files, 1):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return number
        time.sleep(0.02)
    raise LabError(f"{guest.name} is busy with {PORTS} other commands")
