"""The demonstration: two hosts with a virtual machine and a container each, measured pair by pair, then taken down."""

from pathlib import Path

from vnetlab import lab, measure
from vnetlab.run import progress
from vnetlab.topology import Settings

NAME = "demo"


def run(report: Path | None) -> None:
    """Runs the demonstration and prints its table; also writes the figures to `report` as JSON.

    Cleans up after failures and interrupts as well.
    """
    lab.down(NAME)
    try:
        topology = lab.up(Settings(name=NAME, container="veth"))
        measured = measure.pairs(topology)
    finally:
        progress("cleaning up")
        lab.down(NAME)
    print(f"\n{measure.table(measured)}\n")
    print("All machines are on one Ethernet LAN, 10.77.0.0/16. Explore it: lab/lab up, lab/lab --help")
    if report:
        report.write_text(measure.as_json(topology, measured))
