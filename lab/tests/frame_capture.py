"""Captures by tcpdump on the machines of a lab: they run before the first frame that a test sends."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from vnetlab import machine
from vnetlab.run import wait_until
from vnetlab.topology import Node

OPTIONS = "-e -nn -l --immediate-mode -i eth0"
BEGIN_S = 120
"""Emulated guests of a busy machine start a program within seconds."""


@contextlib.contextmanager
def listening(nodes: Sequence[Node], expression: str) -> Iterator[Callable[[Node], str]]:
    """Runs tcpdump on each machine while the context lasts; yields a function that returns what it printed so far."""
    files = {node.name: f"{node.file('.seen')}" for node in nodes}
    running: list[tuple[Node, str]] = []

    def printed(node: Node) -> str:
        return machine.execute(node, f"cat {files[node.name]}")

    try:
        for node in nodes:
            file = files[node.name]
            begin = f"mkdir -p {node.file('.seen').parent}; tcpdump {OPTIONS} '{expression}' >{file} 2>&1 & echo $!"
            running.append((node, machine.execute(node, begin).strip()))
        for node in nodes:
            wait_until(f"tcpdump on {node.name}", lambda node=node: "listening on" in printed(node), BEGIN_S)
        yield printed
    finally:
        for node, process in running:
            machine.attempt(node, f"kill {process}")
