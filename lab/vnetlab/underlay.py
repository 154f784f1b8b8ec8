"""The underlay: a namespace per host, connected by a veth pair, or by a bridge unless there are exactly two hosts.

With `tun`, a pair of tun devices (`tun_pair.py`) replaces the veth pair: IP without Ethernet, like IPoIB.

Each host's device is `eth0`. A token bucket on its egress limits the wire's speed.
"""

import os
import re
import sys
from pathlib import Path

from vnetlab import process, remote
from vnetlab.remote import Machine
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import STATE, Node, Topology, Wire

IPV6_MTU_MIN = 1280
TUN_PAIR = Path(__file__).parent / "tun_pair.py"
TUN_S = 10
CONGESTION_CONTROL = "cubic"
"""Of all nodes: another, like BBR on some cloud images, changes what a path reaches by factors."""
ALLOW = f"""
allowed=/proc/sys/net/ipv4/tcp_allowed_congestion_control
grep -qw {CONGESTION_CONTROL} $allowed || echo "$(cat $allowed) {CONGESTION_CONTROL}" >$allowed
"""
"""A machine's setting: only what it allows to all users can be the default of another network namespace."""
BUCKETS = {
    Wire.GIGABIT: ["rate", "1gbit", "burst", "256kb", "latency", "10ms"],
    Wire.TEN_GIGABIT: ["rate", "10gbit", "burst", "1mb", "latency", "5ms"],
}
"""Arguments of `tc qdisc … tbf`. A burst holds several of the largest super-frames."""


def namespaces() -> set[str]:
    """Names of all network namespaces."""
    try:
        return set(os.listdir("/run/netns"))
    except FileNotFoundError:
        return set()


def create(topology: Topology) -> None:
    """Creates the hosts' namespaces and connects them."""
    hosts = topology.hosts
    machines = remote.machines_of(topology.settings.name)
    if machines and (topology.settings.tun or topology.settings.wire != Wire.NONE):
        raise LabError("the underlay between other machines is theirs: choose --wire none")
    for host in hosts:
        add_namespace(host.namespace)
    if machines:
        for host, place in zip(hosts, machines, strict=False):
            _add_device(host, place, topology)
    elif topology.settings.tun:
        _add_tun_pair(topology)
    elif len(hosts) == 2:
        ends = [f"{host.namespace} mtu {topology.settings.underlay_mtu}" for host in hosts]
        run(f"ip link add eth0 netns {ends[0]} type veth peer name eth0 netns {ends[1]}".split())
    else:
        _add_switch(topology)
    for host in hosts:
        _configure(host, topology)


def add_namespace(name: str) -> None:
    """Creates a network namespace with loopback up, and with Linux's default for TCP instead of the machine's."""
    place = remote.machine_of(name)
    run(remote.ssh(place, ALLOW) if place else ["sh", "-c", ALLOW])
    run(["ip", "netns", "add", name])
    run(["ip", "netns", "exec", name, "sysctl", "-q", f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}"])
    run(["ip", "-n", name, "link", "set", "lo", "up"])


def delete_namespaces(lab: str) -> None:
    """Removes all namespaces of a lab, with the devices in them."""
    for number, place in enumerate(remote.machines_of(lab), 1):
        if place.own:
            # Into the namespace of the shell. The device is not in the host's if the lab never came that far.
            host = f"ip -n {lab}-h{number} link"
            back = f"{host} set eth0 down name {place.device} netns $$"
            run(remote.ssh(place, f"if {host} show eth0 >/dev/null 2>&1; then {back}; fi"))
    for place in remote.machines_of(lab):
        names = [name for name in run(remote.ssh(place, "ls /run/netns 2>/dev/null || true")).split() if _of(lab, name)]
        run(remote.ssh(place, "; ".join(["true", *(f"ip netns delete {name}" for name in names)])))
        run(remote.ssh(place, f"test ! -d {STATE / lab} || find {STATE / lab} -mindepth 1 ! -name lock -delete"))
    for name in sorted(owned(lab)):
        run(["ip", "netns", "delete", name])


def owned(lab: str) -> set[str]:
    """Existing namespaces of a lab, found by name alone."""
    return {name for name in namespaces() if _of(lab, name)}


def _of(lab: str, name: str) -> bool:
    """Whether a namespace's name is one of a lab."""
    return bool(re.fullmatch(rf"{re.escape(lab)}-(h\d+(c\d+)?|underlay)", name))


def _add_switch(topology: Topology) -> None:
    """Connects the hosts by a bridge in a separate namespace."""
    add_namespace(topology.switch)
    mtu = topology.settings.underlay_mtu
    run(["ip", "-n", topology.switch, "link", "add", "bridge", "mtu", str(mtu), "up", "type", "bridge"])
    for host in topology.hosts:
        there = f"{host.namespace} mtu {mtu}"
        here = f"{host.name} mtu {mtu} master bridge up"
        run(f"ip -n {topology.switch} link add {here} type veth peer name eth0 netns {there}".split())


def _add_device(host: Node, place: Machine, topology: Topology) -> None:
    """Gives a host on another machine a macvlan of that machine's device or the device, and a folder for its files."""
    there = f"mtu {topology.settings.underlay_mtu} netns {host.namespace}"
    link = f"ip link add link {place.device} name eth0 {there} type macvlan mode bridge"
    if place.own:
        link = f"ip link set {place.device} {there} name eth0"
    run(remote.ssh(place, f"mkdir -p {topology.state} && {link}"))


def _add_tun_pair(topology: Topology) -> None:
    """Connects two hosts by tun devices, between which a process forwards."""
    if len(topology.hosts) != 2:
        raise LabError(f"a tun underlay joins two hosts, not {len(topology.hosts)}")
    mtu = str(topology.settings.underlay_mtu)
    here, log = topology.hosts[0].namespace, topology.state / "tun.log"
    names = ("tun1", "tun2")
    words = ["ip", "netns", "exec", here, sys.executable, str(TUN_PAIR), *names]
    process.start(words, topology.state / "tun.pid", log)
    wait_until("the tun devices", lambda: names[-1] in run(["ip", "-n", here, "-brief", "link"]), TUN_S, log)
    for name, host in zip(names, topology.hosts, strict=True):
        run(["ip", "-n", here, "link", "set", name, "netns", host.namespace, "name", "eth0"])
        run(["ip", "-n", host.namespace, "link", "set", "eth0", "mtu", mtu])


def _configure(host: Node, topology: Topology) -> None:
    """Sets the addresses and the speed of a host's device."""
    inside = ["ip", "-n", host.namespace]
    run([*inside, "address", "add", f"{host.address}/24", "dev", "eth0"])
    if topology.settings.underlay_mtu >= IPV6_MTU_MIN:
        run([*inside, "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad"])
    run([*inside, "link", "set", "eth0", "up"])
    if topology.settings.wire != Wire.NONE:
        bucket = BUCKETS[Wire(topology.settings.wire)]
        run(["tc", "-n", host.namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket])
