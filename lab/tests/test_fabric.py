"""The interconnect and MPI over its provider: over the overlay, in memory of one host, with a virtual machine."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import PROGRAMS, MakeLab
from rdma_perf import LITTLE_LOCKED, endpoint_metric, measured, perf_server, rdma_metric
from sealed_links import hang_up, underlay_capture

from vnetlab import daemon, machine, process
from vnetlab.bench import mpi
from vnetlab.daemon import REPOSITORY
from vnetlab.lab import start_daemon
from vnetlab.run import run, wait_until
from vnetlab.topology import Node, Topology

PROGRAM = REPOSITORY / "fabric" / "tests" / "mpi.c"
DISSECTOR = REPOSITORY / "wireshark" / "vnet.lua"
HELLO, WELCOME, MESSAGE, WRITE, OFFER, PULL, END = 0, 1, 5, 6, 7, 8, 10
"""Kinds of packets."""
PERF = "vnet-rdma-perf"
LOCKS = """
import ctypes, mmap, os
libc, memory = ctypes.CDLL(None, use_errno=True), mmap.mmap(-1, 16 << 20)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
failed = libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(16 << 20))
print(os.strerror(ctypes.get_errno()) if failed else "locked")
"""
"""A program that locks 16 MiB, or says why it cannot."""
ORDER = 50
"""Rows of the suite's matrices: they take no time, starting its parts does."""


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> Topology:
    return make_lab(vms=0, containers=2)


def mpirun(lab: Topology, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `lab mpirun` as users do."""
    command = [REPOSITORY / "lab" / "lab", "mpirun", "--name", lab.settings.name, *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_ranks_in_two_containers_exchange_messages_of_all_sizes(lab: Topology, tmp_path: Path):
    run(["mpicc", "-O1", "-o", str(tmp_path / "mpi"), str(PROGRAM)])
    before = underlay_packets(lab)
    done = mpirun(lab, "-n", "4", "--", str(tmp_path / "mpi"))
    assert (done.returncode, done.stdout) == (0, "4 ranks agree\n"), done.stderr
    # Packets of one message count as one: they are segmented by the last device, if at all.
    assert underlay_packets(lab) - before > 100, "the ranks' messages crossed the hosts' network"
    done = mpirun(lab, "--", "false")
    assert done.returncode != 0, "the program's failure is passed on"


def test_the_printed_environment_makes_a_program_use_the_provider(lab: Topology, tmp_path: Path):
    """As docs/interconnect.md tells users to: two ranks of one container, whose messages the provider carries."""
    run(["mpicc", "-O1", "-o", str(tmp_path / "mpi"), str(PROGRAM)])
    start = f"mpirun --allow-run-as-root --oversubscribe -np 2 {tmp_path / 'mpi'}"
    script = f'eval "$({daemon.binaries() / "vnet"} mpi-env open-mpi)" && {start}'
    node = lab.find("h1c1")
    assert machine.execute(node, script, timeout_s=120) == "2 ranks agree\n"
    # The provider is what they use: without an interface for it they cannot start.
    status, text = machine.attempt(node, f"export FI_VNET_INTERFACE=none0; {script}", timeout_s=120)
    assert status != 0, text
    assert "FI_VNET_INTERFACE names one" in text, text


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_hpc_challenge_passes_all_checks(lab: Topology, ranks: int):
    nodes = [lab.find("h1c1"), lab.find("h2c1")] * (ranks // 2)
    report = mpi.challenge_report(nodes, ORDER, mpi.FABRIC)
    assert mpi.challenge_figures(report)["pingpong_bytes_per_s"] > 0
    assert "FAILED" not in report
    assert "0 tests completed and failed residual checks" in report
    assert set(re.findall(r"Found (\d+) errors", report)) == {"0"}


def test_wireshark_shows_packets_inside_the_links_datagrams(lab: Topology, tmp_path: Path):
    near, far = lab.find("h1c1"), lab.find("h2c1")
    # At port 7000 Wireshark has AFS, and takes HELLO for that in 0.2 s of every 4.3, by the node's time of start.
    name = f"{far.address}:17000"
    words = machine.namespace_command(far, ["timeout", "60", "vnet-rdma-perf", "server", name, "once"])
    with underlay_capture(lab.hosts[0]) as seen:
        server = subprocess.Popen(words, env=machine.environment(far), stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline().strip() == f"{name}/0"
        machine.execute(near, "vnet-rdma-perf", "client", f"{name}/0", "30000", "0.1")
        assert server.wait(60) == 0
    file = tmp_path / "capture.pcap"
    file.write_bytes(seen[0])
    words = ["tshark", "-X", f"lua_script:{DISSECTOR}", "-r", str(file), "-Y", "vnet && vnet_rdma", "-T", "fields"]
    lines = run([*words, "-e", "vnet.type", "-e", "vnet_rdma.kind", "-e", "ip.dst"]).splitlines()
    kinds = {int(kind) for line in lines for kind in line.split("\t")[1].split(",")}
    assert kinds >= {HELLO, WELCOME, MESSAGE, WRITE, OFFER, PULL, END}, kinds
    assert any(far.address in line for line in lines), "addresses of the overlay, inside"


def test_containers_of_one_host_use_shared_memory_by_themselves(lab: Topology):
    """Nothing is locked in memory."""
    frames = daemon.ask(lab.hosts[0], "stats")["balance"]["in"]
    assert measured(lab.find("h1c1"), lab.find("h1c2"), *LITTLE_LOCKED)["attachment"] == "same-host"
    # A write of 1 MiB would take 16 super-frames.
    assert daemon.ask(lab.hosts[0], "stats")["balance"]["in"] - frames < 1000
    assert measured(lab.find("h1c1"), lab.find("h1c2"), "env", "VNET_RDMA_MEETING=")["attachment"] == "udp"
    assert measured(lab.find("h1c1"), lab.find("h2c1"))["attachment"] == "udp", "another host has another daemon"


@pytest.mark.parametrize("attachment", ["process", "bounce"])
def test_registered_memory_is_not_locked(lab: Topology, attachment: str):
    """Both ends register 4 MiB between hosts, and may lock next to nothing."""
    near, far = lab.find("h1c1"), lab.find("h2c1")
    prefix = [*LITTLE_LOCKED, "env", f"VNET_RDMA_ATTACHMENT={attachment}"]
    limited = machine.execute(near, *LITTLE_LOCKED, sys.executable, "-c", LOCKS, timeout_s=60)
    assert limited.strip() == "Cannot allocate memory", "the limit holds"
    with perf_server(far, *prefix) as name:
        words = machine.execute(near, *prefix, PERF, "client", name, str(4 << 20), "0.2", timeout_s=120).split()
    seen = dict(zip(words[::2], words[1::2], strict=True))
    assert float(seen["gbit_s"]) > 0
    assert seen["attachment"] in ("udp", "bounce")


def test_large_transfers_between_hosts_take_a_stream(lab: Topology):
    near, far = lab.find("h1c1"), lab.find("h2c1")
    # A path that loses segments at first gets none; each run has a new channel.
    assert any(measured(near, far)["streams"] == "1" for _ in range(5))
    assert measured(near, far, "env", "VNET_RDMA_STREAMS=off")["streams"] == "0"
    assert measured(near, far, size=200_000)["streams"] == "0", "not worth one"


@pytest.mark.parametrize("loss", ["", "numgen random mod 50 == 0"], ids=["dead path", "2 % lost"])
def test_a_stream_gives_way_to_udp_where_tcp_does_badly(lab: Topology, loss: str):
    near, far = lab.find("h1c1"), lab.find("h2c1")
    nft = ["ip", "netns", "exec", far.namespace, "nft"]
    words = ["timeout", "120", "vnet-rdma-perf", "client", "", "1048576", "0.2,12"]
    try:
        with perf_server(far) as words[4]:
            command = machine.namespace_command(near, words)
            with subprocess.Popen(command, env=machine.environment(near), stdout=subprocess.PIPE, text=True) as client:
                connected = ("ss", "-tnH", "state", "established", "dport", "=", ":7000")
                wait_until("a stream", lambda: machine.execute(near, *connected).strip(), 60)
                run([*nft, "add table inet bad; add chain inet bad in { type filter hook input priority 0; }"])
                run([*nft, f"add rule inet bad in tcp dport 7000 {loss} drop"])
                text = client.communicate(timeout=120)[0]
                assert client.returncode == 0, text
    finally:
        run([*nft, "delete table inet bad"])
    figures = text.split()
    assert dict(zip(figures[::2], figures[1::2], strict=True))["streams"] == "0", text


def test_applications_outlive_a_killed_vnetd(lab: Topology):
    """The memory it gave ends with it; packets take the network again as soon as it is there."""
    host, near = lab.hosts[0], lab.find("h1c1")
    with perf_server(lab.find("h1c2")) as name:
        words = machine.namespace_command(near, ["timeout", "120", "vnet-rdma-perf", "client", name, "1048576", "3"])
        with subprocess.Popen(words, env=machine.environment(near), stdout=subprocess.PIPE, text=True) as client:
            wait_until("the client to use a ring", lambda: has_ring(near), 60)
            os.kill(process.find(host.file(".pid")), signal.SIGKILL)
            wait_until("vnetd to end", lambda: process.find(host.file(".pid")) is None, 60)
            start_daemon(lab, host)
            assert client.wait(60) == 0
            assert "latency_us" in client.stdout.read()


def test_vnetd_runs_the_engine_where_the_network_allows_it(lab: Topology):
    """By `vnet-rdma-perf` between two hosts: the client's engine in vnetd, then the server's."""
    host, near, far = lab.hosts[0], lab.find("h1c1"), lab.find("h2c1")
    by_daemon = ("env", "VNET_RDMA_ATTACHMENT=daemon")
    server = [*by_daemon, "vnet-rdma-perf", "server", f"{near.address}:7001", "once"]
    # vnetd begins to listen in a container up to a second after it has opened the interface.
    wait_until("vnetd to listen", lambda: "cannot reach it" not in machine.attempt(near, *server)[1], 60)
    refused = machine.attempt(near, *server)
    assert refused[0] != 0
    assert "daemon_engine = true" in refused[1]
    text = host.file(".toml").read_text()
    host.file(".toml").write_text(text.replace("[[network]]\nid = 1\n", "[[network]]\nid = 1\ndaemon_engine = true\n"))
    hang_up(host)
    client = [*by_daemon, "vnet-rdma-perf", "client"]
    unreachable = f"{near.address}:7002/0"
    wait_until(
        "network 1 to allow it",
        lambda: "daemon_engine" not in machine.attempt(near, "timeout", "1", *client, unreachable, "1", "0.1")[1],
        60,
    )
    seen = measured(lab.find("h1c1"), lab.find("h2c1"), *LITTLE_LOCKED, *by_daemon, size=4 << 20)
    assert seen["attachment"] == "daemon"
    with perf_server(near, *by_daemon) as name:
        machine.execute(far, "vnet-rdma-perf", "client", name, "1048576", "0.2", timeout_s=120)
    assert rdma_metric(host, near, "out_bytes_total") > 1 << 20
    # Two applications of one vnetd need no network.
    assert rdma_metric(host, near, "same_host_bytes_total") == 0
    neighbour = lab.find("h1c2")
    frames = daemon.ask(host, "stats")["balance"]["in"]
    with perf_server(neighbour, *by_daemon) as name:
        seen = machine.execute(near, *client, name, "1048576", "0.2", timeout_s=120).split()
    assert dict(zip(seen[::2], seen[1::2], strict=True))["attachment"] == "same-host"
    assert rdma_metric(host, near, "same_host_bytes_total") > 1 << 20
    assert daemon.ask(host, "stats")["balance"]["in"] - frames < 1000

    def is_throttled() -> bool:
        with perf_server(far) as name:
            machine.execute(near, *client, name, "16384", "0.1", timeout_s=120)
        return rdma_metric(host, near, "throttled_turns_total") > 0

    daemon.ask(host, "interface", "set", near.name, "rate_limit=20")
    try:
        wait_until("the interface's rate to hold", is_throttled, 60)
    finally:
        daemon.ask(host, "interface", "set", near.name, "rate_limit=0")
    # A killed application leaves nothing behind.
    words = machine.namespace_command(
        near, ["setpriv", "--pdeathsig", "KILL", *by_daemon, "vnet-rdma-perf", "server", f"{near.address}:7003"]
    )
    with subprocess.Popen(words, env=machine.environment(near), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().strip() == f"{near.address}:7003/0"
        wait_until("its memory to be counted", lambda: rdma_metric(host, near, "registered_bytes") > 0, 60)
        assert endpoint_metric(host, near, "weight") == [(f"{near.address}:7003", "0", 100)]
        machine.execute(far, "timeout", "60", "vnet-rdma-perf", "client", f"{near.address}:7003/0", "8", "0.2,0.2")
        wait_until("its packets", lambda: endpoint_metric(host, near, "packets_total")[0][2] > 100, 60)
        server.kill()
    wait_until("its memory to be revoked", lambda: rdma_metric(host, near, "registered_bytes") == 0, 60)
    wait_until("its end to be counted", lambda: rdma_metric(host, near, "processes") == 0, 60)
    assert endpoint_metric(host, near, "weight") == []
    assert (rdma_metric(host, near, "refusals_total"), rdma_metric(host, near, "broken_total")) == (0, 0)


def test_programs_take_vnetds_engine_by_themselves_where_the_network_prefers_it(lab: Topology):
    host, near, far = lab.hosts[0], lab.find("h1c1"), lab.find("h2c1")
    file = host.file(".toml")
    before = file.read_text()
    allows = re.sub(r"^daemon_engine = true\n", "", before, flags=re.MULTILINE)
    allows = allows.replace("[[network]]\nid = 1\n", "[[network]]\nid = 1\ndaemon_engine = true\n")
    try:
        file.write_text(allows.replace("daemon_engine = true\n", "daemon_engine = true\nprefer_daemon_engine = true\n"))
        hang_up(host)
        wait_until("vnetd to offer it", lambda: measured(near, far)["attachment"] == "daemon", 60)
        assert measured(near, far, "env", "VNET_RDMA_ATTACHMENT=process")["attachment"] == "udp"
        file.write_text(allows)
        hang_up(host)
        wait_until("vnetd to take it back", lambda: measured(near, far)["attachment"] == "udp", 60)
    finally:
        file.write_text(before)
        hang_up(host)


def test_another_tenant_gets_no_shared_memory(lab: Topology):
    host, namespace = lab.hosts[0], f"{lab.settings.name}-other"
    add = ["interface", "add", "--kind", "tap", "--netns", namespace]
    with host.file(".toml").open("a") as file:
        file.write("\n[[network]]\nid = 7\n")
    hang_up(host)
    run(["ip", "netns", "add", namespace])
    try:
        wait_until(
            "network 7 to be declared",
            lambda: machine.attempt(host, "vnet", *add, "other", "--device", "other", "--network", "7")[0] == 0,
            60,
        )
        with at_the_meeting_point(lab.find("h1c1").namespace) as (name, _), at_the_meeting_point(namespace) as (_, ask):
            assert ask(f"join {name}") == "absent"
            daemon.vnet(host, *add, "shared", "--device", "shared", "--network", "1")
            wait_until("the new network to count", lambda: ask(f"join {name}") == "ring", 60)
            daemon.vnet(host, "interface", "del", "shared")
            assert ask("end") == "ended", "the configuration forbids it again"
            assert ask(f"join {name}") == "absent"
    finally:
        for interface in ("other", "shared"):
            machine.attempt(host, "vnet", "interface", "del", interface)
        run(["ip", "netns", "del", namespace])


@contextmanager
def at_the_meeting_point(namespace: str) -> Iterator[tuple[str, Callable[[str], str]]]:
    """A process in a namespace: its name, and a function that gives it a command and returns the answer."""
    words = ["ip", "netns", "exec", namespace, sys.executable, str(PROGRAMS / "meeting.py")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:

        def ask(command: str) -> str:
            print(command, file=running.stdin, flush=True)
            return running.stdout.readline().strip()

        yield running.stdout.readline().strip(), ask
        running.stdin.close()


def has_ring(node: Node) -> bool:
    """Whether a process in the container has mapped the memory of a ring."""
    pids = run(["ip", "netns", "pids", node.namespace]).split()
    return any("memfd:vnet-rdma" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)


def test_ranks_in_containers_and_a_virtual_machine(make_lab: MakeLab, tmp_path: Path):
    """Replaces the lab of the tests before."""
    topology = make_lab(hosts=1, containers=2, vms=1, mpi=True)
    run(["mpicc", "-O1", "-o", str(tmp_path / "mpi"), str(PROGRAM)])
    done = mpirun(topology, "-n", "3", "--", str(tmp_path / "mpi"))
    assert (done.returncode, done.stdout) == (0, "3 ranks agree\n"), done.stderr
    where = tmp_path / "where"
    where.write_text("#!/bin/sh\nhostname\n")
    where.chmod(0o755)
    done = mpirun(topology, "-n", "3", "--tcp", "--", str(where))
    # The rank beside mpirun keeps this machine's name.
    assert {"h1c2", "h1v1"} < set(done.stdout.split()), (done.stdout, done.stderr)


def underlay_packets(lab: Topology) -> int:
    """Packets that host 1 sent to host 2."""
    text = run(["ip", "-n", lab.find("h1").namespace, "-s", "link", "show", "eth0"])
    found = re.search(r"TX:.*\n\s*\d+\s+(\d+)", text)
    assert found, text
    return int(found[1])
