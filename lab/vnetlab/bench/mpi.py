"""MPI messages between two machines: NetPIPE on Open MPI over TCP.

Open MPI starts a daemon on each machine through a remote shell; here that is a script which enters the machine's
namespace. Both machines believe to own all processors, so ranks are not bound to any, and yield while they wait.
"""

import shlex
from pathlib import Path

from vnetlab import machine
from vnetlab.bench.contenders import Ends, absent
from vnetlab.bench.result import Sample
from vnetlab.run import LabError
from vnetlab.topology import Node

START_S = 30
"""Allowance for Open MPI to start and exit."""
MEASURE_S = 60
"""Allowance for NetPIPE per size: seven tries of a quarter of a second by its own clock."""


def messages(ends: Ends, size: int) -> Sample:
    """Messages of `size` bytes: one-way time of ping-pong, then the total rate of both directions at once."""
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
    """Writes the script that Open MPI runs as a remote shell: `agent ADDRESS COMMAND...`."""
    enter = [
        f'{node.address}) exec {shlex.join(machine.namespace_command(node, ["sh", "-c"]))} "$*" ;;'
        for node in (ends.source, ends.destination)
    ]
    agent = ends.source.file(".agent")
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *enter, "esac", "exit 1", ""]))
    agent.chmod(0o755)
    return agent


def _netpipe(ends: Ends, agent: Path, size: int, *options: str) -> tuple[int, float]:
    """Runs NetPIPE with one size; gives message bytes (of both directions with -2) and seconds."""
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
    """Options of mpirun: one rank per machine, all traffic by TCP between these two addresses."""
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
    """The /16 network of a machine's address."""
    return ".".join([*node.address.split(".")[:2], "0", "0"]) + "/16"
