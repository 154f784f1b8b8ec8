"""`vnetd --take-over` with guests that nothing emulates: how long their vhost-user ports stand still.

Emulated guests (test_take_over_guests.py) stand still by themselves for longer than a take-over takes. Here a program
is both front end and driver. VNET_TEST_TAKE_OVERS=100 runs the long test, and the same traffic without a take-over.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checks import assert_balanced, wait_for_state
from conftest import PROGRAMS, MakeLab
from take_overs import assert_none_lost_between, both, take_over
from traffic import longest_silence, silences

from vnetlab import lab, process
from vnetlab.topology import Topology

TAKE_OVERS = int(os.environ.get("VNET_TEST_TAKE_OVERS", "4"))
GAP_S = float(os.environ.get("VNET_TEST_TAKE_OVER_GAP_S", "60"))
"""Longest time between two arrivals during a take-over; on an idle machine it is below 50 ms."""
SETTLE_S = 0.3
END_S = 30


@pytest.fixture(scope="module")
def topology(make_lab: MakeLab) -> Topology:
    """Two hosts, each with two interfaces for front ends."""
    topology = make_lab(vms=0, containers=1)
    for number, host in enumerate(topology.hosts, 1):
        text = host.file(".toml").read_text()
        for end in (1, 2):
            path, mac = socket(topology, number, end), f"52:54:00:01:0f:{number}{end}"
            text += f'\n[[interface]]\nname = "e{end}"\nkind = "vhost-user"\nsocket = "{path}"\nmac = "{mac}"\n'
        host.file(".toml").write_text(text)
        process.stop(host.file(".pid"))
        lab.start_daemon(topology, host)
    for host in topology.hosts:
        wait_for_state(host, "up", 60)
    return topology


def socket(topology: Topology, host: int, end: int) -> Path:
    return topology.state / f"h{host}e{end}.vhost"


@dataclass
class Traffic:
    """What has become of the frames, for each direction: how many were sent, and when each arrived."""

    sent: list[int]
    arrived: list[dict[int, float]]

    def times(self) -> list[list[float]]:
        """Times of arrival in each direction."""
        return [sorted(arrived.values()) for arrived in self.arrived]

    def lost(self) -> list[int]:
        """Frames that did not arrive, in each direction."""
        return [sent - len(arrived) for sent, arrived in zip(self.sent, self.arrived, strict=True)]


@contextlib.contextmanager
def traffic(topology: Topology, file: Path) -> Iterator[Traffic]:
    """Frames in both directions while the context lasts."""
    sockets = [socket(topology, *end) for end in ((1, 1), (2, 1), (2, 2), (1, 2))]
    command = [sys.executable, str(PROGRAMS / "steady_front_ends.py"), str(file), *map(str, sockets)]
    seen = Traffic([], [])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout.readline().strip() == "ready"
            time.sleep(SETTLE_S)
            yield seen
            running.send_signal(signal.SIGTERM)
            assert running.wait(END_S) == 0
        finally:
            running.kill()
    for pair in json.loads(file.read_text()):
        seen.sent.append(pair["sent"])
        seen.arrived.append({int(number): at for number, at in pair["arrived"].items()})


def test_a_port_loses_no_frame_and_stands_still_briefly(topology: Topology, tmp_path: Path):
    counted, spans = both(topology), []
    with traffic(topology, tmp_path / "seen") as seen:
        for number in range(TAKE_OVERS):
            begin = time.time()
            take_over(topology, topology.hosts[number % 2])
            spans.append((begin, time.time()))
            time.sleep(SETTLE_S)
    report(f"{TAKE_OVERS} take-overs", seen, spans)
    assert seen.lost() == [0, 0]
    assert min(seen.sent) > 100 * TAKE_OVERS * SETTLE_S
    assert_none_lost_between(topology, counted)
    assert_balanced(topology)
    if "VNET_TEST_TAKE_OVERS" in os.environ:
        with traffic(topology, tmp_path / "idle") as idle:
            later = time.time() - spans[0][0]
            time.sleep(spans[-1][1] + SETTLE_S - spans[0][0])
        report("as long without a take-over", idle, [(begin + later, end + later) for begin, end in spans])
    assert max(longest_silence(path, *span) for path in seen.times() for span in spans) < GAP_S


def report(what: str, seen: Traffic, spans: list[tuple[float, float]]) -> None:
    """Prints for how long the ports were silent in each span, and at any time."""
    print(f"\n{what}: longest silence of either direction in each {silences(seen.times(), spans)}")
    for sent, lost, path in zip(seen.sent, seen.lost(), seen.times(), strict=True):
        print(f"  at any time {longest_silence(path) * 1000:.0f} ms; {lost} of {sent} frames lost")
