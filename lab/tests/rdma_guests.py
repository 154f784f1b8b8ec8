"""Helpers of tests with the interconnect inside virtual machines."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from checks import metrics

from vnetlab import machine
from vnetlab.rdma import BOOT_S, PORT, command
from vnetlab.run import wait_until
from vnetlab.topology import Kind, Node, Topology


@contextmanager
def guest_server(guest: Node) -> Iterator[str]:
    """Serves one client in a guest; yields the endpoint's name."""
    name = f"{guest.address}:{PORT}"
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(machine.execute, guest, *command("server", name, "once"), timeout_s=BOOT_S)
        host = Node(guest.lab, Kind.HOST, guest.host)
        wait_until(f"the server in {guest.name}", lambda: served.done() or endpoints(host, guest) > 0, BOOT_S)
        yield f"{name}/0"
        assert served.result().startswith(f"{name}/0")


def rdma_metric(host: Node, guest: Node, name: str) -> int:
    """A value of vnetd's engine for the applications of a virtual machine."""
    found = re.search(rf'^vnet_rdma_{name}\{{netns="interface {guest.name}"\}} (\d+)$', metrics(host), re.MULTILINE)
    return int(found[1]) if found else 0


def endpoints(host: Node, guest: Node) -> int:
    """Open endpoints of a guest's applications."""
    return rdma_metric(host, guest, "endpoints")


def assert_nothing_is_left(lab: Topology) -> None:
    """No attachment, no memory, and nobody was cut off."""
    for guest in lab.machines(Kind.VM):
        host = lab.hosts[guest.host - 1]
        wait_until(
            f"the memory of {guest.name} to be given back",
            lambda host=host, guest=guest: rdma_metric(host, guest, "registered_bytes") == 0,
            60,
        )
        assert rdma_metric(host, guest, "processes") == 0
        assert (rdma_metric(host, guest, "refusals_total"), rdma_metric(host, guest, "broken_total")) == (0, 0)
