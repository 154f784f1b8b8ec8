"""Virtual machines that serve a file of random bytes by HTTP."""

from vnetlab import guest, lab, machine
from vnetlab.image import ensure_image
from vnetlab.topology import Node, Topology


def start_file_guests(topology: Topology, port: int, size: int) -> list[Node]:
    """Boots all virtual machines of a lab; each serves `/sent` of `size` bytes at `port`."""
    image = ensure_image(lab.CACHE)
    guests = topology.machines()
    for each in guests:
        guest.start(topology, each, image)
    for each in guests:
        guest.wait(each)
        machine.execute(each, f"mkdir -p /files && head -c {size} /dev/urandom >/files/sent")
        machine.execute(each, f"busybox httpd -p {port} -h /files")
    return guests
