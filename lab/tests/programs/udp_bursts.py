"""Bursts of datagrams: `udp_bursts.py receive`, then `udp_bursts.py send ADDRESS`. Or datagrams without a pause.

Before each burst the sender sends a question until the receiver answers: then the receiver listens, and has read the
previous burst. The receiver prints how many datagrams arrived, out of how many.

`udp_bursts.py flood ADDRESS` sends as fast as it can until it is killed; `udp_bursts.py await COUNT` ends when so many
have arrived.
"""

import socket
import sys
import time

PORT = 9999
BURSTS = 4
DATAGRAMS = 64
BYTES = 64_000
ANSWER_S = 1
"""Seconds to wait for an answer before the question is repeated."""
SO_RCVBUFFORCE = 33
ROOM = 64 << 20
"""Receive buffer for a whole burst: the test counts losses on the path, not in the receiver."""


def receive() -> None:
    """Counts complete datagrams; answers the questions between bursts."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
        port.bind(("", PORT))
        port.settimeout(50)
        found = 0
        while True:
            datagram, sender = port.recvfrom(1 << 16)
            if len(datagram) == BYTES:
                found += 1
            else:
                port.sendto(datagram, sender)
                if datagram == b"end":
                    break
    print(found, "of", BURSTS * DATAGRAMS)


def ask(port: socket.socket, question: bytes) -> None:
    """Waits until the receiver has read everything sent before the question."""
    while True:
        port.send(question)
        try:
            while port.recv(16) != question:
                pass
            return
        except (TimeoutError, ConnectionRefusedError):
            time.sleep(0.05)


def send(address: str) -> None:
    """Sends all bursts, each after the receiver has read the previous one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.connect((address, PORT))
        port.settimeout(ANSWER_S)
        for burst in range(BURSTS):
            ask(port, str(burst).encode())
            for _ in range(DATAGRAMS):
                port.send(bytes(BYTES))
        ask(port, b"end")


def flood(address: str) -> None:
    """Sends datagrams as fast as the kernel takes them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        while True:
            port.sendto(bytes(BYTES), (address, PORT))


def wait(count: int) -> None:
    """Receives until `count` datagrams have arrived."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind(("", PORT))
        port.settimeout(50)
        for _ in range(count):
            port.recv(1 << 16)


match sys.argv[1:]:
    case ["receive"]:
        receive()
    case ["send", address]:
        send(address)
    case ["flood", address]:
        flood(address)
    case ["await", count]:
        wait(int(count))
