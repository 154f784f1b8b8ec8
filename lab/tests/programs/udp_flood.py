"""Sends small UDP datagrams to a closed port as fast as it can, for two seconds: udp_flood.py ADDRESS."""

import socket
import sys
import time

PORT = 9
SECONDS = 2
BATCH = 256

own = socket.socket(type=socket.SOCK_DGRAM)
# Unconnected: ICMP errors would make send fail on a connected socket.
send, destination, datagram = own.sendto, (sys.argv[1], PORT), bytes(64)
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    for _ in range(BATCH):
        send(datagram, destination)
