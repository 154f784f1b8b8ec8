"""The bench `interconnect`: RDMA semantics against sockets, copies by shared memory, and Open MPI over TCP.

A contender is a means to send (the interconnect, TCP, plain UDP sockets) on a path (the bare underlay, kernel VXLAN,
vnet). `vnet-rdma-perf` times writes of 2 MiB and of 8 bytes. Open MPI uses the libfabric provider or TCP. Faults come
from a relay on a third host, `interconnect/examples/faults.rs`, and every byte that passes it is checked.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vnetlab import daemon, lab, machine, process, rdma
from vnetlab.bench import mpi, sockets, usage, vhost, workload
from vnetlab.bench.case import EMULATED, LAB, Case, Options, Turn, told, turn_of
from vnetlab.bench.contenders import TAP, VNET, Bare, Contender, Ends, Vnet, VxlanContainers, VxlanDevice
from vnetlab.bench.guests import VnetGuests
from vnetlab.bench.result import Conditions, Sample
from vnetlab.run import LabError, wait_until
from vnetlab.topology import Kind, Node, Settings, Topology

PORT, RELAY_PORT = 7000, 7001
LARGE_BYTES, ONE_HOST_BYTES = 2 << 20, 1 << 20
TCP_BYTES = 16
"""Size of small TCP messages: the smallest that sockperf has are 14 bytes long."""
START_S = 30
RANKS = (2, 4)
FAULTS = {"none": (0, 0), "1 % lost": (10, 0), "1 % late": (0, 10), "1 % lost, 1 % late": (10, 10)}
"""Lost and late datagrams, of a thousand."""
ALONE, BESIDE = "nothing", "a bulk guest"
BEHIND_S = 1
"""Time that the bulk guest gets to start before the other is measured."""
FIRST = ("chrt", "--fifo", "50")
"""A guest with priority: the protocol runs inside its processes, so their scheduling class is its priority."""
PRIORITY = ", priority"
FIGURE = re.compile(r"(\w+) ([\d.]+)")


@dataclass(frozen=True)
class By:
    """A path with a means to send on it."""

    means: str
    path: Contender
    load: Callable[[Ends, float], Sample]

    @property
    def name(self) -> str:
        """Name of the contender."""
        return f"{self.means}, {self.path.name}"

    def turn(self, seconds: float) -> Turn:
        """The contender's turn, with the CPU time of daemons."""

        def load(ends: Ends) -> Sample:
            workload.meet(ends)
            with usage.measured(ends.processes) as used:
                sample = self.load(ends, seconds)
            return sample | used.sample()

        return replace(turn_of(self.path, load), contender=self.name)


def program() -> Path:
    """The interconnect's own measuring program; raises LabError if it is not built."""
    path = daemon.binaries() / "vnet-rdma-perf"
    if not path.exists():
        raise LabError(f"{path} is missing: run 'make build'")
    return path


@contextlib.contextmanager
def _server(node: Node, *before: str) -> Iterator[Callable[[], dict[str, float]]]:
    """Runs the program's server for one client; the yielded function waits for its figures."""
    words = [*before, str(program()), "server", f"{node.address}:{PORT}", "once"]
    with vhost.spawn(machine.namespace_command(node, words)) as child:
        if child.stdout is None or not child.stdout.readline():
            raise LabError(f"vnet-rdma-perf does not start on {node.name}: {child.communicate()[1].strip()[-200:]}")
        yield lambda: _figures(child.communicate(timeout=START_S)[0])


def _figures(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in FIGURE.findall(text)}


def _client(source: Node, destination: Node, size: int, latency_s: float, rate_s: float, *before: str) -> list[str]:
    name = f"{destination.address}:{PORT}/0"
    words = [*before, str(program()), "client", name, str(size), f"{latency_s},{rate_s}"]
    return machine.namespace_command(source, words)


def writes(ends: Ends, seconds: float, size: int = LARGE_BYTES, before: Sequence[str] = ()) -> Sample:
    """RDMA writes: 8 bytes in one direction, then a stream; CPU time of both applications during the stream."""
    with _server(ends.destination, *before) as ended:
        words = _client(ends.source, ends.destination, size, seconds, seconds, *before)
        with vhost.spawn(words) as child:
            text, errors = child.communicate(timeout=2 * seconds + START_S)
            if child.returncode:
                raise LabError(f"vnet-rdma-perf failed on {ends.source.name}: {errors.strip()[-200:]}")
        found, there = _figures(text), ended()
    sample = {
        "datagram_oneway_us": found["latency_us"],
        "datagram_p99_us": found["p99_us"],
        "goodput_bps": found["gbit_s"] * 1e9,
        "resent": found["resent"],
    }
    if "cpu_s" in there:
        both_s = found["cpu_s_per_gb"] + there["cpu_s"] / (found["gbit_s"] / 8 * seconds)
        sample["application_s_a_gb"] = both_s
    return sample


def clear_writes(ends: Ends, seconds: float) -> Sample:
    """Writes across a sealed link that the interconnect does not seal itself."""
    return writes(ends, seconds, before=("env", "VNET_RDMA_SEAL=off"))


def datagrams(ends: Ends, seconds: float) -> Sample:
    """The same by plain UDP sockets, without a protocol, in datagrams of the interconnect's size."""
    messages = sockets.messages(ends, seconds, sockets.TUNNEL_BYTES)
    return {"goodput_bps": messages["messages_bps"]} | sockets.round_trips(ends, seconds)


def tcp(ends: Ends, seconds: float) -> Sample:
    """The same by TCP: one iperf3 stream, and small messages back to back, by sockets that sleep or poll."""
    streamed = workload.tcp(ends, seconds)
    median_us = min(
        workload.sockperf_ranks(
            workload.sockperf(ends.source, ends.destination, seconds, *options, message_bytes=TCP_BYTES)
        )["tcp_median_us"]
        for options in ((), ("--nonblocked",))
    )
    return {
        "goodput_bps": streamed["tcp_bps"],
        "datagram_oneway_us": median_us / 2,
        "application_s_a_gb": streamed["load_cores"] * 8e9 / streamed["tcp_bps"],
    }


def copies(ends: Ends, seconds: float) -> Sample:
    """Messages that one process copies into memory which it shares with another."""
    words = [str(vhost.example("copies")), str(ONE_HOST_BYTES), str(seconds)]
    return {"goodput_bps": json.loads(machine.execute(ends.source, *words, timeout_s=seconds + START_S))["bps"]}


RDMA, UDP, OVER_TCP, MEMCPY = "interconnect", "UDP sockets", "TCP", "memcpy by shared memory"
CLEAR = "interconnect in clear text"
SEALED = Vnet("vnet, sealed", container="veth", sealed=True)
NATIVE = Bare()
MPI_PATHS: tuple[Contender, ...] = (NATIVE, VxlanDevice(), VxlanContainers(), VNET, TAP)


def _under(options: Options) -> Iterator[tuple[Conditions, Settings]]:
    """Conditions and settings of each underlay."""
    for wire, mtu in options.settings():
        yield {"wire": wire, "MTU": mtu}, Settings(name=LAB, vms=0, wire=wire, underlay_mtu=mtu, mtu=mtu)


def _compared(options: Options, turns: list[Turn]) -> list[Turn]:
    """The turns; of revisions only those of the interconnect, by the revisions' names."""
    if not options.vnets:
        return turns
    own = [turn for turn in turns if turn.contender.startswith(f"{RDMA}, ")]
    return [replace(turn, contender=turn.contender.removeprefix(f"{RDMA}, ")) for turn in own]


def cases(options: Options) -> list[Case]:
    """All cases: writes, Open MPI, one host, faults, a bulk guest, virtual machines."""
    found = [*_writes(options), *_mpi(options), _one_host(options), *_faults(options), *_beside(options)]
    return found if options.vnets else [*found, _machines(options)]


def _writes(options: Options) -> list[Case]:
    """Writes between two hosts, against sockets on the same paths."""
    seconds = options.seconds(3)
    everybody = [By(RDMA, path, writes) for path in options.vnets or (VNET, NATIVE)]
    # Without sealing by the engine, to see what that costs: the link seals either way.
    everybody += [] if options.vnets else [By(RDMA, SEALED, writes), By(CLEAR, SEALED, clear_writes)]
    everybody += [By(UDP, VNET, datagrams), By(UDP, NATIVE, datagrams)]
    everybody += [By(OVER_TCP, path, tcp) for path in (NATIVE, VNET, TAP)]
    turns = [each.turn(seconds) for each in everybody]
    return [
        Case(conditions | {"load": "writes"}, settings, _compared(options, turns))
        for conditions, settings in _under(options)
    ]


def _mpi(options: Options) -> list[Case]:
    """Messages of Open MPI by size, and the HPC Challenge suite, by the provider and by TCP."""
    order = mpi.QUICK_ORDER if options.quick else mpi.ORDER

    def turns(load: Callable[[Ends, str], Sample]) -> list[Turn]:
        everybody = [By(RDMA, vnet, lambda ends, _: load(ends, mpi.FABRIC)) for vnet in options.vnets or (VNET,)]
        everybody += [By(OVER_TCP, path, lambda ends, _: load(ends, mpi.TCP)) for path in MPI_PATHS]
        return _compared(options, [each.turn(0) for each in everybody])

    def messages(size: int) -> Callable[[Ends, str], Sample]:
        def load(ends: Ends, transports: str) -> Sample:
            sample = mpi.messages(ends, size, transports)
            return sample | {"oneway_bps": 8 * size / sample["oneway_us"] * 1e6}

        return load

    def challenge(ranks: int) -> Callable[[Ends, str], Sample]:
        def load(ends: Ends, transports: str) -> Sample:
            report = mpi.challenge_report([ends.source, ends.destination] * (ranks // 2), order, transports)
            mpi.challenge_checks(report)
            return mpi.challenge_figures(report)

        return load

    found = []
    for conditions, settings in _under(options):
        for size in mpi.MESSAGE_BYTES[:: 6 if options.quick else 1]:
            found.append(Case(conditions | {"bytes": size}, settings, turns(messages(size))))
        for ranks in RANKS[:1] if options.quick else RANKS:
            case = conditions | {"load": "HPC Challenge", "ranks": ranks}
            found.append(Case(case, settings, turns(challenge(ranks))))
    return found


def _one_host(options: Options) -> Case:
    """1 MiB messages between containers of one host, against copies by shared memory."""
    seconds = options.seconds(3)

    def large(ends: Ends, seconds: float) -> Sample:
        return writes(ends, seconds, ONE_HOST_BYTES)

    turns = [By(RDMA, vnet, large).turn(seconds) for vnet in options.vnets or (VNET,)]
    # Copies between processes need no path.
    memory = replace(By(MEMCPY, VNET, copies).turn(seconds), contender=MEMCPY)
    turns += [memory, By(OVER_TCP, VNET, tcp).turn(seconds)]
    settings = Settings(name=LAB, hosts=1, containers=2, vms=0)
    return Case({"between": "containers of one host"}, settings, _compared(options, turns))


def _faults(options: Options) -> list[Case]:
    """Checked writes through a relay on a third host that loses and delays datagrams."""
    seconds = options.seconds(3)
    paths: Sequence[Contender] = options.vnets or (VNET, NATIVE)
    settings = Settings(name=LAB, hosts=3, vms=0)

    def turn(path: Contender, faults: tuple[int, int]) -> Turn:
        def load(topology: Topology, ends: Ends) -> Sample:
            workload.meet(ends)
            return checked(_middle(topology, ends), ends, seconds, faults)

        return replace(told(path, load), contender=f"{RDMA}, {path.name}")

    return [
        Case({"faults": name}, settings, _compared(options, [turn(path, faults) for path in paths]))
        for name, faults in FAULTS.items()
    ]


def _middle(topology: Topology, ends: Ends) -> Node:
    """The node of the second host on the same network as the ends."""
    return topology.hosts[1] if ends.source.kind is Kind.HOST else topology.machines(Kind.CONTAINER, 2)[0]


def checked(middle: Node, ends: Ends, seconds: float, faults: tuple[int, int]) -> Sample:
    """Writes with different bytes each, through a relay with these faults. Raises LabError if bytes arrive wrong."""
    faulty = str(vhost.example("faults"))
    server, relayed = f"{ends.destination.address}:{PORT}", f"{middle.address}:{RELAY_PORT}"
    pid, log = middle.file(".relay.pid"), middle.file(".relay.log")
    log.unlink(missing_ok=True)
    with vhost.spawn(machine.namespace_command(ends.destination, [faulty, "serve", server])) as serving:
        if serving.stdout is None or not serving.stdout.readline():
            raise LabError(f"the receiver does not start on {ends.destination.name}")
        words = [faulty, "relay", relayed, server, *map(str, faults)]
        process.start(machine.namespace_command(middle, words), pid, log)
        try:
            wait_until("the relay to be ready", lambda: "ready" in log.read_text(), START_S, log)
            words = [faulty, "check", f"{relayed}/0", str(seconds)]
            found = json.loads(machine.execute(ends.source, *words, timeout_s=seconds + 2 * START_S))
        finally:
            process.stop(pid)
    if found["wrong_bytes"]:
        raise LabError(f"{found['wrong_bytes']} bytes arrived wrong at {ends.destination.name}")
    return {f"goodput_{name}" if name == "bps" else name: value for name, value in found.items()}


def _beside(options: Options) -> list[Case]:
    """A guest's small writes, alone and beside another guest's stream between the same hosts."""
    seconds = options.seconds(3)
    settings = Settings(name=LAB, vms=0, containers=2)

    def turn(vnet: Vnet, beside: str, name: str, before: Sequence[str]) -> Turn:
        def load(topology: Topology, ends: Ends) -> Sample:
            workload.meet(ends)
            near, far = (topology.machines(Kind.CONTAINER, host.host) for host in topology.hosts)
            with _bulk(near[1], far[1], seconds) if beside == BESIDE else contextlib.nullcontext():
                measured = Ends(near[0], far[0])
                workload.meet(measured)
                sample = writes(measured, seconds, 8, before)
            return {name: sample[name] for name in ("datagram_oneway_us", "datagram_p99_us")}

        return replace(told(vnet, load), contender=f"{RDMA}, {vnet.name}{name}")

    found = []
    for beside in (ALONE, BESIDE):
        turns = [turn(vnet, beside, "", ()) for vnet in options.vnets or (VNET,)]
        turns += [] if options.vnets else [turn(VNET, beside, PRIORITY, FIRST)]
        found.append(Case({"beside": beside}, settings, _compared(options, turns)))
    return found


def _machines(options: Options) -> Case:
    """Writes between virtual machines: by the engine of their hosts' vnetd, and by UDP and TCP of their kernels."""
    seconds = options.seconds(3)
    guests = VnetGuests(VNET, lab.with_rdma)

    def by(attachment: str) -> Callable[[Ends, float], Sample]:
        return lambda ends, seconds: machine_writes(ends, seconds, attachment)

    def stream(ends: Ends, seconds: float) -> Sample:
        return {"goodput_bps": workload.tcp(ends, seconds)["tcp_bps"]}

    everybody = [By(f"{RDMA} by vnetd", guests, by("vm")), By(f"{RDMA} by UDP", guests, by("process"))]
    everybody.append(By(OVER_TCP, guests, stream))
    settings = Settings(name=LAB, vms=1, containers=0, rdma=True)
    return Case({"between": EMULATED}, settings, [each.turn(seconds) for each in everybody])


def machine_writes(ends: Ends, seconds: float, attachment: str) -> Sample:
    """RDMA writes between applications in virtual machines: 8 bytes in one direction, then a stream."""
    for guest in (ends.source, ends.destination):
        machine.execute(guest, rdma.LARGER_PIECES)
        if attachment == "vm":
            rdma.start_helper(guest)
    name = f"{ends.destination.address}:{PORT}"
    server = " ".join(rdma.command("server", name, "once", attachment=attachment))
    rdma.start(ends.destination, server, Path("/tmp/server.log"), name)
    words = ["client", f"{name}/0", str(ONE_HOST_BYTES), f"{seconds},{seconds}"]
    text = machine.execute(
        ends.source, *rdma.command(*words, attachment=attachment), timeout_s=2 * seconds + rdma.BOOT_S
    )
    found = _figures(text)
    return {
        "datagram_oneway_us": found["latency_us"],
        "datagram_p99_us": found["p99_us"],
        "goodput_bps": found["gbit_s"] * 1e9,
    } | ({"resent": found["resent"]} if "resent" in found else {})  # An engine of vnetd does not tell it.


@contextlib.contextmanager
def _bulk(source: Node, destination: Node, seconds: float) -> Iterator[None]:
    """Streams writes between two guests while the context lasts."""
    workload.meet(Ends(source, destination))
    pid, log = source.file(".bulk.pid"), source.file(".bulk.log")
    # The measured guest's latency and rate take their seconds each.
    words = _client(source, destination, LARGE_BYTES, 0, 2 * seconds + START_S)
    with _server(destination):
        process.start(words, pid, log)
        try:
            wait_until("the bulk guest to stream", lambda: process.find(pid) is not None, START_S, log)
            time.sleep(BEHIND_S)
            yield
            if process.find(pid) is None:
                raise LabError("the bulk guest has ended before the measurement", log)
        finally:
            process.stop(pid)
