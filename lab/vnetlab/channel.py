"""Commands in a guest, over its serial ports.

Serial ports need no driver, no address and no network in the guest, so they work while any of that is being tested.
The guest's side, and the lines that go to and fro, are in `guest/init`. A port serves one command at a time; a lock
file for each keeps users apart, and three ports let three commands run side by side.
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
"""A guest that does not begin a command after this long is still busy with one whose user went away."""
INTERRUPT = b"\x03"


def execute(guest: Node, command: Sequence[str], timeout_s: float, output: Callable[[bytes], object]) -> int:
    """Runs a command in a guest, hands its output over as it comes, and gives its exit status.

    One argument is a shell command as it is; several are words of one. Raises LabError when the guest does not answer
    or the command does not end in time; it is interrupted then, as it is on any other exception.
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
    """Has the guest begin the command; gives what came after the line that says so, and the command's token."""
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
            raise LabError(f"{guest.name} takes no commands", guest.file(".log"))
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
    """Hands the command's output over until it ends; gives its exit status."""
    end = f"\nEND {token} ".encode()
    while True:
        before, found, after = pending.partition(end)
        if found and after.endswith(b"\n"):
            output(before)
            return int(after)
        if not found:
            # The last bytes may be the beginning of the line that ends the output.
            ready = max(0, len(pending) - len(end))
            output(pending[:ready])
            pending = pending[ready:]
        try:
            pending += _receive(guest, connection, deadline)
        except TimeoutError as error:
            raise LabError(f"'{text}' on {guest.name} did not end in time") from error


def _receive(guest: Node, connection: socket.socket, deadline: float) -> bytes:
    """Gives the next bytes from the guest; raises TimeoutError at `deadline`."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    received = connection.recv(65536)
    if not received:
        raise LabError(f"{guest.name} has ended", guest.file(".log"))
    return received


@contextlib.contextmanager
def _port(guest: Node, deadline: float) -> Iterator[socket.socket]:
    """Takes a port that nobody else uses."""
    with contextlib.ExitStack() as stack:
        number = _lock(guest, deadline, stack)
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            connection.connect(str(guest.file(f".serial{number}")))
        except OSError as error:
            raise LabError(f"{guest.name} is not running: {error.strerror}", guest.file(".log")) from error
        yield connection


def _lock(guest: Node, deadline: float, stack: contextlib.ExitStack) -> int:
    """Locks the first free port, for as long as `stack` lasts, and gives its number."""
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
