"""Sends small UDP datagrams as fast as it can, for two seconds: flood.py ADDRESS. Nobody listens at the port."""

import socket
import sys
import time

PORT = 9
SECONDS = 2
BATCH = 256

own = socket.socket(type=socket.SOCK_DGRAM)
# Not connected: the answers that nobody listens are none of its business.
send, destination, datagram = own.sendto, (sys.argv[1], PORT), bytes(64)
end = time.monotonic() + SECONDS
while time.monotonic() < end:
    for _ in range(BATCH):
        send(datagram, destination)
