"""A vnetd that begins a take-over and does not end it: half_heir.py SOCKET STEP HOW.

STEP is the last message that it exchanges: connect, hello, estate, prepared, last or begins. Then it dies, hangs, sends
nonsense or refuses, as HOW says.
"""

import array
import json
import os
import signal
import socket
import sys
import time


def say(connection: socket.socket, message: dict) -> None:
    text = json.dumps(message).encode()
    connection.sendall(len(text).to_bytes(4, "little") + text)


def hear(connection: socket.socket) -> tuple[dict, list[int]]:
    """A message, with its descriptors."""
    head, control, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(128 * 4))
    passed = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            passed.frombytes(data)
    return json.loads(receive(connection, int.from_bytes(head, "little"))), list(passed)


def receive(connection: socket.socket, length: int) -> bytes:
    """That many bytes."""
    found = b""
    while len(found) < length:
        found += connection.recv(length - len(found))
    return found


def go(connection: socket.socket, last: str) -> None:
    """Exchanges messages up to `last`."""
    if last == "connect":
        return
    say(connection, {"message": "hello", "version": 2, "release": "half"})
    if last == "hello":
        return
    estate, _ = hear(connection)
    if estate["message"] != "estate":
        sys.exit(f"refused: {estate}")
    descriptors: list[int] = []
    while len(descriptors) < estate["descriptors"]:
        message, passed = hear(connection)
        assert message["message"] == "descriptors"
        assert len(message["names"]) == len(passed)
        descriptors += passed
    if last == "estate":
        return
    say(connection, {"message": "prepared"})
    if last == "prepared":
        return
    message, _ = hear(connection)
    assert message["message"] == "last", message
    for _ in range(message["sealed"] + message["pairs"]):
        left = int.from_bytes(receive(connection, 4), "little")
        receive(connection, left)
    if last == "last":
        return
    say(connection, {"message": "begins"})


def main() -> None:
    path, last, how = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        go(connection, last)
        print("half", flush=True)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "refuses":
            say(connection, {"message": "refused", "why": "only half a vnetd"})
        elif how == "nonsense":
            connection.sendall(b"\xff" * 100)
        time.sleep(60)


main()
