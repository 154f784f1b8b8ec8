"""The wire: known flows between containers of two hosts pass in the kernel, and by vnetd where they cannot.

The first host also has a virtual machine at a TAP, by kind local, whose known flows the kernel forwards, too.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernel_host import LEASE_MS_MAX, Host, assert_none_lost, devices

from vnetlab.run import LabError, run, wait_until

PREFIX = f"kw{os.getpid()}"
HOSTS = [f"{PREFIX}h1", f"{PREFIX}h2"]
CONTAINERS = [f"{PREFIX}c1", f"{PREFIX}c2"]
BEHIND = f"{PREFIX}c3"
"""A namespace that the second container is the router of."""
MACHINE = f"{PREFIX}vm"
MACHINE_ADDRESS, MACHINE_MAC = "10.78.0.3", "52:54:00:78:00:03"
PROGRAM = Path(__file__).parent / "programs/tap_guest.py"
ADDRESSES = ["10.78.0.1", "10.78.0.2"]
MACS = ["52:54:00:78:00:01", "52:54:00:78:00:02"]
UNDERLAY = {4: ["192.0.2.1", "192.0.2.2"], 6: ["2001:db8::1", "2001:db8::2"]}
WIRE_PORT = 9789
MAKES_DATAGRAMS = tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 6)
"""Whether programs make and take the wire's datagrams themselves, past its device."""

SILENT = "the other host does not receive UDP port 9789, or has no interface with the kernel path"


def configure(host: Host, index: int, *, version: int = 4, mtu: int = 1500) -> None:
    """Writes the configuration of host number `index`, whose link to the other one is over IPv4 or IPv6."""
    here, there = UNDERLAY[version][index], UNDERLAY[version][1 - index]
    here, there = (f"[{ip}]:9000" if version == 6 else f"{ip}:9000" for ip in (here, there))
    (host.directory / "vnet.toml").write_text(
        f'[host]\nname = "h{index + 1}"\n[control]\nsocket = "{host.directory}/control.sock"\n'
        f'[bridge]\nlisten = "{here}"\n[dispatch]\nbpffs = "{host.directory}/bpf"\n'
        f'[[interface]]\nname = "one"\nkind = "veth"\ndevice = "eth0"\nnetns = "{CONTAINERS[index]}"\n'
        f'mac = "{MACS[index]}"\nmtu = {mtu}\n'
        f'[[link]]\nname = "peer"\nremote = "{there}"\ntrusted = true\n'
    )


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    hosts = [Host(name, tmp_path_factory.mktemp(name[-2:])) for name in HOSTS]
    try:
        for namespace in (*HOSTS, *CONTAINERS):
            run(["ip", "netns", "add", namespace])
        run(f"ip link add eth0 netns {HOSTS[0]} type veth peer name eth0 netns {HOSTS[1]}".split())
        for index, host in enumerate(hosts):
            ip = ["ip", "-n", host.namespace]
            run([*ip, "address", "add", f"{UNDERLAY[4][index]}/24", "dev", "eth0"])
            run([*ip, "address", "add", f"{UNDERLAY[6][index]}/64", "dev", "eth0", "nodad"])
            for device in ("lo", "eth0"):
                run([*ip, "link", "set", device, "up"])
            configure(host, index)
            host.mount_bpffs()
        for index, host in enumerate(hosts):
            start(host, index)
        wait_for_wire(hosts)
        yield hosts
    finally:
        for host in hosts:
            if host.daemon and host.daemon.poll() is None:
                host.end(signal.SIGKILL)
            host.unmount_bpffs()
        for namespace in (*HOSTS, *CONTAINERS, BEHIND, MACHINE):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)


def start(host: Host, index: int) -> None:
    """Starts a host and gives its container its address."""
    host.start()
    run(["ip", "-n", CONTAINERS[index], "address", "replace", f"{ADDRESSES[index]}/24", "dev", "eth0"])


def ping(count: int, *options: str) -> int:
    """Answers to pings from the first host's container to the second's."""
    return ping_from(CONTAINERS[0], ADDRESSES[1], count, *options)


def ping_from(namespace: str, address: str, count: int, *options: str) -> int:
    """Answers to pings from a namespace to an address."""
    words = ["ip", "netns", "exec", namespace, "ping", "-n", "-q", "-c", str(count), "-i", "0.01", *options, address]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    answered = re.search(r"(\d+) received", done.stdout)
    return int(answered[1]) if answered else 0


def ping_by_vnetd(host: Host) -> int:
    """Frames that the first host's vnetd moves for 20 pings that are answered; -1: some are not."""
    before = host.frames()
    answered = ping(20, "-w", "2")
    return host.frames()[1] - before[1] if answered == 20 else -1


def wait_for_wire(hosts: list[Host]) -> None:
    """Waits until both directions of a flow take the wire."""
    wait_until("the containers to reach each other", lambda: ping(1, "-w", "1") == 1, 60)
    wait_until("the wire", lambda: 0 <= ping_by_vnetd(hosts[0]) < 20, 60)


def path(host: Host) -> tuple[str, str | None]:
    """The path of a host's link, and the reason why vnetd forwards all its frames."""
    (link,) = host.ask("link", "list")
    return link["path"], link.get("path_reason")


def carried(host: Host) -> int:
    """Frames that the wire's device has carried."""
    words = ["ip", "-n", host.namespace, "-json", "-statistics", "link", "show", "vnet-wire"]
    (link,) = json.loads(run(words))
    return link["stats64"]["rx"]["packets"] + link["stats64"]["tx"]["packets"]


def transfer(server: str, address: str, client: str = CONTAINERS[0], amount: str = "100M") -> None:
    """Sends an amount of bytes by TCP, from the first host's container by default."""
    words = ["ip", "netns", "exec", server, "iperf3", "--server", "--one-off"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        listening = ["ip", "netns", "exec", server, "ss", "-Hltn", "sport = :5201"]
        wait_until("iperf3 to listen", lambda: run(listening) != "", 20)
        run(["ip", "netns", "exec", client, "iperf3", "--client", address, "--bytes", amount])
        assert process.wait(20) == 0


def test_known_flows_pass_no_dispatcher(hosts: list[Host]):
    # Longer than a verdict lives, so that it has to be renewed on both hosts.
    before, by_device = hosts[1].frames(), carried(hosts[1])
    assert hosts[0].grows(300, lambda: ping(300))[1] < 30
    assert not MAKES_DATAGRAMS or carried(hosts[1]) - by_device < 60, "trials, and no more"
    after = hosts[1].frames()
    assert after[0] - before[0] >= 300
    assert after[1] - before[1] < 30
    hosts[1].balance()
    trace = hosts[0].ask("trace", MACS[0], MACS[1])
    assert trace["to"] == ["link peer"]
    assert path(hosts[0]) == ("kernel", None)
    status = hosts[0].ask("status")["kernel"]
    assert "link_reason" not in status
    assert 0 < trace["kernel_ms"] <= LEASE_MS_MAX
    assert hosts[0].metric('vnet_interface_kernel_path{interface="one"}') == 1
    assert hosts[0].metric('vnet_link_kernel_path{link="peer"}') == 1
    # Both directions, at least.
    assert hosts[0].metric("vnet_kernel_flows{}") >= 2
    assert status["flows"] >= 2


def test_flows_are_counted_by_bytes(hosts: list[Host]):
    """The flows of both directions have the frames and bytes of the pings, on both hosts."""

    def counted() -> list[tuple[int, int]]:
        flows = [
            {(flow["src"], flow["dst"]): (flow["frames"], flow["bytes"]) for flow in host.ask("flows")}
            for host in hosts
        ]
        return [of_host.get(flow, (0, 0)) for of_host in flows for flow in (tuple(MACS), tuple(reversed(MACS)))]

    assert ping(20) == 20
    before = counted()
    assert ping(100, "-s", "1000") == 100
    frames, length = 100, 1000 + 8 + 20 + 14
    for after, then in zip(counted(), before, strict=True):
        # Whoever decides a flow again sends single frames of it by vnetd; ARP asks known neighbours again.
        assert frames - 10 <= after[0] - then[0] <= frames + 2
        assert (frames - 10) * length <= after[1] - then[1] <= (frames + 1) * length


@pytest.mark.parametrize("size", [1472, 8800, 65000])
def test_datagrams_of_any_size_arrive(hosts: list[Host], size: int):
    """The containers' MTU is the underlay's, so frames of that size do not fit one datagram of the wire."""
    answered, fragments, by_device = [], created_fragments(), carried(hosts[0])
    moved = hosts[0].grows(10, lambda: answered.append(ping(10, "-s", str(size))))
    assert answered == [10]
    assert moved[1] < moved[0] / 2
    # A fragment is sent in two frames. Whole datagrams of that size leave in two fragments.
    assert created_fragments() - fragments == (0 if size > 1472 else 20)
    assert size == 1472 or not MAKES_DATAGRAMS or carried(hosts[0]) - by_device < 60, "trials, and no more"
    hosts[1].balance()


RECEIVE = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(20)
    s.bind(("", 9000))
    print(s.getsockname()[1], flush=True)
    for _ in range(88):
        print(*set(chunk := s.recv(65535)), len(chunk), flush=True)
"""
SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.setsockopt(socket.IPPROTO_UDP, 103, int(sys.argv[2]))  # UDP_SEGMENT
    for name in range(2):
        chunks = (bytes([44 * name + n]) * int(sys.argv[2]) for n in range(44))
        s.sendto(b"".join(chunks), (sys.argv[1], 9000))
"""


@pytest.mark.parametrize("size", [1400, 1472])
def test_segmented_datagrams_keep_their_boundaries(hosts: list[Host], size: int):
    """A program has the kernel segment its message: datagrams of 1472 bytes do not fit the wire, those of 1400 do."""
    words = ["ip", "netns", "exec", CONTAINERS[1], "python3", "-c", RECEIVE]
    before = hosts[0].frames()[0]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline().strip() == "9000"
        run(["ip", "netns", "exec", CONTAINERS[0], "python3", "-c", SEND, ADDRESSES[1], str(size)])
        got = [tuple(map(int, line.split())) for line in receiver.stdout]
    assert sorted(got) == [(n, size) for n in range(88)]
    assert hosts[0].frames()[0] - before < 44, "messages are one frame"
    for host in hosts:
        host.balance()


def test_containers_with_an_mtu_beyond_the_wires(hosts: list[Host]):
    """Containers with the largest MTU: vnetd carries their frames in native datagrams."""
    try:
        for index, host in enumerate(hosts):
            assert host.end(signal.SIGTERM) == 0
            configure(host, index, mtu=65521)
            start(host, index)
        wait_until("the containers to reach each other", lambda: ping(1, "-w", "1") == 1, 60)
        wait_until("the wire", lambda: path(hosts[0])[0] == "kernel", 60)
        assert ping(10, "-s", "65493", "-M", "do") == 10
        hosts[0].grows(100, lambda: transfer(CONTAINERS[1], ADDRESSES[1]))
        hosts[1].balance()
    finally:
        for index, host in enumerate(hosts):
            assert host.end(signal.SIGTERM) == 0
            configure(host, index)
            start(host, index)
    wait_for_wire(hosts)


def test_tcp_fits_the_path_without_fragments(hosts: list[Host]):
    """Segments are made smaller than the containers' MTU, so that with VXLAN's headers they fit into the underlay's."""
    assert ping(20) == 20

    def by_devices() -> float:
        """Carries out a transfer; returns the larger part of its frames that a wire's device carried."""
        fragments, before = created_fragments(), [carried(host) for host in hosts]
        moved = hosts[0].grows(100_000_000 // 65536, lambda: transfer(CONTAINERS[1], ADDRESSES[1]))
        assert moved[1] < moved[0] / 5
        # Each segment in two would be some 140 000.
        assert created_fragments() - fragments < 10_000
        hosts[1].balance()
        return max(carried(host) - before for host, before in zip(hosts, before, strict=True)) / moved[0]

    # On a busy machine the kernel joins datagrams before the program sees them: devices get those of the next second.
    shares = []
    while not shares or (MAKES_DATAGRAMS and min(shares) > 0.2 and len(shares) < 3):
        time.sleep(1.5 * len(shares))
        shares.append(by_devices())
    assert min(shares) < 0.2 or not MAKES_DATAGRAMS, shares


def test_what_a_container_forwards_passes_the_device(hosts: list[Host]):
    """Taking a datagram's headers away leaves traces on a frame, which must not be sent on."""
    second = ["ip", "-n", CONTAINERS[1]]
    run(["ip", "netns", "add", BEHIND])
    run([*second, "link", "add", "down0", "type", "veth", "peer", "name", "eth0", "netns", BEHIND])
    for namespace, device, address in ((CONTAINERS[1], "down0", "10.79.0.1"), (BEHIND, "eth0", "10.79.0.2")):
        run(["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device])
        run(["ip", "-n", namespace, "link", "set", device, "up"])
    run(["ip", "-n", BEHIND, "route", "add", "default", "via", "10.79.0.1"])
    run(["ip", "netns", "exec", CONTAINERS[1], "sysctl", "-qw", "net.ipv4.ip_forward=1"])
    run(["ip", "-n", CONTAINERS[0], "route", "replace", "10.79.0.0/24", "via", ADDRESSES[1]])
    assert ping(20) == 20
    before = carried(hosts[1])
    moved = hosts[0].grows(100_000_000 // 65536, lambda: transfer(BEHIND, "10.79.0.2"))
    assert moved[1] < moved[0] / 5
    assert carried(hosts[1]) - before >= moved[0] / 2
    hosts[1].balance()


@contextlib.contextmanager
def machine_running(host: Host) -> Iterator[None]:
    """A virtual machine at a TAP that another program creates and removes with itself, as QEMU does."""
    words = ["ip", "netns", "exec", host.namespace, sys.executable, str(PROGRAM), "vm0", MACHINE, "eth0"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        program.stdout.readline()
        run(["ip", "-n", MACHINE, "link", "set", "eth0", "address", MACHINE_MAC])
        run(["ip", "-n", MACHINE, "address", "add", f"{MACHINE_ADDRESS}/24", "dev", "eth0"])
        for namespace, device in ((MACHINE, "eth0"), (host.namespace, "vm0")):
            run(["ip", "-n", namespace, "link", "set", device, "up"])
        yield
        program.stdin.close()
        assert program.wait(10) == 0


@pytest.fixture
def machine(hosts: list[Host]) -> Iterator[Host]:
    """The first host, with a virtual machine that has been restarted."""
    host = hosts[0]
    config = host.directory / "vnet.toml"
    text = config.read_text()
    config.write_text(text + '[[interface]]\nname = "vm"\nkind = "local"\ndevice = "vm0"\n')
    run(["ip", "netns", "add", MACHINE])
    with machine_running(host):
        with pytest.raises(LabError, match='kind = "local" takes a TAP'):
            host.vnet("interface", "add", "vm", "--kind", "tap", "--device", "vm0")
        host.vnet("interface", "add", "vm", "--kind", "local", "--device", "vm0")
    with machine_running(host):
        for address in ADDRESSES:
            wait_until("a container's answer", lambda to=address: ping_from(MACHINE, to, 1, "-w", "1") == 1, 60)
        assert [port["path"] for port in host.ask("interface", "list")] == ["kernel", "kernel"]
        yield host
    config.write_text(text)
    if any(port["name"] == "vm" for port in host.ask("interface", "list")):
        host.vnet("interface", "del", "vm")
    run(["ip", "netns", "delete", MACHINE])
    wait_for_wire(hosts)


def dispatched(host: Host, work: Callable[[], object]) -> int:
    """Frames that a host's dispatchers have forwarded during `work`."""
    before = host.frames()[1]
    work()
    host.balance()
    return host.frames()[1] - before


def test_a_machine_at_a_tap(hosts: list[Host], machine: Host):
    """Its known flows pass no dispatcher, on its host and to another one; the host itself uses the TAP as before."""
    answered = []
    for address in ADDRESSES:
        ping_from(MACHINE, address, 20)
        moved = dispatched(machine, lambda to=address: answered.append(ping_from(MACHINE, to, 300)))
        assert moved < 60, "what ARP and IPv6 need"
        trace = machine.ask("trace", MACHINE_MAC, MACS[ADDRESSES.index(address)])
        assert 0 < trace["kernel_ms"] <= LEASE_MS_MAX
    assert answered == [300, 300]
    for client, server, address in (
        (CONTAINERS[0], MACHINE, MACHINE_ADDRESS),
        (MACHINE, CONTAINERS[0], ADDRESSES[0]),
        (CONTAINERS[1], MACHINE, MACHINE_ADDRESS),
        (MACHINE, CONTAINERS[1], ADDRESSES[1]),
    ):
        assert dispatched(machine, lambda path=(server, address, client): transfer(*path, "20M")) < 150
        hosts[1].balance()
    # Fragments of what exceeds the MTU, and broadcasts, which vnetd floods to both containers.
    assert ping_from(MACHINE, ADDRESSES[1], 10, "-s", "8800") == 10
    for namespace in CONTAINERS:
        run(["ip", "netns", "exec", namespace, "sysctl", "-qw", "net.ipv4.icmp_echo_ignore_broadcasts=0"])
    words = ["ip", "netns", "exec", MACHINE, "ping", "-n", "-b", "-c", "5", "-i", "0.1", "-w", "2", "10.78.0.255"]
    text = subprocess.run(words, check=False, capture_output=True, text=True).stdout
    assert all(f"from {address}" in text for address in ADDRESSES), text
    for namespace, device, address in ((MACHINE, "eth0", "10.79.1.2"), (machine.namespace, "vm0", "10.79.1.1")):
        run(["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device])
    assert ping_from(MACHINE, "10.79.1.1", 20) == 20
    assert ping_from(machine.namespace, "10.79.1.2", 20) == 20
    machine.balance()


def test_a_machines_flows_outlive_vnetd(machine: Host):
    """A vnetd is killed and started again under pings every 5 ms; when it ends on purpose, the TAP is as it was."""
    for address in (MACHINE_ADDRESS, ADDRESSES[1]):
        assert ping_from(CONTAINERS[0] if address == MACHINE_ADDRESS else MACHINE, address, 20) == 20
    pings = [
        subprocess.Popen(
            ["ip", "netns", "exec", MACHINE, "ping", "-n", "-q", "-i", "0.005", "-W", "5", address],
            stdout=subprocess.PIPE,
            text=True,
        )
        for address in ADDRESSES
    ]
    try:
        time.sleep(1)
        machine.end(signal.SIGKILL)
        time.sleep(0.5)
        machine.start()
        traces = lambda: [machine.ask("trace", MACHINE_MAC, mac) for mac in MACS]  # noqa: E731
        wait_until("the kernel to forward again", lambda: all(trace.get("kernel_ms") for trace in traces()), 60)
    finally:
        for each in pings:
            each.send_signal(signal.SIGINT)
        texts = [each.communicate(timeout=60)[0] for each in pings]
    for text in texts:
        assert_none_lost(text)
    machine.balance()
    assert machine.end(signal.SIGTERM) == 0
    assert devices(machine.namespace) == ["lo", "eth0", "vm0"]
    (tap,) = json.loads(run(["ip", "-n", machine.namespace, "-details", "-json", "link", "show", "vm0"]))
    assert (tap["promiscuity"], tap["allmulti"]) == (0, 0)
    assert run(["tc", "-n", machine.namespace, "qdisc", "show", "dev", "vm0", "clsact"]) == ""
    assert not (machine.directory / "bpf/vnet").exists()
    start(machine, 0)


def created_fragments() -> int:
    """IP fragments that the first host has made."""
    words = ["ip", "netns", "exec", HOSTS[0], "nstat", "-asz", "--json", "IpFragCreates"]
    return json.loads(run(words))["kernel"]["IpFragCreates"]


def test_other_filters_of_the_underlay_see_their_packets(hosts: list[Host]):
    """The program at the underlay's device leaves what is not the wire's to the device's other filters."""
    tc = ["ip", "netns", "exec", HOSTS[1], "tc"]
    run([*tc, "qdisc", "replace", "dev", "eth0", "clsact"])
    try:
        # Drops all IPv4: one instruction that returns TC_ACT_SHOT.
        adds = [*tc, "filter", "add", "dev", "eth0", "ingress", "protocol", "ip"]
        run([*adds, "bpf", "direct-action", "bytecode", "1,6 0 0 2,"])
        words = ["ip", "netns", "exec", HOSTS[0], "ping", "-n", "-q", "-c", "3", "-i", "0.01", "-W", "1"]
        done = subprocess.run([*words, UNDERLAY[4][1]], check=False, capture_output=True, text=True)
        assert "100% packet loss" in done.stdout
    finally:
        run([*tc, "qdisc", "del", "dev", "eth0", "clsact"])
    wait_for_wire(hosts)


def test_established_flows_outlive_a_hosts_vnetd(hosts: list[Host]):
    """Each vnetd is killed and started again under pings every 5 ms: the other host stays on the wire."""
    # The test before this one may just have started a vnetd: no flow is established yet.
    wait_for_wire(hosts)
    words = ["ip", "netns", "exec", CONTAINERS[0], "ping", "-n", "-i", "0.005", "-W", "5", ADDRESSES[1]]
    # ping would stand still once a pipe that nobody reads is full: after 6 s.
    with tempfile.TemporaryFile("w+") as file:
        pings = subprocess.Popen(words, stdout=file)
        try:
            # Longer than the silence after which a living vnetd would have lost the wire; then for a moment.
            for host, seconds in ((hosts[1], 5), (hosts[0], 0.2)):
                host.end(signal.SIGKILL)
                time.sleep(seconds)
                host.start()
                wait_until("the wire", lambda: 0 <= ping_by_vnetd(hosts[0]) < 20, 60)
        finally:
            pings.send_signal(signal.SIGINT)
            pings.wait(60)
        file.seek(0)
        text = file.read()
    assert_none_lost(text)
    for host in hosts:
        host.balance()


def paths_told(events: list[dict]) -> list[str]:
    """The paths of the link that events tell, in turn."""
    return [event["path"] for event in events if (event.get("object"), event.get("name")) == ("link", "peer")]


def test_a_blocked_port_leaves_all_to_vnetd(hosts: list[Host]):
    """Flows come up again when the other host no longer hears the wire, and return to it. Events tell of both."""
    with hosts[0].events() as events:
        blocked(hosts, events)
        wait_until("an event", lambda: paths_told(events()) == ["vnetd", "kernel"], 60)
    assert hosts[0].metric('vnet_link_kernel_path{link="peer"}') == 1


def blocked(hosts: list[Host], events: Callable[[], list[dict]]) -> None:
    """Blocks the wire's port at the second host for a while."""
    nft = ["ip", "netns", "exec", HOSTS[1], "nft"]
    run([*nft, "add table inet block; add chain inet block in { type filter hook input priority 0; }"])
    run([*nft, f"add rule inet block in udp dport {WIRE_PORT} drop"])
    try:
        # Answers come by the wire: the other direction is open.
        wait_until("pings to pass vnetd", lambda: ping_by_vnetd(hosts[0]) >= 20, 60)
        wait_until("an event", lambda: paths_told(events()) == ["vnetd"], 60)
        assert hosts[0].metric('vnet_link_kernel_path{link="peer"}') == 0
        wait_until("the link to say why", lambda: path(hosts[0]) == ("vnetd", SILENT), 60)
        assert hosts[0].ask("status")["kernel"]["link_reason"] == f"link peer: {SILENT}"
        wait_until("the other direction's path", lambda: path(hosts[1])[0] == "kernel", 60)
    finally:
        run([*nft, "delete table inet block"])
    wait_for_wire(hosts)


def test_an_ipv6_underlay_is_vnetds(hosts: list[Host]):
    """And a restarted vnetd has the wire again, whatever its predecessor has left."""
    for index, host in enumerate(hosts):
        host.end(signal.SIGKILL)
        configure(host, index, version=6)
        start(host, index)
    wait_until("the containers to reach each other", lambda: ping(1, "-w", "1") == 1, 60)
    # Twice the time after which the wire would be used.
    assert ping(400) == 400
    assert path(hosts[0]) == ("vnetd", "its remote is an IPv6 address")
    assert hosts[0].grows(50, lambda: ping(50))[1] >= 100
    for index, host in enumerate(hosts):
        assert host.end(signal.SIGTERM) == 0
        assert devices(host.namespace) == ["lo", "eth0"]
        configure(host, index)
        start(host, index)
    wait_for_wire(hosts)
    for host in hosts:
        assert host.end(signal.SIGTERM) == 0
        assert devices(host.namespace) == ["lo", "eth0"], "a vnetd that stops leaves nothing behind"
