"""A foreign host: answers ARP and ping for one address, in VNET/P's encapsulation.

Usage: classic_peer.py ADDRESS. Each datagram on UDP port 9000 is one Ethernet frame.
"""

import socket
import struct
import sys

from inet import checksum

MAC = bytes.fromhex("020000000099")
ADDRESS = socket.inet_aton(sys.argv[1])


bridge = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
bridge.bind(("", 9000))
while True:
    frame, host = bridge.recvfrom(65535)
    source, kind, packet = frame[6:12], frame[12:14], frame[14:]
    if kind == b"\x08\x06" and packet[6:8] == b"\0\1" and packet[24:28] == ADDRESS:
        reply = packet[:6] + b"\0\2" + MAC + ADDRESS + packet[8:18]
        bridge.sendto(source + MAC + kind + reply, host)
    elif kind == b"\x08\x00" and packet[16:20] == ADDRESS and packet[20:21] == b"\x08":
        echo = b"\0\0\0\0" + packet[24 : int.from_bytes(packet[2:4])]
        echo = echo[:2] + struct.pack("!H", checksum(echo)) + echo[4:]
        bridge.sendto(source + MAC + kind + packet[:12] + ADDRESS + packet[12:16] + echo, host)
