"""The bench `mpi`: performance of MPI programs between two machines, a rank on each, with Open MPI over TCP.

`messages` times messages of one size by NetPIPE: in one direction, and in both at once. `challenge` runs the HPC
Challenge suite, whose PTRANS, FFT, rings and RandomAccess communicate like applications.

Open MPI starts a daemon on each machine through a remote shell; here that is a script which enters the machine's
namespace. Both machines assume that they own all CPUs, so ranks are not bound to any, and yield while they wait.
"""

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from vnetlab import daemon, machine, remote
from vnetlab.bench.contenders import TAP, VNET, Bare, Contender, Ends, VxlanContainers, VxlanDevice, absent
from vnetlab.bench.result import Sample
from vnetlab.guest import SHELL_PORT
from vnetlab.image import libraries
from vnetlab.run import LabError
from vnetlab.topology import Kind, Node

CONTENDERS: tuple[Contender, ...] = (Bare(), VxlanDevice(), VxlanContainers(), VNET, TAP)
"""The tunnels of container networks; each adds a layer to the one before."""
ON_SHAPED_WIRES: tuple[Contender, ...] = (Bare(), VxlanContainers(), VNET, TAP)
"""Those whose figures are compared on a wire that the applications can fill."""
MESSAGE_BYTES = (1, 64, 1_024, 8_192, 65_536, 1 << 20, 4 << 20)
TCP = "tcp,self"
"""Transports of Open MPI (`btl`): all messages by TCP, also between ranks on one node."""
SHARED_MEMORY = "tcp,self,vader"
"""The same, but ranks on one node use shared memory."""
FABRIC = "the libfabric provider vnet"
"""In place of transports: all messages over the interconnect."""
TCP_PARAMETERS = {"mpi_event_tick_rate": "1"}
"""A rank looks at its connections at each poll. In one of forty runs by TAPs, a rank of Open MPI 4.1.4 does so only
every 10 ms, its default without users of events (docs/lab-notes/2026-11-27-a-message-in-5-ms.md)."""
FABRIC_PARAMETERS = {"pml": "cm", "mtl": "ofi", "btl": "^uct,openib", "osc": "^ucx"}
START_S = 30
"""Allowance for Open MPI to start and exit."""
MEASURE_S = 60
"""Allowance for NetPIPE per size: seven trials of a quarter of a second by its own clock."""
CHALLENGE_S = 300
"""Allowance for the HPC Challenge suite: its RandomAccess tests stop after a minute each."""
ORDER, QUICK_ORDER = 2_000, 200
"""Rows of the suite's matrices, which also determine the memory of its other tests: 32 MB in total.

With 1 000 rows PTRANS takes 4 ms on a wire without limit: less than a connection's slow start and a time slice.
"""
SUMMARY = re.compile(r"^(\w+)=([-+.\deE]+)$", re.MULTILINE)
CHALLENGE = {
    "pingpong_latency_us": ("MaxPingPongLatency_usec", 1),
    "pingpong_bytes_per_s": ("AvgPingPongBandwidth_GBytes", 1e9),
    "ring_latency_us": ("RandomlyOrderedRingLatency_usec", 1),
    "ring_bytes_per_s": ("RandomlyOrderedRingBandwidth_GBytes", 1e9),
    "ptrans_bytes_per_s": ("PTRANS_GBs", 1e9),
    "fft_flops": ("MPIFFT_Gflops", 1e9),
    "updates_per_s": ("MPIRandomAccess_GUPs", 1e9),
}
"""Metrics, their names in the suite's summary, and the units there."""


def messages(ends: Ends, size: int, transports: str = TCP) -> Sample:
    """Messages of `size` bytes: one-way time of ping-pong, then time and total rate of both directions at once."""
    if reason := absent("NPopenmpi", "netpipe-openmpi"):
        raise LabError(reason)
    with launcher([ends.source, ends.destination], transports) as mpirun:
        moved, seconds = _netpipe(ends, mpirun, size)
        sample = {"oneway_us": seconds * 1e6}
        moved, seconds = _netpipe(ends, mpirun, size, "-2", "-a")
    return sample | {"exchange_us": seconds * 1e6, "exchange_bps": 8 * moved / seconds}


def challenge(ends: Ends, order: int) -> Sample:
    """One run of the HPC Challenge suite with matrices of `order` rows. Raises LabError if a result is wrong."""
    report = challenge_report([ends.source, ends.destination], order)
    figures = challenge_figures(report)
    challenge_checks(report)
    return figures


def challenge_report(nodes: Sequence[Node], order: int, transports: str = TCP) -> str:
    """The report of a run of the HPC Challenge suite with a rank on each of these nodes, an even number of ranks."""
    if reason := absent("hpcc", "hpcc"):
        raise LabError(reason)
    folder = nodes[0].file(".hpcc")
    machine.execute(nodes[0], f"rm -rf {folder} && mkdir {folder}")
    machine.write(nodes[0], folder / "hpccinf.txt", challenge_input(order, len(nodes)))
    with launcher(nodes, transports) as mpirun:
        words = [*mpirun, "-wdir", str(folder), "hpcc"]
        text = machine.execute(nodes[0], *words, timeout_s=START_S + CHALLENGE_S)
    report = machine.read(nodes[0], folder / "hpccoutf.txt") or text
    machine.execute(nodes[0], "rm", "-r", str(folder))
    return report


def challenge_input(order: int, ranks: int = 2) -> str:
    """The suite's input file hpccinf.txt, a format of fixed lines."""
    sizes = [1, order, 1, 80, 0, 1, 2, ranks // 2]
    """One matrix, its order, one block size and its rows, row-major, one grid of 2 x `ranks` / 2 ranks."""
    factorisation = ["16.0", 1, 2, 1, 4, 1, 2, 1, 1, 1, 1, 1, 0, 2, 64, 0, 0, 1, 8]
    """Threshold and variants of HPL, as in Debian's example."""
    no_more = ["", 0, order, 0, 80]
    """No further sizes for PTRANS."""
    lines = ["", "", "HPL.out", 8, *sizes, *factorisation, *no_more]
    return "".join(f"{line}\n" for line in lines)


def challenge_checks(report: str) -> None:
    """Raises LabError if one of the suite's checks failed."""
    failed = [line.strip() for line in report.splitlines() if "FAILED" in line]
    failed += [f"{count} wrong updates" for count in re.findall(r"Found (\d+) errors", report) if count != "0"]
    if "0 tests completed and failed residual checks" not in report:
        failed.append("residual checks")
    if failed:
        raise LabError(f"HPC Challenge found wrong results: {', '.join(failed)}")


def challenge_figures(report: str) -> Sample:
    """The sample from the suite's report; raises LabError if the suite failed or did not finish."""
    found = dict(SUMMARY.findall(report))
    if found.get("Success") != "1":
        raise LabError(f"HPC Challenge gave no figures: {report.strip()[-200:]}")
    return {metric: float(found[name]) * unit for metric, (name, unit) in CHALLENGE.items()}


@contextlib.contextmanager
def launcher(nodes: Sequence[Node], transports: str = TCP) -> Iterator[list[str]]:
    """The words of mpirun with a rank on each of these nodes, in this order.

    mpirun runs on the first node. A node that appears twice runs two ranks.
    """
    enter = [f"{node.address}) {_shell_on(node, nodes[0])} ;;" for node in dict.fromkeys(nodes)]
    agent, hosts = _files(nodes[0])
    provider = nodes[0].file(".fabric")
    script = "\n".join(["#!/bin/sh", "host=$1; shift", 'case "$host" in', *enter, "*) exit 1 ;;", "esac", ""])
    # Open MPI knows the node on which it is started by the machine's name only.
    names = {nodes[0]: machine.execute(nodes[0], "uname", "-n").strip()}
    names = "".join(f"{names.get(node, node.address)}\n" for node in nodes)
    # Open MPI's daemons look for the remote shell, too, even if they start no others.
    for node in dict.fromkeys(nodes):
        if node.kind is Kind.VM:
            machine.execute(node, "mkdir", "-p", str(agent.parent))
        machine.write(node, agent, script)
    machine.write(nodes[0], hosts, names)
    network = _network(nodes[0])
    parameters = {
        "plm": "rsh",
        "plm_rsh_agent": str(agent),
        "oob_tcp_if_include": network,
        "btl_tcp_if_include": network,
        "pml": "ob1",
        "btl": transports,
        "mpi_yield_when_idle": "1",
    }
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(len(nodes)), "--bind-to", "none"]
    words += ["--hostfile", str(hosts), "--map-by", "seq"]
    if transports == FABRIC:
        _link_provider(provider, [node for node in dict.fromkeys(nodes) if node.kind is Kind.VM])
        parameters |= FABRIC_PARAMETERS
        words += ["-x", "FI_PROVIDER=vnet", "-x", f"FI_PROVIDER_PATH={provider}"]
    else:
        parameters |= TCP_PARAMETERS
    try:
        yield words + [word for name, value in parameters.items() for word in ("--mca", name, value)]
    finally:
        for node in dict.fromkeys(nodes):
            machine.execute(node, "rm", "-f", str(agent), str(hosts))
        shutil.rmtree(provider, ignore_errors=True)


def install(nodes: Sequence[Node], program: str) -> str:
    """Copies a program to the virtual machines among nodes, with its libraries; returns its path.

    Containers share this machine's files. A name without a slash is a program that every node has.
    """
    guests = [node for node in dict.fromkeys(nodes) if node.kind is Kind.VM]
    path = Path(program).resolve()
    if not guests or "/" not in program:
        return program
    if not path.is_file():
        raise LabError(f"there is no program {program}")
    needed: list[Path] = []
    with contextlib.suppress(LabError):
        # Scripts and static programs need none.
        needed = libraries(path)
    for guest in guests:
        for library in needed:
            if machine.attempt(guest, "test", "-e", str(library))[0]:
                machine.send(guest, library)
        machine.send(guest, path)
    return str(path)


def _link_provider(folder: Path, guests: Sequence[Node]) -> None:
    """Makes a folder with the provider under the name that libfabric looks for, on this machine and in guests."""
    library = daemon.binaries() / daemon.PROVIDER
    if not library.exists():
        raise LabError(f"{library} does not exist: run 'make build'")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "libvnet-fi.so").symlink_to(library)
    for guest in guests:
        # The guests' image has the library at the same path.
        machine.execute(guest, f"mkdir -p {folder} && ln -sf {library} {folder}/libvnet-fi.so")


def _shell_on(node: Node, launcher: Node) -> str:
    """A shell command that runs the words "$*" on a node, from the machine of the launching node."""
    place = remote.machine_of(node.namespace)
    if place and place != remote.machine_of(launcher.namespace):
        enter = shlex.join(remote.ssh(place, f"ip netns exec {node.namespace} sh"))
        return f"printf '%s\\n' \"$*\" | {enter}"
    if node.kind is Kind.VM:
        return f"printf '%s\\n' \"$*\" | busybox nc {node.address} {SHELL_PORT}"
    # Ranks find others on their machine, which share its memory, by its name: every host has its own.
    named = 'unshare --uts sh -c \'hostname "$0"; exec "$@"\''
    return f'exec {named} {node.name} {shlex.join(machine.namespace_command(node, ["sh", "-c"]))} "$*"'


def _files(node: Node) -> tuple[Path, Path]:
    """Open MPI's remote shell and host file on the node that launches."""
    if node.kind is Kind.VM:
        return Path("/tmp/agent"), Path("/tmp/ranks")
    return node.file(".agent"), node.file(".ranks")


def _netpipe(ends: Ends, mpirun: list[str], size: int, *options: str) -> tuple[int, float]:
    """Runs NetPIPE with one size; returns message bytes (of both directions with -2) and seconds."""
    # A guest lacks the lab's folder.
    report = Path("/tmp/netpipe") if ends.source.kind is Kind.VM else ends.source.file(".netpipe")
    size_only = ["-l", str(size), "-u", str(size), "-p", "0"]
    words = [*mpirun, "NPopenmpi", *size_only, *options, "-o", str(report)]
    text = machine.execute(ends.source, *words, timeout_s=START_S + MEASURE_S)
    try:
        moved, _, seconds = machine.read(ends.source, report).split()
    except ValueError as error:
        raise LabError(f"NetPIPE gave no figures: {text.strip()[-200:]}") from error
    machine.execute(ends.source, "rm", str(report))
    return int(moved), float(seconds)


def _network(node: Node) -> str:
    """The /16 network of a machine's address."""
    return ".".join([*node.address.split(".")[:2], "0", "0"]) + "/16"
