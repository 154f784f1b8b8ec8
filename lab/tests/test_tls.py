"""Stream links with TLS: no clear text on the underlay; a revoked host is refused until it has a new certificate."""

import pytest
from checks import link, reaches, silent, wait_for_path, wait_for_state
from conftest import MakeLab
from sealed_links import assert_hidden, hang_up

from vnetlab import daemon, measure
from vnetlab.run import run
from vnetlab.topology import Topology

TLS_BPS_MIN = 100e6


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """A lab whose links are streams with TLS."""
    topology = make_lab(vms=0, sealed=True, encapsulation="stream", mtu=9000)
    for host in topology.hosts:
        wait_for_state(host, "up")
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
    return topology


def test_the_underlay_shows_no_clear_text(topology: Topology):
    one, other = topology.find("h1c1"), topology.find("h2c1")
    assert_hidden(topology)
    assert reaches(one, other.address, "-s", "8972", "-M", "do"), "frames larger than the path MTU"
    for source, destination in ((one, other), (other, one)):
        assert measure.throughput(source, destination, seconds=1) > TLS_BPS_MIN


def test_a_revoked_certificate_closes_the_stream(topology: Topology):
    near, far = topology.hosts
    run([str(daemon.binaries() / "vnet"), "keys", "revoke", far.name, "--dir", str(daemon.keys(topology))])
    hang_up(near)
    wait_for_state(near, "down", 15)
    assert "revoked" in link(near)["reason"]
    assert silent(topology.find("h1c1"), topology.find("h2c1").address)
    # With a new certificate the host is accepted again.
    daemon.issue(topology, far)
    hang_up(far)
    wait_for_state(near, "up", 20)
    wait_for_path(topology.find("h1c1"), topology.find("h2c1").address)
