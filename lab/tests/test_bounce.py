"""The interconnect between containers whose firewalls discard UDP: by TCP, in clear text and sealed, and MPI on top."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checks import wait_for_path
from conftest import MakeLab
from rdma_perf import measured, perf_server
from sealed_links import underlay_capture

from vnetlab import machine
from vnetlab.daemon import REPOSITORY
from vnetlab.run import run, wait_until
from vnetlab.topology import Node, Topology

PROGRAM = REPOSITORY / "fabric" / "tests" / "mpi.c"
DISSECTOR = REPOSITORY / "wireshark" / "vnet.lua"


@pytest.fixture(scope="module", params=[False, True], ids=["clear", "sealed"])
def lab(make_lab: MakeLab, request: pytest.FixtureRequest) -> Topology:
    topology = make_lab(vms=0, sealed=request.param)
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


@contextmanager
def without_udp(node: Node) -> Iterator[None]:
    """The container's firewall lets no datagram in or out."""
    machine.execute(node, "nft", "add", "table", "inet", "firewall")
    try:
        for hook in ("input", "output"):
            machine.execute(node, "nft", f"add chain inet firewall {hook} {{ type filter hook {hook} priority 0; }}")
            machine.execute(node, "nft", f"add rule inet firewall {hook} meta l4proto udp counter drop")
        yield
    finally:
        machine.execute(node, "nft", "delete", "table", "inet", "firewall")


@pytest.mark.parametrize("blocked", ["h1c1", "h2c1"])
def test_bytes_take_tcp_where_datagrams_are_discarded(lab: Topology, blocked: str):
    one, other = lab.find("h1c1"), lab.find("h2c1")
    usual = "sealed" if lab.settings.sealed else "udp"
    assert measured(one, other)["attachment"] == usual
    with without_udp(lab.find(blocked)):
        found = measured(one, other)
        assert found["attachment"] == ("sealed" if lab.settings.sealed else "bounce")
        assert int(found["bounces"]) == 1
        assert float(found["gbit_s"]) > 0
    assert measured(one, other)["attachment"] == usual


def test_packets_return_to_udp_when_the_firewall_lets_them(lab: Topology):
    """A client that begins by TCP, while the firewall is there, goes on by UDP."""
    one, other = lab.find("h1c1"), lab.find("h2c1")
    with perf_server(other) as name:
        words = machine.namespace_command(one, ["vnet-rdma-perf", "client", name, "1048576", "0.2,8"])
        with (
            without_udp(other),
            subprocess.Popen(words, env=machine.environment(one), stdout=subprocess.PIPE, text=True) as client,
        ):
            wait_until("the connection", lambda: is_connected(one, 7000), 60)
            machine.execute(other, "nft", "flush", "ruleset")
            machine.execute(other, "nft", "add", "table", "inet", "firewall")
            text, _ = client.communicate(timeout=120)
    found = dict(zip(text.split()[::2], text.split()[1::2], strict=True))
    assert (found["bounces"], found["attachment"]) == ("0", "sealed" if lab.settings.sealed else "udp")


def is_connected(node: Node, port: int) -> bool:
    return bool(machine.execute(node, "ss", "-Htn", "state", "established", f"( dport = :{port} )").strip())


def test_the_user_can_leave_udp_out(lab: Topology):
    one, other = lab.find("h1c1"), lab.find("h2c1")
    found = measured(one, other, "env", "VNET_RDMA_ATTACHMENT=bounce")
    assert int(found["bounces"]) == 1


def test_ranks_exchange_messages_without_udp(lab: Topology, tmp_path: Path):
    run(["mpicc", "-O1", "-o", str(tmp_path / "mpi"), str(PROGRAM)])
    command = [REPOSITORY / "lab" / "lab", "mpirun", "--name", lab.settings.name, "-n", "2", "--"]
    with without_udp(lab.find("h1c1")), without_udp(lab.find("h2c1")):
        done = subprocess.run([*command, tmp_path / "mpi"], check=False, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "2 ranks agree\n"), done.stderr


def test_wireshark_shows_the_packets_inside(lab: Topology, tmp_path: Path):
    """Magic, and packets or what is sealed."""
    one, other = lab.find("h1c1"), lab.find("h2c1")
    capture = tmp_path / "container.pcap"
    with underlay_capture(one) as seen:
        measured(one, other, "env", "VNET_RDMA_ATTACHMENT=bounce", size=1000)
    capture.write_bytes(seen[0])
    # Port 7000 is that of another protocol.
    shown = ["tshark", "-X", f"lua_script:{DISSECTOR}", "-o", "tcp.try_heuristic_first:TRUE", "-r", str(capture)]
    shown += ["-Y", "vnet_rdma_tcp", "-T", "fields"]
    fields = ["vnet_rdma_tcp.magic", "vnet_rdma.kind", "vnet_rdma.seal.kind"]
    lines = run([*shown, *(word for field in fields for word in ("-e", field))]).splitlines()
    magics, clear, sealed = zip(*(line.split("\t") for line in lines), strict=True)
    assert sum("vnet-rdma-bounce" in magic for magic in magics) >= 2, lines[:10]
    (used, unused) = (sealed, clear) if lab.settings.sealed else (clear, sealed)
    assert sum(bool(kind) for kind in used) > 100, lines[:10]
    assert not any(unused), lines[:10]
