"""Packets of established connections between two hosts leave without a tunnel, and take it where they cannot."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import PROGRAMS
from kernel_host import Host
from kernel_pair import ADDRESSES, FAR, MAKES_DATAGRAMS, ONE, TRANSLATED_PORT, WIRE_PORT, Pair, pair
from packet_count import Packets

from vnetlab import daemon
from vnetlab.run import run, wait_until

PROGRAM = str(PROGRAMS / "questions.py")
PORT = 7000
LEASE_S = 3
"""How long a conversation is translated after the other host has accepted it last."""
PROTOCOLS = ("tcp", "udp")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    assert MAKES_DATAGRAMS, "programs take packets at the underlay's device since Linux 6.6"
    with pair(f"kt{os.getpid()}", tmp_path_factory.mktemp("kernel-translation")) as made, answering(made):
        yield made


@contextlib.contextmanager
def answering(hosts: Pair) -> Iterator[None]:
    """The far container answers questions."""
    words = hosts.inside(FAR, sys.executable, PROGRAM, "answer", ADDRESSES[FAR], str(PORT))
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def asking(hosts: Pair, protocol: str) -> Iterator[dict]:
    """The first container asks while the context lasts; then the yielded dictionary has what came of it."""
    words = hosts.inside(ONE, sys.executable, PROGRAM, "ask", protocol, ADDRESSES[FAR], str(PORT))
    said: dict = {}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "asking\n"
            yield said
            out, _ = process.communicate("", timeout=60)
            assert process.returncode == 0
            said.update(json.loads(out))
        finally:
            process.kill()


def translated(hosts: Pair) -> list[int]:
    """Conversations that leave each host without a tunnel."""
    return [host.ask("status")["kernel"]["translated"] for host in hosts.hosts]


def tunnel_reason(hosts: Pair, index: int) -> str | None:
    """Why packets of a host's connections take the tunnel."""
    (link,) = hosts.hosts[index].ask("link", "list")
    return link.get("tunnel_reason")


def wait_for_translation(hosts: Pair) -> None:
    """Waits until both directions are translated."""
    wait_until("both directions to be translated", lambda: min(translated(hosts)) >= 1, 60)


def lost(hosts: Pair) -> int:
    """Packets that a host did not know."""
    ports = [port for host in hosts.hosts for port in host.ask("stats")["ports"]]
    return sum(port["discards"]["unknown_index"] for port in ports)


def take_over(host: Host) -> None:
    """Another vnetd takes the place of a host's."""
    words = ["ip", "netns", "exec", host.namespace, str(daemon.binaries() / "vnetd"), "--take-over"]
    with (host.directory / "log").open("ab") as output:
        heir = subprocess.Popen([*words, "--config", str(host.directory / "vnet.toml")], stdout=output, stderr=output)
    assert host.daemon.wait(60) == 0
    host.daemon = heir


def packets(hosts: Pair, protocol: str, port: int, seconds: float = 1) -> int:
    """Packets to a port that arrive at the second host in this time."""
    with Packets(hosts.hosts[1].namespace, "eth0", f"{protocol} dst port {port}") as seen:
        time.sleep(seconds)
        return seen.new()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_established_conversations_need_no_tunnel(hosts: Pair, protocol: str):
    with asking(hosts, protocol) as said:
        wait_for_translation(hosts)
        assert packets(hosts, protocol, TRANSLATED_PORT) > 50
        assert packets(hosts, "udp", WIRE_PORT) < 20, "trials, and neighbours' probes"
        assert [tunnel_reason(hosts, index) for index in (0, 1)] == [None, None]
        assert hosts.hosts[0].metric("vnet_kernel_translated{}") >= 1
    assert said["answered"] > 100
    assert said["missed"] == 0
    assert lost(hosts) == 0
    hosts.balance()


def test_what_is_unused_is_forgotten(hosts: Pair):
    wait_until("the conversations to end", lambda: max(translated(hosts)) == 0, 120)


def test_a_host_may_refuse(hosts: Pair):
    """By its setting; neither direction is translated then."""
    first = hosts.hosts[0]
    assert first.end(signal.SIGTERM) == 0
    config = first.directory / "vnet.toml"
    text = config.read_text()
    config.write_text(text.replace("[dispatch]", '[dispatch]\ntranslate = "off"'))
    try:
        first.start()
        run(["ip", "-n", hosts.containers[ONE], "address", "replace", f"{ADDRESSES[ONE]}/24", "dev", "eth0"])
        hosts.wait_for_wire()
        with asking(hosts, "tcp") as said:
            time.sleep(2 * LEASE_S)
            assert translated(hosts) == [0, 0]
            assert tunnel_reason(hosts, 0) == "translate is off"
            assert tunnel_reason(hosts, 1) == "the other host takes no packets without one"
            assert packets(hosts, "tcp", TRANSLATED_PORT) == 0
        assert said["answered"] > 100
    finally:
        assert first.end(signal.SIGTERM) == 0
        config.write_text(text)
        first.start()
        run(["ip", "-n", hosts.containers[ONE], "address", "replace", f"{ADDRESSES[ONE]}/24", "dev", "eth0"])
        hosts.wait_for_wire()


@contextlib.contextmanager
def blocked(hosts: Pair, expression: str) -> Iterator[None]:
    """The underlay loses what an expression of tcpdump selects of the first host's packets."""
    lines = run(["tcpdump", "-ddd", "-y", "EN10MB", expression]).splitlines()
    # Returns TC_ACT_SHOT in place of the length that tcpdump takes.
    code = ",".join([lines[0], *(line.replace("6 0 0 262144", "6 0 0 2") for line in lines[1:]), ""])
    tc = ["ip", "netns", "exec", hosts.hosts[0].namespace, "tc"]
    run([*tc, "qdisc", "replace", "dev", "eth0", "clsact"])
    try:
        adds = [*tc, "filter", "add", "dev", "eth0", "egress", "protocol", "ip"]
        run([*adds, "bpf", "direct-action", "bytecode", code])
        yield
    finally:
        run([*tc, "filter", "del", "dev", "eth0", "egress"])


def test_a_firewall_leaves_them_in_the_tunnel(hosts: Pair):
    """Of the protocol that it drops; nothing is lost."""
    with blocked(hosts, f"udp dst port {TRANSLATED_PORT}"):
        with asking(hosts, "udp") as said:
            wait_until("the other direction", lambda: translated(hosts)[1] >= 1, 60)
            lost = f"packets to UDP port {TRANSLATED_PORT} do not arrive at the other host"
            wait_until("the reason", lambda: tunnel_reason(hosts, 0) == lost, 60)
            assert translated(hosts)[0] == 0
            assert f"by a tunnel: {lost}" in hosts.hosts[0].vnet("link", "list")
        assert said["missed"] == 0
        with asking(hosts, "tcp") as said:
            wait_for_translation(hosts)
        assert said["answered"] > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_firewall_that_comes_later(hosts: Pair, protocol: str):
    """Packets are lost until the lease ends; then the tunnel has them, and nothing arrives damaged."""
    with asking(hosts, protocol) as said:
        wait_for_translation(hosts)
        with blocked(hosts, f"{protocol} dst port {TRANSLATED_PORT}"):
            wait_until("the tunnel", lambda: translated(hosts)[0] == 0, 60)
            time.sleep(2)
        wait_for_translation(hosts)
    # TCP doubles its patience.
    assert said["silence_s"] < 20
    assert said["missed"] <= 2 * LEASE_S + 2


def test_what_loses_some_conversations_alone(hosts: Pair):
    """Proofs arrive, but no other packets: a conversation that the other host does not see takes the tunnel."""
    with asking(hosts, "udp") as said:
        wait_for_translation(hosts)
        with blocked(hosts, f"udp dst port {TRANSLATED_PORT} and not src port 0"):
            wait_until("the tunnel", lambda: translated(hosts)[0] == 0, 60)
            time.sleep(2 * LEASE_S)
            assert translated(hosts)[0] == 0
    assert 0 < said["missed"] <= 2 * LEASE_S + 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_they_outlive_a_hosts_vnetd(hosts: Pair, protocol: str):
    """Each vnetd is killed, for longer than a lease and for a moment, and started again: all questions are answered."""
    with asking(hosts, protocol) as said:
        wait_for_translation(hosts)
        for index, seconds in ((1, LEASE_S + 2), (0, LEASE_S + 2), (1, 0.2), (0, 0.2)):
            host = hosts.hosts[index]
            host.end(signal.SIGKILL)
            time.sleep(seconds)
            host.start()
            wait_for_translation(hosts)
    assert said["missed"] == 0
    assert said["silence_s"] < 5
    assert lost(hosts) == 0
    hosts.balance()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_next_vnetd_goes_on(hosts: Pair, protocol: str):
    """Each vnetd is replaced by another one while it runs."""
    with asking(hosts, protocol) as said:
        wait_for_translation(hosts)
        for host in hosts.hosts:
            take_over(host)
            wait_for_translation(hosts)
    assert said["missed"] == 0
    hosts.balance()


def test_many_conversations_at_once(hosts: Pair):
    """More than a guest's share: some take the tunnel, and all arrive."""
    server = hosts.inside(FAR, "iperf3", "--server", "--one-off")
    with subprocess.Popen(server, stdout=subprocess.DEVNULL) as process:
        listening = hosts.inside(FAR, "ss", "-Hltn", "sport = :5201")
        wait_until("iperf3 to listen", lambda: run(listening) != "", 20)
        client = hosts.inside(ONE, "iperf3", "--client", ADDRESSES[FAR], "--time", "6", "--parallel", "100", "--json")
        done = json.loads(run(client))
        assert process.wait(60) == 0
    assert done["end"]["sum_received"]["bytes"] > 0
    assert lost(hosts) == 0
    hosts.balance()
