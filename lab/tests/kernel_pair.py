"""Two hosts with containers, whose known flows take the wire: for tests of the kernel's own path between hosts.

The first host has two containers, the second has one:

    one ── host 1 ── underlay ── host 2 ── far
    two ──┘
"""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_host import Host

from vnetlab.run import run, wait_until

WIRE_PORT = 9789
TRANSLATED_PORT = 9790
"""Of packets without a tunnel."""
MAKES_DATAGRAMS = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 6)
"""Whether programs make and take the wire's datagrams themselves, past its device."""
UNDERLAY = ["192.0.2.1", "192.0.2.2"]
ONE, TWO, FAR = range(3)
"""Indices of the containers."""
NAMES = ["one", "two", "one"]
"""Interface names, by container."""
PLACES = [0, 0, 1]
"""Index of the host of each container."""
ADDRESSES = ["10.78.0.1", "10.78.0.3", "10.78.0.2"]
ADDRESSES_6 = ["fd78::1", "fd78::3", "fd78::2"]
MACS = ["52:54:00:78:00:01", "52:54:00:78:00:03", "52:54:00:78:00:02"]


@dataclass
class Options:
    """Differences from the defaults."""

    mtu: int = 1500
    """MTU of the containers' interfaces, bytes."""
    underlay_mtu: int = 1500
    second_network: int = 1
    """Network of the first host's second container."""
    link: str = ""
    """Further TOML lines of each `[[link]]`."""
    by_device: bool = False
    """Whether hosts have an IPsec policy: vnetd then sends through the VXLAN device instead of own datagrams."""


class Pair:
    """Both hosts and their containers. Namespaces are named after `prefix`."""

    def __init__(self, prefix: str, directory: Path, options: Options) -> None:
        self.options = options
        self.hosts = [Host(f"{prefix}h{number}", directory / f"h{number}") for number in (1, 2)]
        self.containers = [f"{prefix}c{number}" for number in (1, 2, 3)]
        self.namespaces = [*(host.namespace for host in self.hosts), *self.containers]

    def configure(self, index: int) -> None:
        """Writes the configuration of a host."""
        host, here, there = self.hosts[index], UNDERLAY[index], UNDERLAY[1 - index]
        text = (
            f'[host]\nname = "h{index + 1}"\n[control]\nsocket = "{host.directory}/control.sock"\n'
            f'[bridge]\nlisten = "{here}:9000"\n[dispatch]\nbpffs = "{host.directory}/bpf"\n'
            f'[[link]]\nname = "peer"\nremote = "{there}:9000"\ntrusted = true\n{self.options.link}\n'
        )
        for number, container in enumerate(self.containers):
            if PLACES[number] == index:
                text += (
                    f'[[interface]]\nname = "{NAMES[number]}"\nkind = "veth"\ndevice = "eth0"\nnetns = "{container}"\n'
                    f'mac = "{MACS[number]}"\nmtu = {self.options.mtu}\n'
                )
                if number == TWO and self.options.second_network != 1:
                    text += f"network = {self.options.second_network}\n"
        if self.options.second_network != 1:
            text += f"[[network]]\nid = 1\n[[network]]\nid = {self.options.second_network}\n"
        (host.directory / "vnet.toml").write_text(text)

    def start(self) -> None:
        """Creates everything, and waits until flows between both hosts take the wire."""
        first, second = (host.namespace for host in self.hosts)
        for namespace in self.namespaces:
            run(["ip", "netns", "add", namespace])
        mtu = str(self.options.underlay_mtu)
        words = f"ip link add eth0 mtu {mtu} netns {first} type veth peer name eth0 mtu {mtu} netns {second}"
        run(words.split())
        for index, host in enumerate(self.hosts):
            ip = ["ip", "-n", host.namespace]
            run([*ip, "address", "add", f"{UNDERLAY[index]}/24", "dev", "eth0"])
            for device in ("lo", "eth0"):
                run([*ip, "link", "set", device, "up"])
            if self.options.by_device:
                policy = "xfrm policy add dir out src 203.0.113.1/32 dst 203.0.113.2/32 action allow"
                run([*ip, *policy.split()])
            host.directory.mkdir()
            self.configure(index)
            host.mount_bpffs()
            host.start()
        for number, container in enumerate(self.containers):
            ip = ["ip", "-n", container]
            run([*ip, "link", "set", "lo", "up"])
            run([*ip, "address", "add", f"{ADDRESSES[number]}/24", "dev", "eth0"])
            run([*ip, "address", "add", f"{ADDRESSES_6[number]}/64", "dev", "eth0", "nodad"])
        self.wait_for_wire()

    def stop(self) -> None:
        """Removes everything."""
        for host in self.hosts:
            if host.daemon and host.daemon.poll() is None:
                host.end(signal.SIGKILL)
            host.unmount_bpffs()
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)

    def inside(self, number: int, *words: str) -> list[str]:
        """A command in a container."""
        return ["ip", "netns", "exec", self.containers[number], *words]

    def ping(self, source: int, to: int | str, count: int, *options: str) -> int:
        """Answers to pings from a container to another one or to an address."""
        address = ADDRESSES[to] if isinstance(to, int) else to
        words = self.inside(source, "ping", "-n", "-q", "-c", str(count), "-i", "0.01", *options, address)
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        answered = re.search(r"(\d+) received", done.stdout)
        return int(answered[1]) if answered else 0

    def by_vnetd(self, source: int, to: int | str) -> int:
        """Frames that the first host's vnetd moves for 20 pings that are answered; -1: some are not."""
        before = self.hosts[0].frames()[1]
        answered = self.ping(source, to, 20, "-w", "2")
        return self.hosts[0].frames()[1] - before if answered == 20 else -1

    def wait_for_kernel(self, source: int, to: int | str) -> None:
        """Waits until both directions of a flow pass in the kernel."""
        wait_until("an answer", lambda: self.ping(source, to, 1, "-w", "1") == 1, 60)
        wait_until("the kernel's path", lambda: 0 <= self.by_vnetd(source, to) < 20, 60)

    def wait_for_wire(self) -> None:
        """Waits until flows between both hosts take the wire."""
        self.wait_for_kernel(ONE, FAR)

    def carried(self, index: int) -> int:
        """Frames that the device of a host's wire has carried."""
        words = ["ip", "-n", self.hosts[index].namespace, "-json", "-statistics", "link", "show", "vnet-wire"]
        (link,) = json.loads(run(words))
        return link["stats64"]["rx"]["packets"] + link["stats64"]["tx"]["packets"]

    def counter(self, namespace: str, name: str) -> int:
        """A counter of a namespace's network stack."""
        words = ["ip", "netns", "exec", namespace, "nstat", "-asz", "--json", name]
        return json.loads(run(words))["kernel"][name]

    def flow(self, index: int, source: str, to: str) -> dict:
        """A flow that a host's kernel forwards, by its addresses; empty: none."""
        flows = self.hosts[index].ask("flows")
        return next((flow for flow in flows if (flow["src"], flow["dst"]) == (source, to)), {})

    def balance(self) -> None:
        """Waits until the counters of both hosts balance."""
        for host in self.hosts:
            host.balance()


@contextlib.contextmanager
def pair(prefix: str, directory: Path, **options: object) -> Iterator[Pair]:
    """A pair of hosts while the context lasts."""
    made = Pair(prefix, directory, Options(**options))
    try:
        made.start()
        yield made
    finally:
        made.stop()
