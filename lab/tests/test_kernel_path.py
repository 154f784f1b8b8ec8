"""The kernel's own path: known flows between containers bypass dispatchers; other frames behave as with TAPs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PROGRAMS
from kernel_host import LEASE_MS_MAX, Host, assert_none_lost, devices
from rule_changes import change_rules, refused_datagrams

from vnetlab import daemon
from vnetlab.run import run, wait_until

PREFIX = f"kp{os.getpid()}"
HOST, ONE, TWO = (f"{PREFIX}{name}" for name in ("h", "a", "b"))
ADDRESSES = {ONE: "10.77.0.1", TWO: "10.77.0.2"}
MACS = {ONE: "52:54:00:77:00:01", TWO: "52:54:00:77:00:02"}
LATE, AGAIN = "TcpExtTCPDSACKRecvSegs", "TcpRetransSegs"


def ping(count: int, *options: str) -> str:
    """What ping prints; replies may be missing, even all of them."""
    words = ["ip", "netns", "exec", ONE, "ping", "-n", "-q", "-c", str(count), "-i", "0.01", *options, ADDRESSES[TWO]]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout


def received(text: str) -> int:
    return int(re.search(r"(\d+) received", text)[1])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    directory = tmp_path_factory.mktemp("kernel-path")
    parts = [
        f'[host]\nname = "h.1"\n[control]\nsocket = "{directory}/control.sock"\n[bridge]\nlisten = "127.0.0.1:0"\n'
    ]
    parts.append(f'[dispatch]\nbpffs = "{directory}/bpf"\noutlive_s = 300\n')
    for name, namespace in (("one", ONE), ("two", TWO)):
        parts.append(
            f'[[interface]]\nname = "{name}"\nkind = "veth"\ndevice = "eth0"\nnetns = "{namespace}"\n'
            f'mac = "{MACS[namespace]}"\n'
        )
    (directory / "vnet.toml").write_text("\n".join(parts))
    host = Host(HOST, directory)
    host.mount_bpffs()
    try:
        for namespace in (HOST, ONE, TWO):
            run(["ip", "netns", "add", namespace])
        run(["ip", "-n", HOST, "link", "set", "lo", "up"])
        host.start()
        for namespace in (ONE, TWO):
            run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
        wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)
        yield host
    finally:
        if host.daemon and host.daemon.poll() is None:
            host.end(signal.SIGKILL)
        for namespace in (HOST, ONE, TWO):
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
        host.unmount_bpffs()


def test_known_flows_pass_no_dispatcher(host: Host):
    assert {port["path"] for port in host.ask("interface", "list")} == {"kernel"}
    # Pings for longer than a verdict's lease, so that the verdict has to be renewed.
    moved = host.grows(300, lambda: ping(300))
    assert moved[1] < 30, "what ARP and IPv6 need, and no more"
    trace = host.ask("trace", MACS[ONE], MACS[TWO])
    assert 0 < trace["kernel_ms"] <= LEASE_MS_MAX
    assert trace["to"] == ["interface two"]
    # Pings above the MTU: fragments are forwarded like other frames.
    assert received(ping(10, "-s", "8000")) == 10


def test_the_pair_is_netkit_where_the_kernel_has_it(host: Host):
    probe = ["ip", "netns", "exec", HOST, "ip", "link", "add", "probe", "type", "netkit"]
    has_netkit = subprocess.run(probe, check=False, capture_output=True).returncode == 0
    if has_netkit:
        run(["ip", "-n", HOST, "link", "delete", "probe"])
    assert [port["pair"] for port in host.ask("interface", "list")] == ["netkit" if has_netkit else "veth"] * 2
    words = [str(daemon.binaries() / "vnet"), "--socket", f"{host.directory}/control.sock", "interface", "add", "three"]
    words += ["--kind", "veth", "--device", "eth1", "--netns", TWO, "--pair", "netkit"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if has_netkit:
        assert done.returncode == 0, done.stderr
        host.vnet("interface", "del", "three")
    else:
        assert done.returncode != 0
        assert done.stderr.count("\n") == 1
        assert 'write pair = "auto" or "veth"' in done.stderr
    assert devices(TWO) == ["lo", "eth0"]
    assert len(devices(HOST)) == 7


def test_containers_leave_headroom(host: Host):
    """The host's ends are ports of a bridge that asks for room, never comes up and never sees a frame."""
    links = {link["ifname"]: link for link in json.loads(run(["ip", "-n", host.namespace, "-json", "-s", "link"]))}
    ports = {name for name, link in links.items() if link.get("master") == "vnet-room"}
    ends = {name for name in links if re.fullmatch("vnet-[0-9a-f]{8}", name)}
    assert len(ends) == 2
    assert ports == ends | {"vnet-room-vxlan"}
    for name in ("vnet-room", "vnet-room-vxlan"):
        assert "UP" not in links[name]["flags"]
        assert links[name]["stats64"]["rx"]["packets"] == links[name]["stats64"]["tx"]["packets"] == 0


def test_tcp_passes_no_dispatcher(host: Host):
    server = ["ip", "netns", "exec", TWO, "iperf3", "--server", "--one-off"]
    with subprocess.Popen(server, stdout=subprocess.DEVNULL) as process:
        listening = ["ip", "netns", "exec", TWO, "ss", "-Hltn", "sport = :5201"]
        wait_until("iperf3 to listen", lambda: run(listening) != "", 20)
        client = ["ip", "netns", "exec", ONE, "iperf3", "--client", ADDRESSES[TWO], "--bytes", "100M"]
        moved = host.grows(100_000_000 // 65536, lambda: run(client))
        assert process.wait(20) == 0
    assert moved[1] < moved[0] / 10


def test_a_captured_ports_frames_come_up(host: Host):
    words = [str(daemon.binaries() / "vnet"), "--socket", f"{host.directory}/control.sock"]
    words += ["capture", "interface one", "--count", "20", "icmp"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as capture:
        end = time.monotonic() + 60
        while capture.poll() is None and time.monotonic() < end:
            ping(20)
        assert capture.wait(1) == 0, capture.stderr.read()
    moved = host.grows(50, lambda: (ping(20), ping(50)))
    assert moved[1] < 60, "the kernel forwards again"


def test_a_rule_holds_once_it_is_acknowledged(host: Host):
    """Once the command that adds a misdirecting rule has ended, no ping passes, although the flow was in the kernel."""
    assert received(ping(20)) == 20
    host.vnet("route", "add", "--dst", MACS[TWO], "--to", "interface one")
    rule = max(route["index"] for route in host.ask("route", "list"))
    counted = json.loads(run(["ip", "-n", TWO, "-json", "-statistics", "link", "show", "eth0"]))
    try:
        text = subprocess.run(
            ["ip", "netns", "exec", ONE, "ping", "-n", "-c", "5", "-i", "0.01", "-w", "1", ADDRESSES[TWO]],
            check=False,
            capture_output=True,
            text=True,
        ).stdout
        assert received(text) == 0, counted
    finally:
        host.vnet("route", "del", str(rule))
    assert received(ping(5)) == 5
    host.balance()


def test_no_frame_by_an_old_rule(host: Host):
    """Rules change under traffic, VNET_TEST_CHANGES times. After each acknowledgement none comes by the old one."""
    with refused_datagrams(ONE, TWO, ADDRESSES[TWO]) as frames:
        change_rules(host, {"dst": MACS[TWO], "to": "interface one"}, frames)
    host.balance()


def test_a_container_that_invents_flows_harms_nobody(host: Host):
    """100 000 new flows: the kernel takes those of its share, vnetd's memory stays, and others' flows go on."""
    resident = lambda: int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{host.daemon.pid}/status").read_text())[1])  # noqa: E731
    before = resident()
    words = ["ip", "netns", "exec", ONE, sys.executable, str(PROGRAMS / "invent_flows.py"), "eth0", MACS[TWO], "100000"]
    subprocess.run(words, check=True)
    status = host.ask("status")["kernel"]
    assert status["flows"] <= 4096 + 100
    assert resident() - before < 64 << 10, "KiB"
    assert received(ping(20)) == 20
    host.balance()
    # It waits while it invents more addresses than it may, and its device's queue overflows.
    host.request("PATCH", "/v1/interfaces/one", {"learning_limit": 100})
    taken = host.frames()[1]
    subprocess.run(words, check=True)
    assert host.frames()[1] - taken < 50_000
    host.request("PATCH", "/v1/interfaces/one", {"learning_limit": 10_000})
    wait_until("an end of the wait", lambda: received(ping(20)) == 20, 60)
    host.balance()


def test_a_storm_is_limited(host: Host):
    """The storm limit counts flooded frames as on any other interface; known flows are not concerned."""
    before = host.ask("stats")
    host.request("PATCH", "/v1/interfaces/one", {"storm_limit": 10})
    words = ["ip", "netns", "exec", ONE, "ping", "-n", "-q", "-b", "-c", "200", "-l", "200", "-w", "1", "10.77.0.255"]
    subprocess.run(words, check=False, capture_output=True)
    assert received(ping(100)) == 100
    (dropped,) = (
        {reason: count - then["drops"][reason] for reason, count in now["drops"].items()}
        for now, then in zip(host.ask("stats")["ports"], before["ports"], strict=True)
        if now["name"] == "one"
    )
    assert dropped["storm_limit"] >= 100
    host.request("PATCH", "/v1/interfaces/one", {"storm_limit": 20000})
    host.balance()


def test_a_rate_is_limited_by_the_kernel(host: Host):
    """A token bucket at the container's device holds for frames that pass no dispatcher."""
    assert received(ping(20)) == 20
    bucket = "tbf rate 1mbit burst 10000 limit 10000"
    run(["tc", "-n", ONE, "qdisc", "add", "dev", "eth0", "root", *bucket.split()])
    sender = "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\ns.setsockopt(1, socket.SO_SNDBUF, 1 << 20)\n"
    sender += f"for _ in range(200): s.sendto(bytes(1400), ({ADDRESSES[TWO]!r}, 9))"
    before = counter(TWO, "UdpNoPorts")
    try:
        # The bucket and its queue hold 14 datagrams; it refills by less than one each 10 ms.
        moved = host.grows(7, lambda: run(["ip", "netns", "exec", ONE, sys.executable, "-c", sender]))
        assert 7 <= counter(TWO, "UdpNoPorts") - before < 150
        assert moved[1] < 30, "the kernel forwards"
    finally:
        run(["tc", "-n", ONE, "qdisc", "del", "dev", "eth0", "root"])
    assert received(ping(20)) == 20
    # A limit of the interface is vnetd's.
    up = 'vnet_interface_kernel_path{interface="one"}'
    host.vnet("interface", "set", "one", "rate_limit=1000")
    assert paths(host) == [("vnetd", "it has a rate limit"), ("kernel", "")]
    assert host.ask("status")["kernel"]["interfaces"] == 1
    assert host.metric(up) == 0
    assert host.grows(20, lambda: ping(20))[1] >= 20
    host.vnet("interface", "set", "one", "rate_limit=0")
    assert paths(host) == [("kernel", ""), ("kernel", "")]
    assert host.metric(up) == 1


def test_a_renamed_device_is_noted(host: Host):
    for before, after, notes in (
        ("eth0", "lan0", [f"device 'eth0' is not in netns {ONE} any more: it was renamed or moved"]),
        ("lan0", "eth0", []),
    ):
        for words in (f"{before} down", f"{before} name {after}", f"{after} up"):
            run(["ip", "-n", ONE, "link", "set", *words.split()])
        wait_until("the note", lambda notes=notes: host.ask("interface", "list")[0].get("notes", []) == notes, 60)
    wait_until("pings", lambda: received(ping(1, "-w", "1")) == 1, 60)


def counter(namespace: str, name: str) -> int:
    """A counter of a container's network stack."""
    text = run(["ip", "netns", "exec", namespace, "nstat", "-asz", name])
    return int(re.search(rf"{name}\s+(\d+)", text)[1])


def both(name: str) -> int:
    """A counter of both containers."""
    return counter(ONE, name) + counter(TWO, name)


def received_by_stack() -> int:
    """IP packets that the network stack of vnetd's namespace has received."""
    lines = run(["ip", "netns", "exec", HOST, "cat", "/proc/net/snmp"]).splitlines()
    names, values = (line.split() for line in lines if line.startswith("Ip:"))
    return int(values[names.index("InReceives")])


def failed_start(host: Host) -> str:
    """The message of a vnetd that cannot start: it must leave the devices and flows of the killed one as they are."""
    file = host.directory / "bad.toml"
    file.write_text((host.directory / "vnet.toml").read_text().replace("[dispatch]", "[dispatch]\ncpus = [999]"))
    words = ["ip", "netns", "exec", HOST, str(daemon.binaries() / "vnetd"), "--config", str(file)]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done
    return done.stderr


def test_established_flows_outlive_vnetd(host: Host):
    """Killed, a failed start, started again, under pings every 5 ms and a TCP stream: no ping is lost.

    VNET_TEST_KILLS sets the number of kills, and asserts that vnetd has both interfaces again within a second.
    """
    kills = int(os.environ.get("VNET_TEST_KILLS", "3"))
    back = []
    with contextlib.ExitStack() as ended:

        def start(namespace: str, *words: str) -> subprocess.Popen[str]:
            command = ["ip", "netns", "exec", namespace, *words]
            process = ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            ended.callback(process.kill)
            return process

        start(TWO, "iperf3", "--server")
        listening = ["ip", "netns", "exec", TWO, "ss", "-Hltn", "sport = :5201"]
        wait_until("iperf3 to listen", lambda: run(listening) != "", 20)
        # The namespace's counters have the segments of earlier tests, too.
        late_before, again_before = counter(ONE, LATE), counter(ONE, AGAIN)
        stream = start(ONE, *f"iperf3 --client {ADDRESSES[TWO]} --bitrate 200M --time 3600 --json".split())
        pings = start(ONE, *f"ping -n -q -i 0.005 -W 5 {ADDRESSES[TWO]}".split())
        for _ in range(kills):
            # Until the kernel forwards: a renewal later.
            wait_until("the flow", lambda: host.ask("trace", MACS[ONE], MACS[TWO]).get("kernel_ms"), 30)
            time.sleep(0.3)
            host.end(signal.SIGKILL)
            time.sleep(0.1)
            assert "cannot pin a dispatcher to CPU 999" in failed_start(host)
            began = time.monotonic()
            host.start()
            wait_until("both", lambda: {port["path"] for port in host.ask("interface", "list")} == {"kernel"}, 30)
            back.append(time.monotonic() - began)
        assert stream.poll() is None, "the TCP connection has ended"
        pings.send_signal(signal.SIGINT)
        text = pings.communicate(timeout=60)[0]
        stream.send_signal(signal.SIGINT)
        sums = json.loads(stream.communicate(timeout=60)[0])["end"]["sum_sent"]
    print(f"{kills} kills: {text.splitlines()[-2]}; {sums['bytes']} bytes, {sums['retransmits']} retransmitted,")
    # What was sent again and had arrived after all was late; the rest was lost.
    late = counter(ONE, LATE) - late_before
    names = "TcpExtTCPOFOQueue", "TcpExtTCPLostRetransmit", "TcpExtTCPTimeouts", "TcpExtTCPSpuriousRTOs"
    lost = counter(ONE, AGAIN) - again_before - late
    print(f"late {late}, lost {lost};", {name: both(name) for name in names})
    print("back after", " ".join(f"{seconds:.2f}" for seconds in sorted(back)), "s")
    assert_none_lost(text)
    assert lost <= 1, "the receiver's word for the last one may be on its way"
    if "VNET_TEST_KILLS" in os.environ:
        # A run at length, on a quiet machine.
        assert max(back) <= 1
    assert host.grows(100, lambda: ping(100))[1] < 30
    host.balance()


def test_without_vnetd_no_frame_reaches_the_hosts_stack(host: Host):
    assert received(ping(5)) == 5
    host.end(signal.SIGKILL)
    before = received_by_stack()
    assert received(ping(10)) == 10
    broadcast = [
        "ip",
        "netns",
        "exec",
        ONE,
        "ping",
        "-n",
        "-q",
        "-b",
        "-c",
        "10",
        "-i",
        "0.01",
        "-w",
        "1",
        "10.77.0.255",
    ]
    subprocess.run(broadcast, check=False, capture_output=True)
    assert received_by_stack() == before
    host.start()
    assert received(ping(5)) == 5


def test_flows_end_when_nobody_takes_over(host: Host):
    """After outlive_s the kernel forwards no more. The next vnetd does, and removes what its configuration lacks."""
    config = host.directory / "vnet.toml"
    text = config.read_text()
    host.end(signal.SIGKILL)
    config.write_text(text.replace("outlive_s = 300", "outlive_s = 2"))
    host.start()
    assert received(ping(5)) == 5
    host.end(signal.SIGKILL)
    words = ["ip", "netns", "exec", ONE, "ping", "-n", "-q", "-c", "1", "-W", "1", ADDRESSES[TWO]]
    wait_until("the end", lambda: subprocess.run(words, check=False, capture_output=True).returncode == 1, 60)
    host.start()
    assert received(ping(5, "-w", "10")) == 5
    host.end(signal.SIGKILL)
    one = text.replace("outlive_s = 300", "outlive_s = 2").rsplit("[[interface]]", 1)[0]
    config.write_text(one)
    host.start()
    wait_until("the device to go", lambda: devices(TWO) == ["lo"], 60)
    assert host.end(signal.SIGTERM) == 0
    assert not (host.directory / "bpf/vnet").exists()
    config.write_text(text)
    host.start()
    for namespace in (ONE, TWO):
        run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
    wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)


def test_without_a_bpf_file_system(host: Host):
    """The one that vnetd mounts ends with its mount namespace. Filters stay at the devices all the same."""
    assert host.end(signal.SIGTERM) == 0
    config = host.directory / "vnet.toml"
    text = config.read_text()
    (host.directory / "none").mkdir()
    config.write_text(text.replace('/bpf"', '/none"'))
    host.start()
    for namespace in (ONE, TWO):
        run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
    wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)
    assert received(ping(5)) == 5
    host.end(signal.SIGKILL)
    before = received_by_stack()
    assert received(ping(20)) == 20
    assert received_by_stack() == before
    host.start()
    assert received(ping(20)) == 20
    assert host.grows(50, lambda: ping(50))[1] < 30
    assert host.end(signal.SIGTERM) == 0
    config.write_text(text)
    host.start()
    assert devices(ONE) == ["lo", "eth0"]


def test_off_is_a_tap(host: Host):
    """The last test: it stops vnetd, which leaves nothing behind. Of one that has died, the next removes the rest."""
    assert len(devices(HOST)) == 7, "the loopback, two devices for each container, two for headroom"
    assert host.end(signal.SIGTERM) == 0
    assert devices(HOST) == ["lo"]
    assert devices(ONE) == ["lo"]
    assert not (host.directory / "bpf/vnet").exists()
    host.start()
    host.end(signal.SIGKILL)
    config = host.directory / "vnet.toml"
    config.write_text(config.read_text().replace("[dispatch]", '[dispatch]\nkernel_path = "off"'))
    host.start()
    assert devices(HOST) == ["lo"]
    assert not (host.directory / "bpf/vnet").exists()
    for namespace in (ONE, TWO):
        run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
    (one, two) = host.ask("interface", "list")
    assert one["path"] == two["path"] == "vnetd"
    assert one["path_reason"] == "kernel_path is off"
    wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)
    moved = host.grows(50, lambda: ping(50))
    assert moved[1] >= 100


def paths(host: Host) -> list[tuple[str, str]]:
    return [(port["path"], port.get("path_reason", "")) for port in host.ask("interface", "list")]


def test_one_without(host: Host):
    """One interface without the kernel path, by its setting; then both, because /proc/sys cannot be written."""
    assert host.end(signal.SIGTERM) == 0
    config = host.directory / "vnet.toml"
    text = config.read_text().replace('[dispatch]\nkernel_path = "off"', "[dispatch]")
    config.write_text(text + 'kernel_path = "off"\n')
    host.start()
    assert paths(host) == [("kernel", ""), ("vnetd", "its kernel_path is off")]
    words = [str(daemon.binaries() / "vnet"), "--socket", f"{host.directory}/control.sock", "doctor"]
    doctor = subprocess.run(words, check=False, capture_output=True, text=True).stdout
    assert "kernel-path   not for interface two: its kernel_path is off" in doctor
    host.end(signal.SIGTERM)
    config.write_text(text)
    # In the mount namespace that 'ip netns exec' has made.
    script = "mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys; exec $0 $*"
    host.start("sh", "-c", script)
    for path, reason in paths(host):
        assert path == "vnetd"
        assert reason.startswith("cannot keep the host's network stack away from device")
    assert devices(HOST) == ["lo"]
    for namespace in (ONE, TWO):
        run(["ip", "-n", namespace, "address", "add", f"{ADDRESSES[namespace]}/24", "dev", "eth0"])
    wait_until("the containers to reach each other", lambda: received(ping(1, "-w", "1")) == 1, 30)
