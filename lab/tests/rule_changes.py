"""Changes rules under traffic: no frame may pass by the old rule once the change is acknowledged."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kernel_host import Host
from packet_count import in_namespace

from vnetlab.run import wait_until

CHANGES = int(os.environ.get("VNET_TEST_CHANGES", "30"))
PORT = 9
SEND = f"import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\nwhile True: s.sendto(b'x', (%r, {PORT}))"
LISTEN = f"import socket, time\ns = socket.socket(type=2)\ns.bind(('', {PORT}))\nprint(flush=True)\ntime.sleep(36000)"


@contextlib.contextmanager
def datagrams(source: str, to: str, address: str) -> Iterator[None]:
    """A container sends datagrams to another one while the context lasts, as fast as it can."""
    words = [["ip", "netns", "exec", to, sys.executable, "-c", LISTEN]]
    words += [["ip", "netns", "exec", source, sys.executable, "-c", SEND % address]]
    # Somebody listens, so that no refusals come back; nobody reads, so that each datagram is counted at once.
    with subprocess.Popen(words[0], stdout=subprocess.PIPE) as listener:
        listener.stdout.readline()
        with subprocess.Popen(words[1]) as sender:
            try:
                yield
            finally:
                sender.kill()
                listener.kill()


@contextlib.contextmanager
def refused_datagrams(source: str, to: str, address: str) -> Iterator[Callable[[], int]]:
    """Sends datagrams; yields a function that counts those that found a full socket, without a process's delay."""
    file = in_namespace(to, lambda: Path("/proc/thread-self/net/snmp").open())  # noqa: SIM115

    def read() -> int:
        file.seek(0)
        names, values = (line.split() for line in file if line.startswith("Udp:"))
        return int(values[names.index("RcvbufErrors")])

    with file, datagrams(source, to, address):
        yield read


def change_rules(host: Host, rule: dict, frames: Callable[[], int]) -> None:
    """Adds and removes a misdirecting rule, VNET_TEST_CHANGES times; `frames` counts those that pass without it."""
    for change in range(CHANGES):
        before = frames()
        wait_until("frames", lambda before=before: frames() > before + 10, 30, poll_s=0.005)
        index = host.request("POST", "/v1/routes", rule)["index"]
        acknowledged = frames()
        time.sleep(0.002)
        assert frames() == acknowledged, f"change {change} of {CHANGES}"
        host.request("DELETE", f"/v1/routes/{index}")
    print(f"{CHANGES} changes of rules, no frame by an old one")
