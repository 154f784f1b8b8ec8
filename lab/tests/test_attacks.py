"""Guests, front ends, local users and peers attack a vnetd: what others notice (docs/lab-notes/2026-11-26-attacks.md).

By default each attack runs briefly, and all that does not depend on the machine's speed is checked: vnetd lives, frames
balance, everything arrives once and undamaged. With VNET_TEST_ATTACKS=strict, or a number of rounds, it is measured:
alone, beside the attack, alone again, and so on. Medians must meet the bar.
"""

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Iterator

import attacks
import pytest
from attacks import ATTACKS, CONSOLE, GUESTS, HTTP, Attack, Seen, beside, see
from checks import assert_balanced, wait_for_path, wait_for_state
from conftest import MakeLab

from vnetlab import daemon, lab, process
from vnetlab.topology import Topology

P99_MAX, THROUGHPUT_MIN = 2.0, 0.9
"""The bars: beside the attack, in units of what it is alone."""
STRICT = attacks.rounds()
PHASE = (5_000, 0.001, 2.0) if STRICT else (60, 0.005, 0.3)
"""Pings, their interval, and the duration of the stream."""
PINNED = f"\n[dispatch]\ncpus = [{attacks.BYSTANDERS}]\n"
REFUSED = "connections for sealed links, the last from"
LEARNED = 12_000
"""Addresses known when `GET /v1/learned` is tried: the shares of an interface and of a link are nearly full."""


@contextlib.contextmanager
def processors() -> Iterator[None]:
    """Where attacks are measured, this process and what it starts have the attackers' processor."""
    before = os.sched_getaffinity(0)
    if STRICT:
        assert before >= {attacks.BYSTANDERS, attacks.OTHERS}, f"processors {before}: two are needed"
        os.sched_setaffinity(0, {attacks.OTHERS})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Iterator[Topology]:
    """Two hosts with sealed links; the first also has two interfaces for front ends, and ports for clients."""
    with processors():
        topology = make_lab(vms=0, containers=3, sealed=True)
        running = prepare(topology)
        yield topology
        for program in running:
            program.kill()
            program.wait()


def prepare(topology: Topology) -> list[subprocess.Popen]:
    """Starts both vnetds with their settings, fills tables, and starts the bystanders' servers."""
    if STRICT:
        far = topology.find("h2")
        far.file(".toml").write_text(far.file(".toml").read_text() + PINNED)
        process.stop(far.file(".pid"))
        lab.start_daemon(topology, far)
    near = topology.find("h1")
    file = near.file(".toml")
    text = file.read_text().replace(
        "[control]\n", f'[control]\nhttp = "127.0.0.1:{HTTP}"\nconsole = "127.0.0.1:{CONSOLE}"\n'
    )
    for name, mac in GUESTS.items():
        socket = topology.state / f"{name}.vhost"
        text += f'\n[[interface]]\nname = "{name}"\nkind = "vhost-user"\nsocket = "{socket}"\nmac = "{mac}"\n'
    file.write_text(text + (PINNED if STRICT else ""))
    process.stop(near.file(".pid"))
    lab.start_daemon(topology, near)
    for host in topology.hosts:
        wait_for_state(host, "up", 60)
    for name in ("h1c2", "h2c1"):
        wait_for_path(topology.find("h1c1"), topology.find(name).address, 60)
    attacks.fill_tables(topology, LEARNED)
    return attacks.prepare(topology)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_others_do_not_suffer(topology: Topology, attack: Attack):
    ends = topology.find(attack.source), topology.find(attack.destination)
    before, log, begin = attacks.pids(topology), topology.find("h1").file(".log"), time.monotonic()
    earlier = log.read_text().count(REFUSED)
    alone = [see(*ends, *PHASE)]
    attacked = []
    for _ in range(STRICT or 1):
        with beside(topology, attack):
            attacked.append(see(*ends, *PHASE))
        alone.append(see(*ends, *PHASE))
    assert attacks.pids(topology) == before, "vnetd lives"
    assert_balanced(topology)
    assert daemon.ask(topology.find("h1"), "status")
    lines = log.read_text().count(REFUSED) - earlier
    assert lines <= time.monotonic() - begin + 2, f"{lines} lines about refused connections, at most one a second"
    # After many handshakes that failed, connections are refused at once.
    assert lines or attack.name != "garbage", "refused connections are logged"
    if STRICT:
        judge(attack, alone, attacked)


def judge(attack: Attack, alone: list[Seen], attacked: list[Seen]) -> None:
    """Prints the row of the lab note and all phases, and asserts the bars."""
    before, beside = median(alone), median(attacked)
    p99, throughput = beside.p99_us / before.p99_us, beside.bps / before.bps
    print("\n|", " | ".join([attack.name, str(before), str(beside), f"{p99:.2f}", f"{throughput:.2f}"]), "|")
    for name, phases in (("alone", alone), ("attacked", attacked)):
        print(f"  {name}:", "; ".join(map(str, phases)))
    assert p99 <= P99_MAX, f"p99: {beside}, alone {before}"
    assert throughput >= THROUGHPUT_MIN, f"throughput: {beside}, alone {before}"


def median(phases: list[Seen]) -> Seen:
    return Seen(statistics.median(seen.p99_us for seen in phases), statistics.median(seen.bps for seen in phases))
