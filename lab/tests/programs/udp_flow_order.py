"""Numbered UDP datagrams of many flows, to find reordering within a flow.

Usage: udp_flow_order.py take FLOWS | udp_flow_order.py send FLOWS ADDRESS [on]

The sender ends after two seconds or, with `on`, when its standard input ends. It prints the number of datagrams sent.
The receiver ends when every flow has ended; it prints how many datagrams arrived, how many of them arrived after a
later one of the same flow, and the number of swaps: how often a flow was in disorder, for the flow with the most. It
fails if a datagram arrives twice. It answers the first datagram of each flow and some of the others.
"""

import contextlib
import select
import socket
import sys
import time

from inet import END, NUMBER, end, receiver

PORT = 7007
SECONDS = 2
SIZES = (20, 100, 1400, 64, 1472)
BURST = 4
"""Consecutive datagrams of one flow; pauses separate bursts, because this tests order, not speed."""
PAUSE_S = 0.003
HELLO = b"hello"


def send(flows: int, address: str, *, goes_on: bool) -> None:
    sockets = []
    for _ in range(flows):
        own = socket.socket(type=socket.SOCK_DGRAM)
        own.connect((address, PORT))
        greet(own)
        sockets.append(own)
    number, stop = 0, time.monotonic() + SECONDS
    while goes_on or time.monotonic() < stop:
        for own in sockets:
            for count in range(number, number + BURST):
                own.send(NUMBER.pack(count).ljust(SIZES[count % len(SIZES)]))
        number += BURST
        # Its end is readable.
        if select.select([sys.stdin] if goes_on else [], [], [], PAUSE_S)[0]:
            break
    end(sockets, repeats=5, interval_s=0.05)
    print(number * flows)


def greet(own: socket.socket) -> None:
    """Waits for the receiver. Its answer determines which dispatcher serves the flow."""
    own.settimeout(0.1)
    stop = time.monotonic() + 10
    while time.monotonic() < stop:
        with contextlib.suppress(TimeoutError, ConnectionRefusedError):
            own.send(HELLO)
            own.recv(100)
            own.settimeout(None)
            return
        time.sleep(0.05)
    sys.exit("the receiver does not answer")


def take(flows: int) -> None:
    own = receiver(PORT)
    own.settimeout(20)
    last: dict[object, int] = {}
    missing: dict[object, set[int]] = {}
    swaps: dict[object, int] = {}
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
        newest, overtaken = last.get(source, -1), missing.setdefault(source, set())
        if number <= newest:
            late += 1
            if number not in overtaken:
                sys.exit(f"datagram {number} has arrived twice")
            overtaken.remove(number)
        elif number > newest + 1:
            # One swap lasts until all that were overtaken have arrived.
            swaps[source] = swaps.get(source, 0) + (not overtaken)
            overtaken.update(range(newest + 1, number))
        last[source] = max(number, newest)
        if number % 64 == 0:
            own.sendto(b"answer", source)
    print(taken, late, max(swaps.values(), default=0))


if sys.argv[1] == "take":
    take(int(sys.argv[2]))
else:
    send(int(sys.argv[2]), sys.argv[3], goes_on=sys.argv[4:] == ["on"])
