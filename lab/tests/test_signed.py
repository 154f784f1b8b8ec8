"""Sealed hosts that find each other through a store: records need their writer's certificate and signature."""

import base64
import json
import re
import subprocess
import time

import pytest
from checks import (
    assert_balanced,
    assert_restart_is_short,
    metrics,
    pinging,
    readdressed,
    sent_to,
    silent,
    wait_for_path,
)
from conftest import MakeLab
from sealed_links import hang_up

from vnetlab import daemon, lab, process, store
from vnetlab.run import run, wait_until
from vnetlab.topology import Node, Topology

CONTEXT = b"vnet overlay record 1\0"
EVIL = "52:54:00:66:66:66"


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    topology = make_lab(hosts=3, vms=0, store=True, sealed=True)
    wait_for_all(topology)
    return topology


def wait_for_all(topology: Topology) -> None:
    """Waits until all containers can ping each other."""
    for source in topology.machines():
        for destination in topology.machines():
            if source != destination:
                wait_for_path(source, destination.address, 20)


@pytest.fixture
def paths(topology: Topology) -> list[tuple[Node, Node]]:
    find = topology.find
    return [(find("h1c1"), find("h2c1")), (find("h3c1"), find("h1c1")), (find("h2c1"), find("h3c1"))]


class Client:
    """A hostile client of the store, whose certificate is valid for one MAC address."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.folder = daemon.keys(topology)
        run([str(daemon.binaries() / "vnet"), "keys", "issue", "evil", "--dir", str(self.folder), "--macs", EVIL])
        self.signed = time.time_ns() // 1000

    def write(self, key: str, record: dict) -> None:
        """Writes a signed record; a host record includes the client's own certificate."""
        self.signed += 1
        value = dict(record)
        if "/hosts/" in key:
            pem = (self.folder / "evil.pem").read_text().splitlines()
            value["certificate"] = ["".join(line for line in pem if not line.startswith("-"))]
        body = json.dumps(value | {"signed": self.signed}, separators=(",", ":"))[:-1]
        message = CONTEXT + key.encode() + b"\0" + body.encode()
        command = ["openssl", "dgst", "-sha256", "-sign", str(self.folder / "evil.key")]
        signature = subprocess.run(command, input=message, capture_output=True, check=True).stdout
        text = f'{body},"signature":"{base64.b64encode(signature).decode()}"}}'
        store.control(self.topology, "put", key, text)


def alarms(host: Node) -> dict[str, int]:
    return {alarm["name"]: alarm["count"] for alarm in daemon.ask(host, "overlay")["alarms"]}


def raw(topology: Topology, key: str) -> str:
    """The raw value of a key."""
    return store.control(topology, "get", "--print-value-only", key).rstrip("\n")


def links(host: Node) -> set[str]:
    return {link["name"] for link in daemon.ask(host, "link", "list")}


def all_up(host: Node) -> bool:
    """Whether all links of a host are up and sealed."""
    return all(link["state"] == "up" and link["peer"] for link in daemon.ask(host, "link", "list"))


def test_sealed_hosts_find_each_other(topology: Topology):
    """All records are signed, host records carry certificates, and no host raises an alarm."""
    for key, record in store.records(topology).items():
        assert {"signed", "signature"} <= record.keys(), key
        assert ("certificate" in record) == ("/hosts/" in key)
    for host in topology.hosts:
        assert not {"untrusted", "replayed", "forged", "garbage"} & alarms(host).keys(), alarms(host)
        wait_until(f"{host.name}'s links to be up", lambda host=host: all_up(host), 5)


def test_a_hosts_address_changes_and_its_peer_restarts(topology: Topology):
    """Sealed links keep their keys and follow the new address; a peer that restarts meanwhile finds the host."""
    wait_for_all(topology)
    moving, peer = topology.hosts[1], topology.hosts[0]
    source, destination = topology.find("h2c1"), topology.find("h1c1")
    agreed = links_by_name(peer)["h2"]["keys_s"]
    with readdressed(moving) as address:
        begin = time.monotonic()
        wait_for_path(source, destination.address, 60)
        took = time.monotonic() - begin
        key = f"/vnet/v1/1/hosts/{moving.name}"
        wait_until("the store to know", lambda: store.records(topology)[key]["address"] == f"{address}:9000", 10)
        time.sleep(0.5)
        assert links_by_name(peer)["h2"]["remote"] == f"{address}:9000"
        assert links_by_name(peer)["h2"]["keys_s"] >= agreed, "new keys"
        kept = topology.state / "state" / "overlay-h1.json"
        wait_until("h1 to have kept signed records", lambda: f"{address}:9000" in kept.read_text(), 10)
        assert kept.read_text().count("signature") == 4
        process.stop(peer.file(".pid"))
        lab.start_daemon(topology, peer)
        wait_for_path(source, destination.address, 60)
    wait_for_all(topology)
    assert took <= 2, took
    for host in topology.hosts:
        assert not {"untrusted", "replayed", "forged", "garbage"} & alarms(host).keys(), alarms(host)


def links_by_name(host: Node) -> dict[str, dict]:
    return {link["name"]: link for link in daemon.ask(host, "link", "list")}


def test_forged_records_change_no_route(topology: Topology, paths: list[tuple[Node, Node]]):
    """Records for another host's MAC or name, and records copied to another key: no wrong route, but alarms."""
    one, two, three = (topology.find(name) for name in ("h1c1", "h2c1", "h3c1"))
    station, home = f"/vnet/v1/1/interfaces/{two.mac}", "/vnet/v1/1/hosts/h2"
    own = "/vnet/v1/1/hosts/evil"
    client = Client(topology)
    address = {"address": "10.78.0.66:9000", "instance": 66}
    replayed = raw(topology, f"/vnet/v1/1/interfaces/{one.mac}")

    def right() -> bool:
        toward = [sent_to(topology.hosts[0], one, two.mac), sent_to(topology.hosts[2], three, two.mac)]
        return toward == [["link h2"]] * 2 and {"h2", "h3"} <= links(topology.hosts[0])

    assert right()
    with pinging(*paths, interval_s=0.005, seconds=6):
        # The client is a host like others, but its certificate authorizes one MAC address only.
        client.write(own, address)
        wait_until("h1 to know the client", lambda: "evil" in links(topology.hosts[0]), 5)
        client.write(station, {"host": "evil", "sequence": 2})
        assert right()
        client.write(station, {"host": "h3", "sequence": 3})
        assert right()
        client.write(home, address)
        assert right()
        store.control(topology, "put", station, replayed)
        assert right()
        store.control(topology, "put", station, '{"host":"h3","sequence":2}')
        assert right()
        client.write(f"/vnet/v1/1/interfaces/{EVIL}", {"host": "evil", "sequence": 1})
        wait_until("its own address to be accepted", lambda: sent_to(topology.hosts[0], one, EVIL) == ["link evil"], 5)
    for host in topology.hosts:
        assert alarms(host)["untrusted"] >= 5, alarms(host)
    assert "forged" in alarms(topology.hosts[1])
    counted = re.search(r'^vnet_overlay_alarms_total\{alarm="untrusted"\} (\d+)$', metrics(topology.hosts[0]), re.M)
    assert counted
    assert int(counted[1]) >= 5
    client.write(own, address | {"withdrawn": True})
    wait_until("the client to be gone", lambda: "evil" not in links(topology.hosts[0]), 5)


def test_replayed_records_are_ignored(topology: Topology, paths: list[tuple[Node, Node]]):
    """Replays old records, even after the current ones were deleted."""
    one, two, three = (topology.find(name) for name in ("h1c1", "h2c1", "h3c1"))
    mac = "52:54:00:77:00:03"
    extra = ["interface", "add", "extra", "--kind", "tap", "--device", "extra", "--mac", mac, "--mtu", "1500"]
    station, home = f"/vnet/v1/1/interfaces/{mac}", "/vnet/v1/1/hosts/h3"
    kept = [(home, raw(topology, home))]
    for host, guest in ((topology.hosts[1], two), (topology.hosts[2], three)):
        daemon.vnet(host, *extra, "--netns", guest.namespace)
        wait_until("h1 to know", lambda host=host: sent_to(topology.hosts[0], one, mac) == [f"link {host.name}"], 5)
        kept.append((station, raw(topology, station)))
        if host == topology.hosts[1]:
            daemon.vnet(host, "interface", "del", "extra")
    process.stop(topology.hosts[2].file(".pid"))
    lab.start_daemon(topology, topology.hosts[2])
    daemon.vnet(topology.hosts[2], *extra, "--netns", three.namespace)
    wait_until("h1 to know", lambda: sent_to(topology.hosts[0], one, mac) == ["link h3"], 5)
    wait_for_all(topology)
    try:
        with pinging(*paths, interval_s=0.005, seconds=6):
            for round in range(6):
                for key, value in kept[:2]:
                    if round % 2:
                        store.control(topology, "del", key)
                    store.control(topology, "put", key, value)
                    assert sent_to(topology.hosts[0], one, mac) == ["link h3"]
                    assert "h3" in links(topology.hosts[0])
        assert alarms(topology.hosts[0])["replayed"] == 12
    finally:
        daemon.vnet(topology.hosts[2], "interface", "del", "extra")


def test_a_certificate_is_replaced_under_traffic(topology: Topology, paths: list[tuple[Node, Node]]):
    """The host signs all its records again, and no frame is lost."""
    host = topology.hosts[1]
    keys = ["/vnet/v1/1/hosts/h2", f"/vnet/v1/1/interfaces/{topology.find('h2c1').mac}"]
    before = [store.records(topology)[key] for key in keys]
    troubled = [alarms(other).get("untrusted", 0) for other in topology.hosts]
    with pinging(*paths, interval_s=0.005, seconds=4):
        daemon.issue(topology, host)
        hang_up(host)

        def replaced() -> bool:
            after = [store.records(topology)[key] for key in keys]
            return all(new["signed"] > old["signed"] for new, old in zip(after, before, strict=True))

        wait_until("both records to be signed anew", replaced, 3, poll_s=0.05)
        assert store.records(topology)[keys[0]]["certificate"] != before[0]["certificate"]
    assert [alarms(other).get("untrusted", 0) for other in topology.hosts] == troubled
    # A host that starts now accepts the re-signed records.
    process.stop(topology.hosts[2].file(".pid"))
    lab.start_daemon(topology, topology.hosts[2])
    wait_for_all(topology)
    assert "untrusted" not in alarms(topology.hosts[2])


def test_a_restart_after_a_kill_is_short(topology: Topology):
    """Keys are agreed on at once."""
    assert_restart_is_short(topology, topology.hosts[1], topology.find("h2c1"), topology.find("h1c1"))
    wait_for_all(topology)


def test_a_revoked_host_is_refused(topology: Topology):
    one, three = topology.find("h1c1"), topology.find("h3c1")
    near, far = topology.hosts[0], topology.hosts[2]
    run([str(daemon.binaries() / "vnet"), "keys", "revoke", far.name, "--dir", str(daemon.keys(topology))])
    wait_until("h1 to have no link to h3", lambda: far.name not in links(near), 5)
    assert sent_to(near, one, three.mac) != [f"link {far.name}"]
    assert silent(one, three.address)
    assert "revoked" in str(daemon.ask(near, "overlay")["alarms"])
    # With a new certificate the host is accepted again.
    daemon.issue(topology, far)
    hang_up(far)
    wait_for_all(topology)


def test_every_frame_is_accounted_for(topology: Topology):
    assert_balanced(topology)
