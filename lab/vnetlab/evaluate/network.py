"""Experiments on the network alone: streams, requests, pings, pairs of machines, MPI messages, the interconnect."""

import contextlib
import os
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from vnetlab import daemon, machine, measure, process, remote
from vnetlab.bench import latency, mpi, usage, vhost, workload
from vnetlab.bench.case import Case, Turn
from vnetlab.bench.contenders import Bare, Contender, Ends, Vnet, absent
from vnetlab.bench.result import METRICS, TCP_WRITES, Conditions, Sample
from vnetlab.evaluate.kinds import KINDS, NATIVE, TAP
from vnetlab.evaluate.options import STREAM_SECONDS, EvaluateOptions, Load, case
from vnetlab.run import LabError, wait_until
from vnetlab.topology import Kind, Node, Topology

PAIRS = (1, 2, 3, 4)
REQUEST_BYTES = (workload.MESSAGE_BYTES, 1_024, 16_384)
"""Sizes of TCP requests (paper 002, figure 1)."""
VARIATION_PINGS = 5_000
"""As in paper 001, figure 6."""
MESSAGE_BYTES = (64, 1_024, 16_384, 262_144, 4 << 20)
QUIET = "none"
NOISES = {
    "files": 'while :; do dd if=/dev/zero of="$0" bs=1M count=64 conv=fsync status=none; done',
    "computing": "while :; do :; done",
}
TRANSFER_BYTES = (64, 1_024, 4_096, 32_768, 131_072, 2 << 20)
TRANSFER_PORT = 7471
NATIVE_TCP = "native, TCP"
TCP_KINDS: tuple[Contender, ...] = (Bare(NATIVE_TCP), replace(TAP, name="vnet, TAP, TCP"))
BOUND = "native, sockets without protocol"


def streams(options: EvaluateOptions, _conditions: Conditions, ends: Ends) -> Sample:
    """UDP and TCP by size of writes, and TCP in iperf3's own."""
    sample = workload.udp(ends, options.seconds(1)) | workload.tcp(ends, options.seconds(3))
    for size in TCP_WRITES[-1:] if options.quick else TCP_WRITES:
        rate = measure.throughput(ends.source, ends.destination, "--length", str(size), seconds=options.seconds(2))
        sample[f"tcp_{size}_bps"] = rate
    return sample


def requests(options: EvaluateOptions, conditions: Conditions, ends: Ends) -> Sample:
    """Round trips of TCP requests of one size; with the smallest also of pings."""
    _need_sockperf()
    size, seconds = int(conditions["bytes"]), options.seconds(2)
    if size == REQUEST_BYTES[0]:
        return workload.rtt(ends, seconds)
    workload.meet(ends)
    return workload.sockperf_ranks(workload.sockperf(ends.source, ends.destination, seconds, message_bytes=size))


def _need_sockperf() -> None:
    """Raises LabError with the command that installs sockperf if it is missing."""
    if reason := absent("sockperf", "sockperf"):
        raise LabError(reason)


def stream_seconds(options: EvaluateOptions) -> list[Conditions]:
    """How long the stream is whose variation is measured: figures of different durations do not mix."""
    return [{STREAM_SECONDS: 2 if options.quick else 3_600 if options.long else 30}]


def variation(options: EvaluateOptions, conditions: Conditions, ends: Ends) -> Sample:
    """Pings of 64 bytes, then one TCP stream (paper 001, figure 6)."""
    found = latency.pings(ends, 64, 100 if options.quick else VARIATION_PINGS)
    return found | latency.stream(ends, int(conditions[STREAM_SECONDS]))


def pings(options: EvaluateOptions, conditions: Conditions, ends: Ends) -> Sample:
    """Pings of one size."""
    return latency.pings(ends, int(conditions["bytes"]), 100 if options.quick else options.pings)


def messages(_options: EvaluateOptions, conditions: Conditions, ends: Ends) -> Sample:
    """MPI messages of one size."""
    return mpi.messages(ends, int(conditions["bytes"]))


def pairs(options: EvaluateOptions) -> list[Case]:
    """One to four pairs of containers at once (paper 003, tables 1 and 2)."""
    return [_pairs(options, under, count, KINDS) for under in options.settings() for count in options.some(PAIRS)]


def dispatchers(options: EvaluateOptions) -> list[Case]:
    """Four pairs of containers at once, by number of dispatchers (paper 000, figures 4 and 5)."""
    counts = range(1, max(2, os.cpu_count() or 1) + 1)
    vnets = [Vnet(f"vnet, {count} dispatcher{'s' * (count > 1)}", dispatchers=count) for count in counts]
    return [_pairs(options, under, max(PAIRS), [NATIVE, *vnets]) for under in options.settings()]


def _pairs(options: EvaluateOptions, under: tuple[str, int], pairs: int, kinds: Iterable[Contender]) -> Case:
    """Pairs of containers at once, on an underlay of this wire and MTU."""
    wire, mtu = under
    conditions: Conditions = {"wire": wire, "MTU": mtu, "pairs": pairs}
    return case(conditions, options.topology(wire, mtu, pairs, hosts=2), kinds, at_once(options, pairs))


def at_once(options: EvaluateOptions, pairs: int) -> Load:
    """One TCP stream in each of so many pairs of machines."""

    def load(topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        workload.meet(ends)
        with usage.measured(ends.processes) as used:
            rate = _aggregate(topology, ends, pairs, options.seconds(3))
        # Of virtual machines, only the first of each host has a metric of its own.
        return {"aggregate_bps": rate} | {name: value for name, value in used.sample().items() if name in METRICS}

    return load


def _aggregate(topology: Topology, ends: Ends, pairs: int, seconds: float) -> float:
    """One TCP stream in each pair of machines at once, or as many between the hosts: their rate while all run.

    Each stream has an iperf3 of its own at either end: one iperf3 runs all of its streams in one thread.
    """
    if ends.source.kind is Kind.HOST:
        sources, destinations = [ends.source] * pairs, [ends.destination] * pairs
        ports = [measure.IPERF3_PORT + number for number in range(pairs)]
    else:
        sources, destinations = (topology.machines(ends.source.kind, host)[:pairs] for host in (1, 2))
        ports = [measure.IPERF3_PORT] * pairs
    for destination, port in zip(destinations, ports, strict=True):
        measure.iperf3_server(destination, port)

    def stream(number: int) -> dict:
        source, destination = sources[number], destinations[number]
        return measure.iperf3_client(source, destination, "--interval", "0.1", seconds=seconds, port=ports[number])

    with ThreadPoolExecutor(pairs) as pool:
        return measure.common_rate(pool.map(stream, range(pairs)))


def noise(options: EvaluateOptions) -> list[Case]:
    """Round trips beside a process of the first host that computes, or writes files (paper 001, isolation)."""
    return [_noise(options, under, name) for under in options.settings() for name in (*NOISES, QUIET)[options.quick :]]


def _noise(options: EvaluateOptions, under: tuple[str, int], name: str) -> Case:
    """Round trips beside this noise, on an underlay of this wire and MTU."""

    def load(topology: Topology, ends: Ends, _kind: Contender) -> Sample:
        _need_sockperf()
        with contextlib.nullcontext() if name == QUIET else _noisy(topology.hosts[0], NOISES[name]):
            return workload.rtt(ends, options.seconds(2))

    wire, mtu = under
    return case({"wire": wire, "MTU": mtu, "noise": name}, options.topology(wire, mtu, hosts=2), KINDS, load)


@contextlib.contextmanager
def _noisy(host: Node, script: str) -> Iterator[None]:
    """Runs a shell script on a host while the context lasts. It may write to one file, `$0`."""
    file = Path("/var/tmp") / f"{host.lab}.noise"
    pid, log = host.file(".noise.pid"), host.file(".noise.log")
    process.start(machine.namespace_command(host, ["sh", "-c", script, str(file)]), pid, log)
    try:
        yield
    finally:
        process.stop(pid)
        machine.execute(host, "rm", "-f", str(file))


def interconnect(options: EvaluateOptions) -> list[Case]:
    """The interconnect's writes by size, beside TCP and a bound without protocol (paper 004, figures 2 and 3)."""
    seconds = options.seconds(2)
    cases = []
    for wire, mtu in options.settings():
        for size in options.some(TRANSFER_BYTES):

            def load(_topology: Topology, ends: Ends, kind: Contender, size: int = size) -> Sample:
                return (_tcp_writes if kind in TCP_KINDS else _rdma_writes)(ends, size, seconds)

            conditions: Conditions = {"wire": wire, "MTU": mtu, "bytes": size}
            found = case(conditions, options.topology(wire, mtu, hosts=2), [*KINDS, *TCP_KINDS], load)
            bound = Turn(BOUND, _no_bound, partial(_bound, seconds=seconds))
            cases.append(replace(found, turns=[*found.turns, bound]))
    return cases


def _rdma_writes(ends: Ends, size: int, seconds: float) -> Sample:
    """One-way time of 8-byte writes, then rate and CPU time of writes of `size` bytes."""
    workload.meet(ends)
    program = daemon.binaries() / "vnet-rdma-perf"
    if not program.exists():
        raise LabError(f"{program} is missing: run 'make build'")
    where = f"{ends.destination.address}:{TRANSFER_PORT}"
    pid, log = ends.destination.file(".rdma.pid"), ends.destination.file(".rdma.log")
    process.start(machine.namespace_command(ends.destination, [str(program), "server", where]), pid, log)
    try:
        listening = ["ss", "-Hlun", f"sport = :{TRANSFER_PORT}"]
        wait_until("the interconnect's server", lambda: machine.execute(ends.destination, *listening).strip(), 10, log)
        words = [str(program), "client", f"{where}/0", str(size), str(seconds)]
        command = remote.wrap(machine.namespace_command(ends.source, words))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, **pipes, env=machine.environment(ends.source)) as client:
            first = client.stdout.readline()
            # The rate is measured after the first line.
            with usage.split() as work:
                second = client.stdout.readline()
    finally:
        process.stop(pid)
    found = rdma_figures(first + second)
    return found | work.sample(found["transfer_bps"] * seconds / 8, found["transfer_bps"])


def rdma_figures(text: str) -> Sample:
    """The sample from vnet-rdma-perf's two lines; raises LabError if it failed."""
    figures = dict(zip(text.split()[::2], text.split()[1::2], strict=False))
    try:
        return {"oneway_us": float(figures["latency_us"]), "transfer_bps": float(figures["gbit_s"]) * 1e9}
    except (KeyError, ValueError) as error:
        raise LabError(f"vnet-rdma-perf gave no figures: {text.strip()[-200:]}") from error


def _tcp_writes(ends: Ends, size: int, seconds: float) -> Sample:
    """Rate and CPU time of a TCP stream in writes of `size` bytes, at most 1 MiB: iperf3 takes no more."""
    length = str(min(size, 1 << 20))
    workload.meet(ends)
    measure.iperf3_server(ends.destination)
    with usage.split() as work:
        report = measure.iperf3_client(ends.source, ends.destination, "--length", length, seconds=seconds)
    received = report["end"]["sum_received"]
    rate = received["bits_per_second"]
    return {"transfer_bps": rate} | work.sample(received["bytes"], rate)


def _bound(topology: Topology, seconds: float) -> Sample:
    """The rate of datagrams between bare sockets of the hosts, and its CPU time."""
    report, _sender, work = vhost.bare_transfer(topology, seconds)
    found = {"transfer_bps": report["bps"]}
    # This machine's CPU time says nothing about others.
    is_here = not remote.machines_of(topology.settings.name)
    return found | (work.sample(report["bytes"], report["bps"]) if is_here else {})


def _no_bound() -> str | None:
    """The reason if the program of the bound is not built."""
    try:
        vhost.example("sockets")
    except LabError as error:
        return str(error)
    return None
