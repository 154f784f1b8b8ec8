"""Helpers of tests with the interconnect's measuring program."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from vnetlab import machine
from vnetlab.topology import Node


def measured(near: Node, far: Node, *prefix: str, seconds: str = "0.2", size: int = 1 << 20) -> dict[str, str]:
    """The figures of vnet-rdma-perf between two containers."""
    with perf_server(far) as name:
        words = [*prefix, "vnet-rdma-perf", "client", name, str(size), seconds]
        words = machine.execute(near, *words, timeout_s=120).split()
        return dict(zip(words[::2], words[1::2], strict=True))


@contextmanager
def perf_server(node: Node, *prefix: str) -> Iterator[str]:
    """Serves one client; yields the endpoint's name."""
    words = ["timeout", "120", *prefix, "vnet-rdma-perf", "server", f"{node.address}:7000", "once"]
    words = machine.namespace_command(node, words)
    with subprocess.Popen(words, env=machine.environment(node), stdout=subprocess.PIPE, text=True) as server:
        yield server.stdout.readline().strip()
        assert server.wait(60) == 0
