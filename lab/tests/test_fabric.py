"""MPI over the libfabric provider, between containers of two hosts: past TCP, over the overlay."""

import os
import re
from pathlib import Path

import pytest
from conftest import MakeLab

from vnetlab import daemon, machine
from vnetlab.run import run
from vnetlab.topology import Topology

PROGRAM = Path(__file__).parents[2] / "fabric" / "tests" / "mpi.c"
OPEN_MPI = {
    "plm": "rsh",
    "pml": "cm",
    "mtl": "ofi",
    "btl": "^uct,openib",
    "osc": "^ucx",
    "oob_tcp_if_include": "10.77.0.0/16",
    "mpi_yield_when_idle": "1",
}


@pytest.fixture(scope="module")
def lab(make_lab: MakeLab) -> Topology:
    return make_lab(vms=0)


def test_ranks_in_two_containers_exchange_messages_of_all_sizes(lab: Topology, tmp_path: Path):
    library = daemon.binaries() / "libvnet_fi.so"
    assert library.exists(), "run 'make build', or cargo build -p vnet-fabric"
    (tmp_path / "libvnet-fi.so").symlink_to(library)
    run(["mpicc", "-O1", "-o", str(tmp_path / "mpi"), str(PROGRAM)])
    ends = [lab.find("h1c1"), lab.find("h2c1")]
    # Open MPI starts its daemons by a script in place of ssh.
    enter = [f'{node.address}) exec ip netns exec {node.namespace} sh -c "$*" ;;' for node in ends]
    agent = tmp_path / "agent"
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *enter, "esac", "exit 1", ""]))
    agent.chmod(0o755)
    parameters = OPEN_MPI | {"plm_rsh_agent": str(agent)}
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--map-by", "node", "-np", "4"]
    words += ["--host", ",".join(f"{node.address}:2" for node in ends)]
    words += [word for name, value in parameters.items() for word in ("--mca", name, value)]
    # On a host with more cores the ranks would not share them; here waiting ones must not keep others from running.
    words += ["-x", "FI_PROVIDER=vnet", "-x", f"FI_PROVIDER_PATH={tmp_path}", "-x", f"PATH={os.environ['PATH']}"]
    before = underlay_packets(lab)
    shown = machine.execute(ends[0], *words, str(tmp_path / "mpi"), timeout_s=120)
    assert shown == "4 ranks agree\n"
    assert underlay_packets(lab) - before > 1000, "the ranks' messages crossed the hosts' network"


def underlay_packets(lab: Topology) -> int:
    """Packets that host 1 sent to host 2."""
    text = run(["ip", "-n", lab.find("h1").namespace, "-s", "link", "show", "eth0"])
    found = re.search(r"TX:.*\n\s*\d+\s+(\d+)", text)
    assert found, text
    return int(found[1])
