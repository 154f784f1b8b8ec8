"""Sends frames from invented MAC addresses, each a new flow, as fast as it can: invent_flows.py DEVICE TO_MAC COUNT."""

import socket
import struct
import sys

EXPERIMENTAL = struct.pack(">H", 0x88B5)
"""EtherType for local experiments (IEEE 802)."""

device, mac, count = sys.argv[1:]
destination = bytes.fromhex(mac.replace(":", ""))
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as port:
    port.bind((device, 0))
    for number in range(int(count)):
        port.send(destination + struct.pack(">HI", 0x0200, number) + EXPERIMENTAL + bytes(46))
