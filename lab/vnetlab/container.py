"""Containers: a network namespace each, with a TAP device that its host's vnetd makes in it."""

import json

from vnetlab import underlay
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Node, Topology

DEVICE_S = 10


def create(container: Node) -> None:
    """Makes a container's namespace, for vnetd to put a device in."""
    underlay.add_namespace(container.namespace)


def configure(topology: Topology, container: Node) -> None:
    """Waits for a container's device, then gives it its addresses and brings it up."""
    inside = ["ip", "-n", container.namespace]

    def device() -> dict | None:
        links = json.loads(run([*inside, "-json", "link", "show"]))
        return next((link for link in links if link["ifname"] == "eth0"), None)

    wait_until(f"vnetd to make the device of {container.name}", device, DEVICE_S)
    link = device()
    if not link:
        raise LabError(f"the device of {container.name} is gone again")
    mtu = topology.mtu(container)
    run([*inside, "link", "set", "eth0", "address", container.mac, "mtu", str(mtu)])
    run([*inside, "address", "replace", f"{container.address}/16", "dev", "eth0"])
    run([*inside, "link", "set", "eth0", "up"])
