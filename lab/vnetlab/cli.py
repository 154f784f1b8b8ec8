"""The `lab` command."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from vnetlab import channel, console, demo, lab, machine, measure, migration, timeline
from vnetlab.bench import command as bench
from vnetlab.bench import mpi
from vnetlab.evaluate import command as evaluate
from vnetlab.run import LabError
from vnetlab.topology import Kind, Node, Settings, Topology, Wire

MPIRUN_S = 3600
"""Time limit of an MPI program that a virtual machine starts."""
EPILOG = """\
Nodes are hosts (h1), containers (h1c1) and virtual machines (h1v1), counted from 1.
Overlay addresses are 10.77.HOST.N for containers and 10.77.HOST.(100+N) for virtual machines, underlay addresses
10.78.0.HOST and fd78::HOST. Logs and configuration files are in /run/vnet-lab/NAME while a lab is up.

Examples:
  lab up --hosts 3 --mtu 9000
  lab exec h1c1 -- ping -c 3 $(lab address h3v1)
  lab exec h1 -- vnet stats
  lab migrate h1v1 h2
  lab mpirun -n 4 -- ./program
  lab down
"""


def main() -> None:
    """Runs the command line. On failure: exit status 1, one line on standard error, and the last lines of the log."""
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if os.geteuid() != 0 and getattr(arguments, "bench", None) != bench.PUBLISH:
            raise LabError("the lab creates network namespaces and devices: run it as root")
        sys.exit(arguments.command(arguments))
    except LabError as error:
        error.keep_log()
        print(f"lab: {error}", file=sys.stderr)
        if error.log:
            print(f"  the end of {error.log}:\n{error.log_end}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lab",
        description="Builds hosts, containers and virtual machines on this machine, joined by vnet.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        if command not in (_demo, bench.command, evaluate.command):
            added.add_argument("--name", default="lab", help="which lab (default: lab)")
        return added

    up = add("up", _up, "Bring a lab up, or restart the missing parts of a running one.")
    up.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts (default: 2)")
    up.add_argument("--vms", type=int, default=1, metavar="N", help="virtual machines on each host (default: 1)")
    up.add_argument("--containers", type=int, default=1, metavar="N", help="containers on each host (default: 1)")
    up.add_argument("--mtu", type=int, default=1500, metavar="M", help="the overlay's MTU (default: 1500)")
    up.add_argument("--underlay-mtu", type=int, default=1500, metavar="M", help="the underlay's MTU (default: 1500)")
    up.add_argument(
        "--wire",
        choices=[wire.value for wire in Wire],
        default=Wire.NONE.value,
        help="the underlay's speed (default: none, unshaped)",
    )
    up.add_argument(
        "--encapsulation",
        choices=["native", "vnet", "vxlan", "stream"],
        default="native",
        help="encapsulation of links (default: native)",
    )
    up.add_argument("--store", action="store_true", help="hosts find each other by an etcd on h1 instead of [[link]]s")
    up.add_argument("--dispatchers", type=int, default=1, metavar="N", help="dispatchers of each vnetd (default: 1)")
    up.add_argument(
        "--queues", type=int, default=1, metavar="N", help="queue pairs of each guest's device (default: 1)"
    )
    up.add_argument(
        "--container",
        choices=["veth", "tap"],
        default="veth",
        help="kind of the containers' interfaces (default: veth)",
    )
    up.add_argument("--mpi", action="store_true", help="Open MPI in virtual machines, too, for 'lab mpirun'")
    up.add_argument(
        "--rdma",
        action="store_true",
        help="the interconnect's programs in virtual machines, and vnetd's engine for them",
    )
    up.add_argument("--ipv6", action="store_true", help="links use the underlay's IPv6 addresses")
    up.add_argument("--sealed", action="store_true", help="sealed links, with a certificate authority of the lab")

    status = add("status", _status, "Show the nodes of a lab and whether they run.")
    status.add_argument("--json", action="store_true", help="print JSON")
    execute = add("exec", _exec, "Run a command on a node; pass on its output and exit status.")
    execute.add_argument("node", help="h1, h1c1 or h1v1")
    execute.add_argument("words", nargs="+", metavar="COMMAND", help="after --; one word is a shell command")
    execute.add_argument(
        "--timeout", type=float, default=3600, metavar="S", help="time limit in seconds, in a virtual machine"
    )
    mpirun = add(
        "mpirun",
        _mpirun,
        "Run an MPI program past TCP, across containers and the virtual machines of 'up --mpi'.",
    )
    mpirun.add_argument("-n", type=int, default=2, metavar="N", dest="ranks", help="ranks (default: 2)")
    mpirun.add_argument("--tcp", action="store_true", help="messages by TCP, for comparison")
    mpirun.add_argument("words", nargs="+", metavar="PROGRAM", help="after --; with its arguments")
    console = add("console", _console, "Use a virtual machine's console; ^] ends it.")
    console.add_argument("node", help="h1v1")
    address = add("address", _address, "Print a node's address.")
    address.add_argument("node", help="h1, h1c1 or h1v1")
    moving = add("migrate", _migrate, "Move a running virtual machine to another host, by QEMU's live migration.")
    moving.add_argument("node", help="h1v1")
    moving.add_argument("to", help="h2")
    measuring = add("measure", _measure, "Measure every pair of a lab that is up, by ping and iperf3.")
    measuring.add_argument("--repeat", type=int, default=1, metavar="N", help="iperf3 runs for each pair (default: 1)")
    measuring.add_argument("--json", action="store_true", help="print JSON")
    timeline.add(add("timeline", timeline.command, timeline.__doc__.partition("\n")[0]))
    show = add("demo", _demo, "Bring two hosts up, measure every pair, print one table, take everything down.")
    show.add_argument("--report", type=Path, metavar="FILE", help="also write the figures to FILE as JSON")
    bench.add(add("bench", bench.command, "Measure vnet against its alternatives, in turn."))
    evaluate.add(
        add("evaluate", evaluate.command, "Repeat the papers' experiments on the kinds of data paths that exist here.")
    )
    add("down", _down, "Take a lab down; leave nothing behind.")
    return parser


def _up(arguments: argparse.Namespace) -> None:
    fields = Settings.__dataclass_fields__
    lab.up(Settings(**{name: value for name, value in vars(arguments).items() if name in fields}))


def _status(arguments: argparse.Namespace) -> None:
    topology = lab.load(arguments.name)
    rows = lab.status(topology)
    if arguments.json:
        print(json.dumps({"lab": arguments.name, "directory": str(topology.state), "nodes": rows}, indent=2))
        return
    print(f"{'NODE':8} {'KIND':10} {'ADDRESS':15} {'MTU':>6}  STATE")
    for row in rows:
        state = ("running" if row.get("pid") else "up") if row["up"] else "down"
        process_id = f", process {row['pid']}" if row.get("pid") else ""
        print(f"{row['name']:8} {row['kind']:10} {row['address']:15} {row['mtu']:>6}  {state}{process_id}")


def _exec(arguments: argparse.Namespace) -> int | None:
    node = lab.load(arguments.name).find(arguments.node)
    if node.kind is Kind.VM:
        return channel.execute(node, arguments.words, arguments.timeout, _write)
    words = ["sh", "-c", *arguments.words] if len(arguments.words) == 1 else arguments.words
    command = machine.namespace_command(node, words)
    return os.execvpe(command[0], command, machine.environment(node))


def _mpirun(arguments: argparse.Namespace) -> int:
    topology = lab.load(arguments.name)
    machines = topology.machines(None if topology.settings.mpi else Kind.CONTAINER)
    # Containers first: from them, Open MPI's daemons start everywhere.
    machines.sort(key=lambda node: node.kind is Kind.VM)
    if not machines or arguments.ranks < 1:
        raise LabError(
            "MPI programs run in containers, and in virtual machines of 'lab up --mpi': bring a lab up with at least "
            "one, and start at least one rank"
        )
    nodes = [machines[rank % len(machines)] for rank in range(arguments.ranks)]
    program, *words = arguments.words
    words = [mpi.install(nodes, program), *words]
    with mpi.launcher(nodes, mpi.TCP if arguments.tcp else mpi.FABRIC) as mpirun:
        if nodes[0].kind is Kind.VM:
            return channel.execute(nodes[0], [*mpirun, *words], MPIRUN_S, _write)
        command = machine.namespace_command(nodes[0], [*mpirun, *words])
        return subprocess.run(command, check=False, env=machine.environment(nodes[0])).returncode


def _console(arguments: argparse.Namespace) -> None:
    console.attach(_guest(lab.load(arguments.name), arguments.node))


def _address(arguments: argparse.Namespace) -> None:
    print(lab.load(arguments.name).find(arguments.node).address)


def _migrate(arguments: argparse.Namespace) -> None:
    topology = lab.load(arguments.name)
    machine, destination = _guest(topology, arguments.node), topology.find(arguments.to)
    migrated = migration.migrate(topology, machine, destination)
    print(
        f"{machine.name} is on {destination.name}: {migrated.mib} MiB in {migrated.seconds:g} s; "
        f"it stood still for {migrated.downtime_ms} ms"
    )


def _measure(arguments: argparse.Namespace) -> None:
    topology = lab.load(arguments.name)
    measured = measure.pairs(topology, arguments.repeat)
    print(measure.as_json(topology, measured) if arguments.json else measure.table(measured))


def _demo(arguments: argparse.Namespace) -> None:
    demo.run(arguments.report)


def _down(arguments: argparse.Namespace) -> None:
    lab.down(arguments.name)


def _guest(topology: Topology, name: str) -> Node:
    node = topology.find(name)
    if node.kind is not Kind.VM:
        raise LabError(f"{name} is not a virtual machine: use 'lab exec {name} -- bash'")
    return node


def _write(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()
