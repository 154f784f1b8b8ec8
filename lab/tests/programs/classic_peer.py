"""A foreign host that uses VNET/P's encapsulation: each datagram is one Ethernet frame.

Usage: classic_peer.py OWN ADDRESS MAC             answers ARP and ping for ADDRESS
       classic_peer.py OWN ADDRESS MAC HOST TO     pings TO, a MAC and an address as in MAC,ADDRESS, by way of HOST

Like VNET/P, it receives at UDP port 9000 of its address OWN, and sends from a connected socket at another port.
"""

import socket
import struct
import sys

from inet import checksum

SENDING_PORT = 40_000
PINGS = 20
own, address, mac = sys.argv[1], socket.inet_aton(sys.argv[2]), bytes.fromhex(sys.argv[3].replace(":", ""))
bridge = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
bridge.bind((own, 9000))
links: dict[str, socket.socket] = {}


def send(frame: bytes, host: str) -> None:
    """Sends a frame to a host, each from a new connected socket."""
    if host not in links:
        links[host] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        links[host].bind((own, SENDING_PORT + len(links)))
        links[host].connect((host, 9000))
    links[host].send(frame)


def answer() -> None:
    """Answers ARP requests and pings."""
    while True:
        frame, (host, _) = bridge.recvfrom(65535)
        source, kind, packet = frame[6:12], frame[12:14], frame[14:]
        if kind == b"\x08\x06" and packet[6:8] == b"\0\1" and packet[24:28] == address:
            send(source + mac + kind + packet[:6] + b"\0\2" + mac + address + packet[8:18], host)
        elif kind == b"\x08\x00" and packet[16:20] == address and packet[20:21] == b"\x08":
            echo = b"\0\0\0\0" + packet[24 : int.from_bytes(packet[2:4])]
            echo = echo[:2] + struct.pack("!H", checksum(echo)) + echo[4:]
            send(source + mac + kind + packet[:12] + address + packet[12:16] + echo, host)


def ping(host: str, to: str) -> int:
    """Pings, and prints how many replies came to this host's MAC."""
    to_mac, to_address = to.split(",")
    bridge.settimeout(5)
    replies = 0
    for number in range(PINGS):
        echo = struct.pack("!BBHHH", 8, 0, 0, 1, number)
        echo = echo[:2] + struct.pack("!H", checksum(echo)) + echo[4:]
        packet = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(echo), number, 0, 64, 1, 0)
        packet += address + socket.inet_aton(to_address)
        packet = packet[:10] + struct.pack("!H", checksum(packet)) + packet[12:] + echo
        send(bytes.fromhex(to_mac.replace(":", "")) + mac + b"\x08\x00" + packet, host)
        try:
            while bridge.recv(65535)[:6] != mac:
                pass
        except TimeoutError:
            break
        replies += 1
    return replies


if len(sys.argv) > 4:
    print(ping(*sys.argv[4:]))
else:
    answer()
