"""Messages between two machines as MPI programs exchange them: NetPIPE on Open MPI, whose messages go over TCP.

Open MPI starts a daemon on each machine by a program that it takes for a remote shell; here that is a script which
enters the machine's namespace. Either machine believes to have all processors for itself, so ranks are not bound to
any, and give theirs away while they wait.
"""

import shlex
from pathlib import Path

from vnetlab import machine
from vnetlab.bench.contenders import Ends, absent
from vnetlab.bench.result import Sample
from vnetlab.run import LabError
from vnetlab.topology import Node

START_S = 30
"""What Open MPI may take to start and to end."""
MEASURE_S = 60
"""What NetPIPE may take for one size: seven tries of a quarter of a second, by its own clock."""


def messages(ends: Ends, size: int) -> Sample:
    """Messages of `size` bytes: to and fro, one way's time; then both ways at once, the rate of both together."""
    if reason := absent("NPopenmpi", "netpipe-openmpi"):
        raise LabError(reason)
    agent = _agent(ends)
    try:
        moved, seconds = _netpipe(ends, agent, size)
        sample = {"oneway_us": seconds * 1e6}
        moved, seconds = _netpipe(ends, agent, size, "-2", "-a")
    finally:
        agent.unlink()
    return sample | {"exchange_bps": 8 * moved / seconds}


def _agent(ends: Ends) -> Path:
    """Writes what Open MPI calls as a remote shell: `agent ADDRESS COMMAND...`."""
    enter = [
        f'{node.address}) exec {shlex.join(machine.namespace_command(node, ["sh", "-c"]))} "$*" ;;'
        for node in (ends.source, ends.destination)
    ]
    agent = ends.source.file(".agent")
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *enter, "esac", "exit 1", ""]))
    agent.chmod(0o755)
    return agent


def _netpipe(ends: Ends, agent: Path, size: int, *options: str) -> tuple[int, float]:
    """Runs NetPIPE with one size; gives the bytes of a message, or of both that pass each other, and what it took."""
    report = ends.source.file(".netpipe")
    size_only = ["-l", str(size), "-u", str(size), "-p", "0"]
    words = ["mpirun", *_open_mpi(ends, agent), "NPopenmpi", *size_only, *options, "-o", str(report)]
    text = machine.execute(ends.source, *words, timeout_s=START_S + MEASURE_S)
    try:
        moved, _, seconds = report.read_text().split()
        report.unlink()
    except (OSError, ValueError) as error:
        raise LabError(f"NetPIPE gave no figures: {text.strip()[-200:]}") from error
    return int(moved), float(seconds)


def _open_mpi(ends: Ends, agent: Path) -> list[str]:
    """The options of mpirun: one rank on each machine, everything by TCP between these two addresses."""
    network = _network(ends.source)
    parameters = {
        "plm": "rsh",
        "plm_rsh_agent": str(agent),
        "oob_tcp_if_include": network,
        "btl_tcp_if_include": network,
        "pml": "ob1",
        "btl": "tcp,self",
        "mpi_yield_when_idle": "1",
    }
    hosts = f"{ends.source.address},{ends.destination.address}"
    words = ["--allow-run-as-root", "-np", "2", "--host", hosts, "--map-by", "node", "--bind-to", "none"]
    return words + [word for name, value in parameters.items() for word in ("--mca", name, value)]


def _network(node: Node) -> str:
    """The network that a machine's address is in."""
    return ".".join([*node.address.split(".")[:2], "0", "0"]) + "/16"
