"""A guest with huge pages: vnetd maps its memory like any other guest's."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import assert_balanced, reaches, wait_for_path

from vnetlab import guest, lab, machine, measure, process
from vnetlab.image import ensure_image
from vnetlab.topology import Settings, Topology

NAME = "test-huge-pages"
OVERCOMMIT = Path("/proc/sys/vm/nr_overcommit_hugepages")
GUEST_PAGES = 128
"""Number of huge pages of 2 MiB each."""


def surplus() -> int:
    """Surplus huge pages of the whole machine: the overcommit limit applies to all of them."""
    return int(re.search(r"HugePages_Surp:\s+(\d+)", Path("/proc/meminfo").read_text())[1])


@pytest.fixture(scope="module")
def topology() -> Iterator[Topology]:
    """A lab of one host whose guest's memory consists of huge pages, allocated on demand."""
    lab.down(NAME)
    before = int(OVERCOMMIT.read_text())
    topology = lab.prepare(Settings(name=NAME, hosts=1))
    try:
        OVERCOMMIT.write_text(str(surplus() + GUEST_PAGES))
        (host,), machine = topology.hosts, topology.find("h1v1")
        lab.start_daemon(topology, host)
        words = guest.command(topology, machine, ensure_image(lab.CACHE), memory="hugetlb=on,hugetlbsize=2M")
        guest.launch(machine, words)
        guest.wait(machine)
        yield topology
    finally:
        lab.down(NAME)
        OVERCOMMIT.write_text(str(before))


def test_frames_flow(topology: Topology):
    source, destination = topology.find("h1c1"), topology.find("h1v1")
    wait_for_path(source, destination.address)
    assert reaches(source, destination.address, "-s", "1472")
    assert reaches(destination, source.address, "-s", "1472")
    assert measure.throughput(source, destination, seconds=1) > 10e6
    assert measure.throughput(destination, source, seconds=1) > 10e6


def test_vnetd_has_the_huge_pages_mapped(topology: Topology):
    pid = process.find(topology.hosts[0].file(".pid"))
    lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if "_Hugetlb:" in line)
    assert kib >= 2048, "at least the huge page with the rings"


def test_every_frame_is_accounted_for(topology: Topology):
    assert machine.execute(topology.find("h1v1"), "echo alive") == "alive\n"
    assert_balanced(topology)
