"""Live migration without a store: the hosts' routes follow the machine, by command, console and API."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from checks import assert_balanced, sent_to, wait_for_path
from conftest import MakeLab

from vnetlab import daemon, migration
from vnetlab.run import run
from vnetlab.topology import Kind, Node, Topology


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Three hosts with links in their files, each with a container and a virtual machine."""
    return make_lab(hosts=3, vms=1)


def by_command(host: Node, mac: str, to: str) -> None:
    """Moves routes with `vnet route move`."""
    text = daemon.vnet(host, "route", "move", mac, to)
    assert to in text, text


def by_console(host: Node, mac: str, to: str) -> None:
    """Moves routes with the control language, which says edge for a link."""
    lines = host.file(".lines")
    lines.write_text(f"ROUTE MOVE {mac} {to.replace('link', 'edge')}\n")
    text = daemon.vnet(host, "console", str(lines))
    assert "OK route" in text, text


def by_api(host: Node, mac: str, to: str) -> None:
    """Moves routes with a request."""
    body = json.dumps({"dst": mac, "to": to})
    words = ["curl", "-sf", "-X", "PATCH", "-d", body, "--unix-socket", str(host.file(".sock"))]
    moved = json.loads(run([*words, "http://vnetd/v1/routes"]))
    assert [route["to"] for route in moved] == [to], moved


def watch(host: Node, container: Node, mac: str, begun: threading.Event, over: threading.Event) -> list[list[str]]:
    """Where a host sends frames for an address, until `over`: each place once, in order. `begun`: it has looked."""
    seen: list[list[str]] = []
    while not over.is_set():
        ports = sent_to(host, container, mac)
        if seen[-1:] != [ports]:
            seen.append(ports)
        begun.set()
    return seen


def test_routes_follow_a_machine(topology: Topology):
    """Each host's routes move in one step: a host sees one place at any time, first the old one, then the new one."""
    vm, containers = topology.find("h1v1"), topology.machines(Kind.CONTAINER)
    first, second, third = topology.hosts
    for host in (second, third):
        daemon.vnet(host, "route", "add", "--dst", vm.mac, "--to", f"link {first.name}")
    for container in containers:
        wait_for_path(container, vm.address)
    here = f"interface {vm.name}"
    ways = (
        {by_command: (second, here), by_console: (third, f"link {second.name}")},
        {
            by_api: (second, f"link {first.name}"),
            by_command: (third, f"link {first.name}"),
        },
    )
    for destination, moves in zip((second, first), ways, strict=True):
        if destination == first:
            # The machine leaves: nothing may name its interface then.
            daemon.vnet(second, "route", "del", str(daemon.ask(second, "route", "list")[0]["index"]))
        migration.migrate(topology, vm, destination)
        if destination == first:
            daemon.vnet(second, "route", "add", "--dst", vm.mac, "--to", f"link {third.name}")
        for move, (host, to) in moves.items():
            container = containers[topology.hosts.index(host)]
            old, begun, over = sent_to(host, container, vm.mac), threading.Event(), threading.Event()
            with ThreadPoolExecutor() as pool:
                seen = pool.submit(watch, host, container, vm.mac, begun, over)
                try:
                    assert begun.wait(60)
                    move(host, vm.mac, to)
                finally:
                    over.set()
            places = [[to]] if old == [to] else [old, [to]]
            assert seen.result() in (places, places[:1]), (host.name, move.__name__)
            assert sent_to(host, container, vm.mac) == [to]
        for container in containers:
            wait_for_path(container, vm.address, 60)
    assert_balanced(topology)
