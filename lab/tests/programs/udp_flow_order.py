"""Numbered UDP datagrams of many flows: flows.py take FLOWS, flows.py send FLOWS ADDRESS.

The sender prints how many it sent. The receiver ends when every flow has ended, and prints how many came and how many
of them behind a later one of their flow. It answers the first of each flow and some of the others.
"""

import contextlib
import socket
import struct
import sys
import time

PORT = 7007
SECONDS = 2
SIZES = (20, 100, 1400, 64, 1472)
BURST = 4
"""Datagrams of a flow in a row; between bursts there is a pause: this is about order, not speed."""
PAUSE_S = 0.003
END = 2**32 - 1
END_REPEATS = 5
SO_RCVBUFFORCE = 33
"""socket(7); Python has no name for it."""
HELLO = b"hello"
NUMBER = struct.Struct("!I")


def send(flows: int, address: str) -> None:
    sockets = []
    for _ in range(flows):
        own = socket.socket(type=socket.SOCK_DGRAM)
        own.connect((address, PORT))
        greet(own)
        sockets.append(own)
    number, end = 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        for own in sockets:
            for count in range(number, number + BURST):
                own.send(NUMBER.pack(count).ljust(SIZES[count % len(SIZES)]))
        number += BURST
        time.sleep(PAUSE_S)
    for _ in range(END_REPEATS):
        time.sleep(0.05)
        for own in sockets:
            # The receiver may have ended already.
            with contextlib.suppress(ConnectionRefusedError):
                own.send(NUMBER.pack(END))
    print(number * flows)


def greet(own: socket.socket) -> None:
    """Waits for the receiver. Its answer has the flow served where it will be from then on."""
    own.settimeout(0.1)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError, ConnectionRefusedError):
            own.send(HELLO)
            own.recv(100)
            own.settimeout(None)
            return
        time.sleep(0.05)
    sys.exit("nobody answers")


def take(flows: int) -> None:
    own = socket.socket(type=socket.SOCK_DGRAM)
    own.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
    own.bind(("", PORT))
    own.settimeout(20)
    last: dict[object, int] = {}
    ended: set[object] = set()
    taken = late = 0
    while len(ended) < flows:
        datagram, source = own.recvfrom(2000)
        if datagram == HELLO:
            own.sendto(HELLO, source)
            continue
        (number,) = NUMBER.unpack_from(datagram)
        if number == END:
            ended.add(source)
            continue
        taken += 1
        late += number <= last.get(source, -1)
        last[source] = max(number, last.get(source, -1))
        if number % 64 == 0:
            own.sendto(b"answer", source)
    print(taken, late)


if sys.argv[1] == "take":
    take(int(sys.argv[2]))
else:
    send(int(sys.argv[2]), sys.argv[3])
