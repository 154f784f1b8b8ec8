"""Any interface MTU over any underlay MTU, IPv4 and IPv6."""

import pytest
from checks import assert_balanced, reaches, wait_for_path
from conftest import MakeLab

from vnetlab import measure
from vnetlab.topology import Topology

HEADERS = 28
"""Length of the IPv4 and ICMP headers: ping's size is the MTU without them."""


@pytest.fixture(
    scope="module",
    params=[
        {"mtu": 9000},
        {"mtu": 65535},
        {"mtu": 1500, "underlay_mtu": 576},
        {"mtu": 9000, "underlay_mtu": 1280, "ipv6": True},
        {"mtu": 1500, "encapsulation": "vnet"},
    ],
    ids=lambda settings: "-".join(f"{name}-{value}" for name, value in settings.items()),
)
def topology(make_lab: MakeLab, request: pytest.FixtureRequest) -> Topology:
    return make_lab(**request.param)


@pytest.mark.parametrize(
    ("source", "destination"),
    [("h1v1", "h2v1"), ("h1c1", "h2c1"), ("h1c1", "h2v1"), ("h2c1", "h1v1"), ("h1c1", "h1v1")],
)
def test_frames_of_every_size_arrive(topology: Topology, source: str, destination: str):
    one, other = topology.find(source), topology.find(destination)
    wait_for_path(one, other.address)
    largest = min(topology.mtu(one), topology.mtu(other)) - HEADERS
    for size in {0, 500, 1372, 1373, 1473, largest - 1, largest}:
        if size <= largest:
            assert reaches(one, other.address, "-M", "do", "-s", str(size)), f"{size} bytes of payload"


@pytest.mark.parametrize(("source", "destination"), [("h1v1", "h2v1"), ("h1c1", "h2c1")])
def test_tcp_streams(topology: Topology, source: str, destination: str):
    assert measure.throughput(topology.find(source), topology.find(destination), seconds=1) > 10e6


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
