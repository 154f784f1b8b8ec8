"""A guest's console in the user's terminal."""

import os
import select
import socket
import sys
import termios
import tty

from vnetlab.run import LabError
from vnetlab.topology import Node

LEAVE = b"\x1d"
"""^], as in telnet."""


def attach(guest: Node) -> None:
    """Connects the terminal to the guest's console until the user types ^] or either side closes the connection."""
    with socket.socket(socket.AF_UNIX) as console:
        try:
            console.connect(str(guest.file(".console")))
        except OSError as error:
            raise LabError(f"{guest.name} is not running: {error.strerror}", guest.file(".log")) from error
        terminal = sys.stdin.fileno()
        print(f"console of {guest.name}; ^] leaves", file=sys.stderr)
        before = termios.tcgetattr(terminal) if os.isatty(terminal) else None
        try:
            if before:
                tty.setraw(terminal)
            console.sendall(b"\r")
            _join(terminal, console)
        finally:
            if before:
                termios.tcsetattr(terminal, termios.TCSADRAIN, before)
                print()


def _join(terminal: int, console: socket.socket) -> None:
    while True:
        ready, _, _ = select.select([terminal, console], [], [])
        if console in ready:
            output = console.recv(4096)
            if not output:
                return
            os.write(sys.stdout.fileno(), output)
        if terminal in ready:
            typed = os.read(terminal, 4096)
            if not typed or LEAVE in typed:
                return
            console.sendall(typed)
