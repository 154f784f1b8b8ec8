"""A process at its host's meeting point (docs/interconnect.md), without the interconnect's library.

It prints its name. Each line on standard input is a command: `join NAME` asks for a ring with the process of that name
and prints `ring` or `absent`; `end` waits until the latest ring has ended, and prints `ended`.
"""

import array
import secrets
import socket
import sys
import time

NAMED, JOIN, RING, ABSENT = 1, 2, 3, 4
TOKEN = 16
WAIT_S = 60


def connect() -> socket.socket:
    """Waits for the daemon to listen."""
    end = time.monotonic() + WAIT_S
    while True:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            own.connect(b"\0vnet-rdma")
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            own.close()
            time.sleep(0.05)
        else:
            return own


def join(own: socket.socket, name: str) -> tuple[str, socket.socket | None]:
    """Asks for a ring; returns its bell."""
    own.send(bytes([JOIN]) + bytes.fromhex(name) + secrets.token_bytes(TOKEN))
    message, control, _, _ = own.recvmsg(64, socket.CMSG_SPACE(8))
    if message[0] == ABSENT:
        return "absent", None
    assert message[0] == RING, message
    passed = array.array("i", b"".join(data for _, _, data in control))
    _, bell = (socket.socket(fileno=number) if place else number for place, number in enumerate(passed))
    return "ring", bell


def main() -> None:
    """Runs commands until standard input ends."""
    own = connect()
    own.settimeout(WAIT_S)
    named = own.recv(64)
    assert named[0] == NAMED, named
    print(named[1:].hex(), flush=True)
    bell = None
    for line in sys.stdin:
        words = line.split()
        if words[0] == "join":
            answer, bell = join(own, words[1])
        else:
            assert bell is not None
            bell.settimeout(WAIT_S)
            answer = "ended" if bell.recv(1) == b"" else "rung"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
