"""The life cycle of a lab: up, status, down.

Everything that a lab creates carries its name: namespaces, its directory, and its processes' mark. `down` finds all of
it by that name, so it needs no record and works after any crash. The record of the settings serves the commands between
`up` and `down`; it is "complete" once `up` has finished.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from vnetlab import container, daemon, guest, process, rdma, store, underlay
from vnetlab.image import GUEST, Image, Recipe, ensure_image, with_open_mpi
from vnetlab.run import LabError, progress, wait_until
from vnetlab.topology import STATE, Kind, Node, Settings, Topology

LOCK = "lock"
LOCK_S = 120
CACHE = daemon.REPOSITORY / ".cache"


def up(settings: Settings) -> Topology:
    """Brings a lab up, or restarts the missing parts of a running one. Cleans up on failure.

    Raises LabError on failure, or if a lab of that name is up with other settings.
    """
    topology = Topology(settings)
    daemon.binaries()
    with _locked(topology.state):
        record = _read_record(topology.state)
        if record and record[1] and record[0] != settings:
            raise LabError(f"lab {settings.name} is up with other settings: 'lab down --name {settings.name}' first")
        try:
            if not (record and record[1] and _namespaces(topology) <= underlay.namespaces()):
                _clear(settings.name)
                _begin(topology)
            _start(topology)
        except BaseException as error:
            # Clean-up removes the log: keep its last lines.
            if isinstance(error, LabError):
                error.keep_log()
            progress(f"cleaning up lab {settings.name}")
            _clear(settings.name)
            shutil.rmtree(topology.state)
            raise
        _write_record(settings, complete=True)
    return topology


def prepare(settings: Settings) -> Topology:
    """Creates only a lab's hosts, containers' namespaces and underlay; the caller starts processes in them.

    `down` takes the lab down, including everything that `process.start` started.
    """
    topology = Topology(settings)
    with _locked(topology.state):
        _clear(settings.name)
        _begin(topology)
    return topology


def down(name: str) -> None:
    """Takes a lab down from any state, and leaves nothing behind."""
    state = Topology(Settings(name=name)).state
    with _locked(state):
        _clear(name)
        shutil.rmtree(state)
    with contextlib.suppress(OSError):
        STATE.rmdir()


def load(name: str) -> Topology:
    """The lab of that name; raises LabError if it is not up."""
    record = _read_record(Topology(Settings(name=name)).state)
    if not record or not record[1]:
        raise LabError(f"lab {name} is not up: 'lab up --name {name}'")
    return Topology(record[0])


def names() -> list[str]:
    """Names of all labs."""
    return sorted(path.name for path in STATE.iterdir()) if STATE.exists() else []


def status(topology: Topology) -> list[dict[str, object]]:
    """Name, kind, address and MTU of each node, and whether it runs."""
    rows: list[dict[str, object]] = []
    for node in [*topology.hosts, *topology.machines()]:
        row = {"name": node.name, "kind": node.kind.name.lower(), "address": node.address}
        if node.kind is Kind.HOST:
            row |= {"mtu": topology.settings.underlay_mtu}
        else:
            row |= {"mtu": topology.mtu(node), "mac": node.mac}
        if node.kind is Kind.CONTAINER:
            row |= {"up": node.namespace in underlay.namespaces()}
        else:
            pid = process.find(node.file(".pid"))
            row |= {"up": pid is not None, "pid": pid}
        rows.append(row)
    return rows


def start_daemon(topology: Topology, host: Node) -> None:
    """Starts a host's vnetd, and configures the devices that it creates for containers."""
    daemon.start(topology, host)
    for machine in topology.machines(Kind.CONTAINER, host.host):
        container.configure(machine)


def _begin(topology: Topology) -> None:
    """Creates the record, the hosts and the containers' namespaces."""
    _write_record(topology.settings, complete=False)
    progress(f"underlay: {_count(topology.hosts, 'host')}, MTU {topology.settings.underlay_mtu}")
    underlay.create(topology)
    for machine in topology.machines(Kind.CONTAINER):
        container.create(machine)


def _start(topology: Topology) -> None:
    """Starts every missing process: daemons first, then all guests at once."""
    image = boot_image(topology)
    if topology.settings.store and store.find(topology) is None:
        progress(f"h1: etcd at {store.endpoint(topology)}")
        store.start(topology)
    for host in topology.hosts:
        if process.find(host.file(".pid")) is None:
            machines = topology.machines(Kind.CONTAINER, host.host)
            progress(f"{host.name}: vnetd, {_count(machines, 'container')}")
            start_daemon(topology, host)
    started = [machine for machine in topology.machines(Kind.VM) if process.find(machine.file(".pid")) is None]
    if started and image:
        _boot(topology, started, image)


def with_rdma() -> Recipe:
    """The guests' image with the programs of the interconnect."""
    return replace(GUEST, programs=tuple(daemon.binaries() / name for name in rdma.PROGRAMS))


def boot_image(topology: Topology) -> Image | None:
    """What the virtual machines boot; None if there are none."""
    if topology.settings.mpi and not shutil.which("mpirun"):
        raise LabError("mpirun is not installed (Debian package openmpi-bin): run 'make packages'")
    if not topology.machines(Kind.VM):
        return None
    recipe = with_rdma() if topology.settings.rdma else GUEST
    if not topology.settings.mpi:
        return ensure_image(CACHE, recipe, topology.state) if topology.settings.rdma else ensure_image(CACHE)
    # The image changes with every build of the provider, so it goes with the lab.
    provider = daemon.binaries() / daemon.PROVIDER
    if not provider.exists():
        raise LabError(f"{provider} does not exist: run 'make build'")
    return ensure_image(CACHE, with_open_mpi(recipe, provider), topology.state)


def _boot(topology: Topology, guests: list[Node], image: Image) -> None:
    """Boots guests in parallel."""
    progress(f"{_count(guests, 'virtual machine')}: booting {image.kernel.name}")
    for machine in guests:
        guest.start(topology, machine, image)
    for machine in guests:
        guest.wait(machine)
        if topology.settings.mpi:
            guest.open_shell(machine)
        progress(f"{machine.name}: ready at {machine.address}")


def _clear(name: str) -> None:
    """Stops a lab's processes, removes its namespaces and all its files except the lock."""
    state = STATE / name
    process.sweep(state)
    underlay.delete_namespaces(name)
    for path in state.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _namespaces(topology: Topology) -> set[str]:
    """The namespaces of a lab."""
    nodes = [*topology.hosts, *topology.machines(Kind.CONTAINER)]
    return {node.namespace for node in nodes} | ({topology.switch} if len(topology.hosts) != 2 else set())


def _count(nodes: list[Node], word: str) -> str:
    return f"{len(nodes)} {word}{'' if len(nodes) == 1 else 's'}"


def _read_record(state: Path) -> tuple[Settings, bool] | None:
    """A lab's settings and whether `up` has finished."""
    try:
        record = json.loads((state / "lab.json").read_text())
        return Settings(**record["settings"]), record["complete"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None


def _write_record(settings: Settings, complete: bool) -> None:
    path = STATE / settings.name / "lab.json"
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps({"settings": asdict(settings), "complete": complete}, indent=2))
    os.replace(scratch, path)


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Excludes other `up` and `down` of the same lab by a lock in its directory, which is created if missing."""
    with contextlib.ExitStack() as stack:

        def taken() -> bool:
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                # The `down` of the last other lab may remove the directory's parent at this moment.
                state.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((state / LOCK).open("wb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The previous holder of the lock may have removed the file.
                return os.path.samestat(os.fstat(file.fileno()), (state / LOCK).stat())
            return False

        wait_until(f"another 'lab' command on lab {state.name} to end", taken, LOCK_S, poll_s=0.2)
        yield
