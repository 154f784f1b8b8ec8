"""Cut-through forwarding between virtual machines: zero-copy data arrives unchanged, every buffer is returned.

    h1v1 -- vnetd h1 -- veth, jumbo frames -- vnetd h2 -- h2v1

On a veth pair the kernel copies nevertheless, and reports that. An ifb device does not copy, but drops every packet.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import assert_balanced, ping, port, settled, wait_for_path
from file_guests import start_file_guests

from vnetlab import daemon, lab, machine, measure, process
from vnetlab.run import run, wait_until
from vnetlab.topology import Node, Settings, Topology

NAME = "test-cut-through"
BYTES = 8_000_000
PORT = 8000
SINK = "10.99.0.2"
"""An address behind a device that drops every packet."""
KEYS = ("zero_copy_sent", "zero_copy_copied", "zero_copy_fallen_back")


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    """Two hosts that send large frames with zero copy, with a guest each."""
    lab.down(NAME)
    topology = lab.prepare(Settings(name=NAME, containers=0, underlay_mtu=9000, mtu=9000))
    try:
        for host in topology.hosts:
            restart(topology, host, "on")
        guests = start_file_guests(topology, PORT, BYTES)
        wait_for_path(guests[0], guests[1].address)
        yield topology
    finally:
        lab.down(NAME)


def restart(topology: Topology, host: Node, setting: str, more: str = "", direct: bool = True) -> None:
    """Restarts a host's vnetd with another value of `zero_copy`."""
    process.stop(host.file(".pid"))
    text = daemon.configuration(topology, host)
    if direct:
        text = daemon.with_direct_ports(text, topology, host)
    host.file(".toml").write_text(text.replace("[bridge]\n", f'[bridge]\nzero_copy = "{setting}"\n') + more)
    lab.start_daemon(topology, host)


def counters(host: Node, link: str) -> tuple[int, ...]:
    found = port(daemon.ask(host, "stats"), "link", link)
    return tuple(found[key] for key in KEYS)


def digest(node: Node, command: str) -> str:
    return machine.execute(node, f"{command} | sha256sum", timeout_s=60).split()[0]


def assert_fetched(node: Node, source: Node) -> None:
    """Asserts that a node can fetch a file from another node unchanged."""
    sent = digest(source, "cat /files/sent")
    assert digest(node, f"busybox wget -q -O - http://{source.address}:{PORT}/sent") == sent


def landed(host: Node, link: str) -> int:
    """Number of frames received in place, in guests' buffers."""
    return port(daemon.ask(host, "stats"), "link", link)["direct_in_place"]


def test_content_is_right(topology: Topology):
    """Both directions at once, with receive in place. The veth pair copies, which the counters show."""
    guests = topology.machines()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(assert_fetched, guests, reversed(guests)))
    for host, peer in zip(topology.hosts, reversed(topology.hosts), strict=True):
        settled(host)
        sent, copied, _ = counters(host, peer.name)
        assert sent > 50
        assert copied == sent, "a veth pair copies all of it"
        assert landed(host, peer.name) > 50
    assert_balanced(topology)


def rebind(node: Node, mtu: int) -> None:
    """Unbinds and binds a guest's driver, which resets the device."""
    device = "d=$(basename $(readlink -f /sys/class/net/eth0/device)); cd /sys/bus/virtio/drivers/virtio_net"
    again = f"ip link set eth0 mtu {mtu} up && ip address add {node.address}/16 dev eth0"
    machine.execute(node, f"{device}; echo $d >unbind; echo $d >bind; sleep 0.2; {again}")


def test_rings_may_stop_with_messages_under_way(topology: Topology):
    """A slow wire keeps messages in flight while the guest's driver is rebound, then while the daemon restarts."""
    host, source, destination = topology.hosts[0], *topology.machines()
    within = f"ip netns exec {host.namespace}"
    run(f"{within} tc qdisc add dev eth0 root tbf rate 40mbit burst 70kb latency 400ms".split())
    try:
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(measure.throughput, source, destination, seconds=4)
            time.sleep(1)
            rebind(source, 9000)
            time.sleep(1)
            process.stop(host.file(".pid"))
            lab.start_daemon(topology, host)
            # TCP may or may not give up meanwhile.
            load.exception()
    finally:
        run(f"{within} tc qdisc del dev eth0 root".split())
    wait_for_path(source, destination.address)
    assert ping(source, destination.address, count=50) == (50, 50)
    assert_fetched(destination, source)
    assert_balanced(topology)


def test_zero_copy_is_rarely_tried_where_the_kernel_copies(topology: Topology):
    host, (source, destination) = topology.hosts[0], topology.machines()
    restart(topology, host, "auto")
    wait_for_path(source, destination.address)
    assert_fetched(destination, source)
    sent, _, _ = counters(host, "h2")
    assert 0 < sent <= 100, "zero copy is tried once, then not for long"
    wait_until("the kernel to report", lambda: counters(host, "h2")[1] == sent, 5)
    assert_balanced(topology)


def test_a_device_without_copies(topology: Topology):
    """Large frames to a device that transmits pages without copying: no copy, and every buffer is returned."""
    host, source = topology.hosts[0], topology.machines()[0]
    within = f"ip -n {host.namespace}"
    run(f"{within} link add sink0 mtu 9000 type ifb".split())
    try:
        run(f"{within} address add 10.99.0.1/24 dev sink0".split())
        run(f"{within} link set sink0 up".split())
        link = f'\n[[link]]\nname = "sink"\nremote = "{SINK}:9000"\ntrusted = true\n'
        route = '\n[[route]]\ndst = "52:54:00:99:00:01"\nto = "link sink"\n'
        restart(topology, host, "on", link + route)
        machine.execute(source, "busybox arp -i eth0 -s 10.77.9.9 52:54:00:99:00:01")
        wait_for_path(source, topology.machines()[1].address)
        # More pings than the ring has descriptors.
        machine.attempt(source, "ping -n -q -s 8900 -c 600 -i 0.002 -W 1 10.77.9.9")
        assert counters(host, "sink")[0] >= 500
        assert counters(host, "sink")[1:] == (0, 0)
        assert ping(source, topology.machines()[1].address, count=20) == (20, 20)
        assert_balanced(topology)
    finally:
        run(f"{within} link del sink0".split())
        restart(topology, host, "on")


def test_frames_for_several_ports_are_not_received_in_place(topology: Topology):
    """While a rule copies frames to a second interface, no frame is received in place, and all frames arrive."""
    host, (source, destination) = topology.hosts[1], topology.machines()
    also = f'\n[[route]]\ndst = "{destination.mac}"\nto = "interface {destination.name}"\n'
    also += f'\n[[route]]\ndst = "{destination.mac}"\nto = "interface watcher"\n'
    watcher = f'\n[[interface]]\nname = "watcher"\nkind = "vhost-user"\nsocket = "{host.file(".watcher")}"\n'
    restart(topology, host, "on", watcher + also)
    try:
        wait_for_path(source, destination.address)
        assert_fetched(destination, source)
        assert landed(host, "h1") == 0
        daemon.vnet(host, "route", "del", route_to(host, "watcher"))
        assert_fetched(destination, source)
        assert landed(host, "h1") > 50
    finally:
        restart(topology, host, "on")
    wait_for_path(source, destination.address)
    assert_balanced(topology)


def route_to(host: Node, name: str) -> str:
    """The index of the rule that leads to an interface."""
    routes = daemon.ask(host, "route", "list")
    return str(next(route["index"] for route in routes if route["to"] == f"interface {name}"))


def test_other_path_mtus_are_received_in_place(topology: Topology):
    """Other path MTUs fragment frames differently: the content stays right, and frames are received in place."""
    source, destination = topology.machines()
    for mtu in (1500, 4000, 9000):
        for host in topology.hosts:
            run(f"ip -n {host.namespace} link set eth0 mtu {mtu}".split())
        # vnetd looks up the kernel's routes once a second.
        time.sleep(1.5)
        before = landed(topology.hosts[1], "h1")
        assert_fetched(destination, source)
        assert landed(topology.hosts[1], "h1") > before
    assert_balanced(topology)
