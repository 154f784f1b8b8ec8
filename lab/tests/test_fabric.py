"""MPI over the libfabric provider, between containers of two hosts: past TCP, over the overlay.

With VNET_TEST_HPCC=1 also the HPC Challenge suite, which takes a minute on an idle machine.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import MakeLab
from sealed_links import underlay_capture

from vnetlab import machine
from vnetlab.bench import mpi
from vnetlab.bench.contenders import absent
from vnetlab.daemon import REPOSITORY
from vnetlab.run import run
from vnetlab.topology import Topology

PROGRAM = REPOSITORY / "fabric" / "tests" / "mpi.c"
DISSECTOR = REPOSITORY / "wireshark" / "vnet.lua"
HELLO, WELCOME, MESSAGE, WRITE, OFFER, PULL, END = 0, 1, 5, 6, 7, 8, 10
"""Kinds of packets."""
ORDER = 50
"""Rows of the suite's matrices: they take no time, starting its parts does."""


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> Topology:
    return make_lab(vms=0)


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


if "VNET_TEST_HPCC" in os.environ:

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_the_hpc_challenge_passes_all_checks(lab: Topology, ranks: int):
        assert absent("hpcc", "hpcc") is None
        nodes = [lab.find("h1c1"), lab.find("h2c1")] * (ranks // 2)
        report = mpi.challenge_report(nodes, ORDER, mpi.FABRIC)
        assert mpi.challenge_figures(report)["pingpong_bytes_per_s"] > 0
        assert "FAILED" not in report
        assert "0 tests completed and failed residual checks" in report
        assert set(re.findall(r"Found (\d+) errors", report)) == {"0"}


def test_wireshark_shows_packets_inside_the_links_datagrams(lab: Topology, tmp_path: Path):
    near, far = lab.find("h1c1"), lab.find("h2c1")
    name = f"{far.address}:7000"
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


def underlay_packets(lab: Topology) -> int:
    """Packets that host 1 sent to host 2."""
    text = run(["ip", "-n", lab.find("h1").namespace, "-s", "link", "show", "eth0"])
    found = re.search(r"TX:.*\n\s*\d+\s+(\d+)", text)
    assert found, text
    return int(found[1])
