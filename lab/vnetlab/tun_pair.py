"""A pair of tun devices: what one host sends, the other receives. Usage: tun_pair.py DEVICE DEVICE.

Like an InfiniBand port under IPoIB, the devices have no Ethernet headers and take super-packets (`IFF_VNET_HDR`), which
pass with their offload metadata, so that the copy by this program does not decide the figures.
"""

import fcntl
import os
import selectors
import struct
import sys

IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 0x01, 0x02, 0x04
PACKET_BYTES_MAX = 10 + 65_535
"""A virtio-net header and the largest IP packet."""
BURST = 64


def device(name: str) -> int:
    """Creates a tun device; returns its descriptor."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return file


def forward(source: int, destination: int) -> None:
    """Passes waiting packets on."""
    for _ in range(BURST):
        try:
            packet = os.read(source, PACKET_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            return  # The device is down.
        try:
            os.write(destination, packet)
        except OSError:
            continue  # The other device is down: the packet is lost, as on a wire.


def main() -> None:
    """Forwards until it is stopped."""
    one, other = (device(name) for name in sys.argv[1:])
    with selectors.DefaultSelector() as ready:
        for source, destination in ((one, other), (other, one)):
            ready.register(source, selectors.EVENT_READ, destination)
        while True:
            for key, _ in ready.select():
                forward(key.fd, key.data)


if __name__ == "__main__":
    main()
