"""Fixtures: a lab for each test module that requests one, named after the module and removed after it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vnetlab import lab
from vnetlab.run import LabError, tail
from vnetlab.topology import Settings, Topology

MakeLab = Callable[..., Topology]
PROGRAMS = Path(__file__).parent / "programs"
"""Programs that tests run in hosts and containers."""
LONG = [
    "evaluate_smoke",
    "store",
    "package",
    "change",
    "lab",
    "restart",
    "take_over",
    "take_over_guests",
    "kills",
    "hot_plug",
    "faults",
    "mtu",
    "bad_input",
    "cut_through",
    "paths",
    "vxlan",
    "stream",
    "tls",
    "offloads",
    "driving",
    "accounting",
    "move",
    "migration",
    "kernel_vtep",
    "kernel_mtu",
]
"""The slowest modules, slowest first: one that starts last would keep all other workers waiting."""
os.environ.setdefault("VNET_LAB_PATIENCE_S", "90")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the slowest modules first; the order is otherwise unchanged."""
    place = {f"test_{name}": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(scope="module")
def make_lab(request: pytest.FixtureRequest) -> Iterator[MakeLab]:
    """Creates labs: `make_lab(mtu=9000)`. Each lab replaces the previous one; the last is removed after the module."""
    name = request.module.__name__.replace("_", "-")

    def make(**settings: object) -> Topology:
        lab.down(name)
        return lab.up(Settings(name=name, **settings))

    yield make
    lab.down(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Adds the last lines of the daemons' logs, and of the log that an error names, to a failure's report."""
    report = yield
    if report.when == "call" and report.failed:
        if isinstance(error := call.excinfo.value, LabError) and error.log:
            report.sections.append((f"end of {error.log.name}", tail(error.log, 40)))
        for fixture in item.funcargs.values():
            if isinstance(fixture, Topology):
                for host in fixture.hosts:
                    report.sections.append((f"end of {host.name}'s vnetd log", tail(host.file(".log"))))
    return report
