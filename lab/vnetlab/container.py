"""Containers: a network namespace each, with a TAP device that its host's vnetd makes in it."""

import json

from vnetlab import underlay
from vnetlab.run import run, wait_until
from vnetlab.topology import Node

DEVICE_S = 10


def create(container: Node) -> None:
    """Makes a container's namespace, for vnetd to put a device in."""
    underlay.add_namespace(container.namespace)


def configure(container: Node) -> None:
    """Waits for a container's device, which has its Ethernet address and MTU from vnetd, and gives it its address."""
    inside = ["ip", "-n", container.namespace]

    def device() -> bool:
        # What is not up is listed as an empty object.
        links = json.loads(run([*inside, "-json", "link", "show", "up"]))
        return any(link.get("ifname") == "eth0" for link in links)

    wait_until(f"vnetd to make the device of {container.name}", device, DEVICE_S)
    run([*inside, "address", "replace", f"{container.address}/16", "dev", "eth0"])
