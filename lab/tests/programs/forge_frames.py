"""Sends forged VXLAN datagrams, each with one UDP datagram in an Ethernet frame, as an intruder on the underlay could.

Usage: forge_frames.py SOURCE HOST VNI SOURCE_MAC DESTINATION_MAC INNER_SOURCE INNER_DESTINATION COUNT
"""

import socket
import struct
import sys

from inet import checksum

WIRE_PORT = 9789
PORT = 7009
VALID = 0x08000000
"""VXLAN flag: the VNI is valid."""


def frame(source_mac: str, destination_mac: str, source: str, destination: str) -> bytes:
    content = b"forged"
    udp = struct.pack("!HHHH", PORT, PORT, 8 + len(content), 0) + content
    addresses = socket.inet_aton(source) + socket.inet_aton(destination)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, socket.IPPROTO_UDP, 0) + addresses
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    macs = bytes.fromhex((destination_mac + source_mac).replace(":", ""))
    return macs + b"\x08\x00" + ip + udp


source, host, vni, *inner, count = sys.argv[1:]
with socket.socket(type=socket.SOCK_DGRAM) as own:
    own.bind((source, 0))
    for _ in range(int(count)):
        own.sendto(struct.pack("!II", VALID, int(vni) << 8) + frame(*inner), (host, WIRE_PORT))
