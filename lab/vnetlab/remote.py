"""Hosts of a lab on other machines, reached by ssh.

Every command that the lab runs for a host names the host's namespace, or that of one of its containers: that decides on
which machine the command runs. There, each host is a namespace with a macvlan of the machine's device, or the device
itself, so all that happens in a host's namespace is the same here and there. Files of a host have the same path on its
machine.
"""

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

OPTIONS = ("-A", "-o", "BatchMode=yes", "-o", "ControlMaster=auto", "-o", "ControlPath=~/.ssh/vnet-lab-%C")
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A machine that is silent for a minute is given up."""
PERSIST = ("-o", "ControlPersist=60")
"""One connection for all commands to a machine. The agent is forwarded: Open MPI starts ranks from there elsewhere."""
NAMESPACE = re.compile(r"([a-z][a-z0-9-]*)-h(\d+)(?:c\d+)?")


@dataclass(frozen=True)
class Machine:
    """A machine that carries a host."""

    destination: str
    """Where ssh connects to, as root."""
    device: str
    """The network device of the underlay."""
    own: bool = False
    """The host takes the device itself, as nobody else needs it: a virtual function of an adapter, a second adapter."""


_machines: dict[str, tuple[Machine, ...]] = {}
"""Machines of hosts 1, 2, … by lab."""


@contextlib.contextmanager
def hosts_on(lab: str, machines: tuple[Machine, ...]) -> Iterator[None]:
    """The hosts of a lab are on these machines while the context lasts; on this one if there are none."""
    _machines[lab] = machines
    try:
        yield
    finally:
        del _machines[lab]


def machines_of(lab: str) -> tuple[Machine, ...]:
    """The other machines of a lab; empty if its hosts are here."""
    return _machines.get(lab, ())


def machine_of(namespace: str) -> Machine | None:
    """The other machine that has a namespace; None if it is here."""
    found = NAMESPACE.fullmatch(namespace)
    machines = machines_of(found[1]) if found else ()
    return machines[int(found[2]) - 1] if machines else None


def ssh(machine: Machine, text: str) -> list[str]:
    """Words that run a shell command on a machine."""
    return ["ssh", *OPTIONS, *ALIVE, *PERSIST, machine.destination, text]


def wrap(command: Sequence[str]) -> list[str]:
    """The command, or the words that run it on the machine of the namespace that it names."""
    machine = _place(command)
    return ssh(machine, shlex.join(command)) if machine else list(command)


def supervised(command: Sequence[str], environment: Mapping[str, str]) -> list[str] | None:
    """Like `wrap` for a process that lasts; None if it runs here.

    The process ends when its standard input ends, so also when ssh is killed.
    """
    machine = _place(command)
    if not machine:
        return None
    return ssh(machine, watched(["env", *(f"{name}={value}" for name, value in environment.items()), *command]))


def watched(command: Sequence[str]) -> str:
    """A shell command that runs `command`, tells it to end when standard input ends, and exits with its status."""
    watching = "(cat <&3 >/dev/null; kill $pid 2>/dev/null)"
    end = "wait $pid; status=$?; kill $! 2>/dev/null; exit $status"
    return f"exec 3<&0; {shlex.join(command)} & pid=$!; {watching} & {end}"


def _place(command: Sequence[str]) -> Machine | None:
    """The machine of the namespace that a command of ip, bridge or tc names."""
    match command:
        case ["ip" | "bridge" | "tc", "-n", namespace, *_] | ["ip", "netns", _, namespace, *_]:
            return machine_of(namespace)
    return None
