"""Containers: a network namespace for each, in which the host's vnetd creates a TAP device."""

import json

from vnetlab import underlay
from vnetlab.run import run, wait_until
from vnetlab.topology import Node

DEVICE_S = 10


def create(container: Node) -> None:
    """Creates a container's namespace, in which vnetd will create the device."""
    underlay.add_namespace(container.namespace)


def configure(container: Node) -> None:
    """Waits for a container's device (vnetd sets its MAC address and MTU) and assigns its IP address."""
    inside = ["ip", "-n", container.namespace]

    def device() -> bool:
        # ip lists devices that are down as empty objects.
        links = json.loads(run([*inside, "-json", "link", "show", "up"]))
        return any(link.get("ifname") == "eth0" for link in links)

    wait_until(f"vnetd to create the device of {container.name}", device, DEVICE_S)
    run([*inside, "address", "replace", f"{container.address}/16", "dev", "eth0"])
