"""Which of two kinds of datagrams pass first: many of low priority, then a few of high priority.

Usage: in_turn.py take COUNT | in_turn.py send ADDRESS LOW HIGH LOW_COUNT HIGH_COUNT

LOW and HIGH are values of the IP header's type of service. `take` prints the kinds of COUNT datagrams in the order of
their arrival, as one word of the letters l and h.
"""

import socket
import sys

PORT = 7010
PATIENCE_S = 120
SIZE = 1000

_, command, *words = sys.argv
with socket.socket(type=socket.SOCK_DGRAM) as own:
    if command == "take":
        own.settimeout(PATIENCE_S)
        own.bind(("", PORT))
        print("ready", flush=True)
        print("".join(own.recv(SIZE)[:1].decode() for _ in range(int(words[0]))))
    else:
        address, low, high, low_count, high_count = words[0], *map(int, words[1:])
        # The queue's frames count as the socket's until they have left it.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        for kind, tos, count in ((b"l", low, low_count), (b"h", high, high_count)):
            own.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
            for _ in range(count):
                own.sendto(kind.ljust(SIZE), (address, PORT))
