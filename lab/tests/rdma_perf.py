"""Helpers of tests with the interconnect's measuring program."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from checks import metrics

from vnetlab import machine
from vnetlab.topology import Node

LITTLE_LOCKED = ("prlimit", "--memlock=65536:65536", "setpriv", "--bounding-set=-ipc_lock", "--")
"""Prefix of a program that may lock 64 KiB, and has no right to more. Users' programs may often lock 8 MiB."""


def measured(near: Node, far: Node, *prefix: str, seconds: str = "0.2", size: int = 1 << 20) -> dict[str, str]:
    """The figures of vnet-rdma-perf between two containers."""
    with perf_server(far) as name:
        words = [*prefix, "vnet-rdma-perf", "client", name, str(size), seconds]
        words = machine.execute(near, *words, timeout_s=120).split()
        return dict(zip(words[::2], words[1::2], strict=True))


def rdma_metric(host: Node, container: Node, name: str) -> int:
    """A value of vnetd's engine for the applications of a container."""
    labels = f'netns="{container.namespace}"'
    found = re.search(rf"^vnet_rdma_{name}\{{{labels}\}} (\d+)$", metrics(host), re.MULTILINE)
    return int(found[1]) if found else 0


def endpoint_metric(host: Node, container: Node, name: str) -> list[tuple[str, str, int]]:
    """Address, number and value of each open endpoint of a container's applications that vnetd runs."""
    row = rf'^vnet_rdma_endpoint_{name}\{{netns="{container.namespace}",address="(.*)",endpoint="(.*)"\}} (\d+)$'
    found = re.findall(row, metrics(host), re.MULTILINE)
    return [(address, endpoint, int(value)) for address, endpoint, value in found]


@contextmanager
def perf_server(node: Node, *prefix: str) -> Iterator[str]:
    """Serves one client; yields the endpoint's name."""
    words = ["timeout", "120", *prefix, "vnet-rdma-perf", "server", f"{node.address}:7000", "once"]
    words = machine.namespace_command(node, words)
    with subprocess.Popen(words, env=machine.environment(node), stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        assert server.wait(60) == 0
