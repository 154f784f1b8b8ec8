"""Load for contenders between hosts: iperf3, ping, sockperf. Each function returns a sample."""

import contextlib
import re
import statistics
from collections.abc import Iterator

from vnetlab import machine, measure, process
from vnetlab.bench import usage, vhost
from vnetlab.bench.contenders import Ends, reach
from vnetlab.bench.result import UDP_WRITES, Sample, percentile
from vnetlab.run import LabError, wait_until
from vnetlab.topology import Node

MEET_S = 10
SOCKPERF_PORT = 11111
MESSAGE_BYTES = 64
VCPU = "CPU "
"""Name prefix of QEMU's vCPU threads."""
PING_INTERVAL_S = 0.001
RANKS = {"median": 0.5, "p99": 0.99, "p99.9": 0.999}
FRAGMENTS = re.compile(r"^FRAG: .*memory 0$", re.MULTILINE)
"""No fragments wait in a network namespace."""
EXPIRE_S = 60
SOCKPERF_RANK = re.compile(r"percentile (\d+\.\d+) =\s+([\d.]+)")


def tcp(ends: Ends, seconds: float) -> Sample:
    """One TCP stream for `seconds`."""
    meet(ends)
    return _throughput(ends, "tcp_bps", seconds)


def udp(ends: Ends, seconds: float) -> Sample:
    """One UDP stream at full rate per write size; counts the datagrams that arrive."""
    meet(ends)
    _wait_for_fragments(ends.destination)
    sample: Sample = {}
    with usage.measured(ends.processes) as used:
        for size in UDP_WRITES:
            words = ("--udp", "--bitrate", "0", "--length", str(size))
            sample[f"udp_{size}_bps"] = measure.throughput(ends.source, ends.destination, *words, seconds=seconds)
    return sample | used.sample()


def _wait_for_fragments(node: Node) -> None:
    """Waits until no fragments are left of datagrams that lost others.

    For 30 s they fill the memory in which whole datagrams are put together, also those of the path measured before.
    """
    what = f"fragments at {node.name} to expire"
    wait_until(what, lambda: FRAGMENTS.search(machine.execute(node, "cat /proc/net/sockstat")), EXPIRE_S)


def rtt(ends: Ends, seconds: float) -> Sample:
    """Round trips by ping and of TCP requests, `seconds` each."""
    meet(ends)
    with usage.measured(ends.processes) as used:
        sample = pings(ends, seconds) | flood(ends, round(seconds / PING_INTERVAL_S))
        text = sockperf(ends.source, ends.destination, seconds)
    return sample | sockperf_ranks(text) | used.sample()


def tcp_and_ping(ends: Ends, seconds: float) -> Sample:
    """One TCP stream, then pings, `seconds` each: for machines that have only these tools."""
    meet(ends)
    return _throughput(ends, "tcp_bps", seconds) | pings(ends, seconds)


def pings(ends: Ends, seconds: float) -> Sample:
    """Round trips by ping, one per millisecond, or back to back if a round trip takes longer."""
    count = max(10, round(seconds / PING_INTERVAL_S))
    options = ("-i", str(PING_INTERVAL_S), "-w", str(max(1, round(2 * seconds))))
    _, times = measure.ping(ends.source, ends.destination.address, *options, count=count)
    if len(times) < count / 4:
        raise LabError(f"only {len(times)} of {count} pings were answered")
    return _ping_ranks("ping", times)


def flood(ends: Ends, count: int) -> Sample:
    """Round trips by back-to-back pings."""
    _, times = measure.ping(ends.source, ends.destination.address, "-i", "0", "-w", "60", count=count, timeout_s=90)
    if len(times) < count / 4:
        raise LabError(f"only {len(times)} of {count} back-to-back pings were answered")
    return _ping_ranks("flood", times)


def _ping_ranks(kind: str, times: list[float]) -> Sample:
    """Percentiles of ping's times, which are whole microseconds: as coarse as a third of a round trip back to back.

    So the median is that of grouped data: interpolated within its microsecond by the shares of pings below and in it.
    """
    ranks = {f"{kind}_{name}_us": percentile(times, share) for name, share in RANKS.items()}
    return ranks | {f"{kind}_median_us": statistics.median_grouped(times)}


@contextlib.contextmanager
def new_flows(source: Node, destination: Node, rate: int) -> Iterator[None]:
    """A container sends from `rate` new MAC addresses per second while the context lasts; with rate 0 none does."""
    pid = source.file(".scanner.pid")
    words = [str(vhost.example("scan")), "eth0", destination.mac, str(rate)]
    try:
        if rate:
            process.start(machine.namespace_command(source, words), pid, source.file(".scanner.log"))
        yield
        if rate and process.find(pid) is None:
            raise LabError("the scanner has ended before the stream", source.file(".scanner.log"))
    finally:
        process.stop(pid)


def meet(ends: Ends) -> None:
    """Waits until the two ends can ping each other."""
    there = ends.destination.address
    wait_until(f"{there} to answer {ends.source.name}", lambda: reach(ends.source, ends.destination), MEET_S)


def sockperf_ranks(text: str) -> Sample:
    """Percentiles from sockperf's output in microseconds; raises LabError if the output has none."""
    found = {float(rank): float(value) for rank, value in SOCKPERF_RANK.findall(text)}
    try:
        return {f"tcp_{name}_us": found[round(share * 100, 1)] for name, share in RANKS.items()}
    except KeyError as error:
        raise LabError(f"sockperf gave no percentiles: {text.strip()[-200:]}") from error


def _throughput(ends: Ends, metric: str, seconds: float) -> Sample:
    """One TCP stream and its CPU time."""
    vcpus = [(pid, thread) for pid in ends.processes.values() for thread in usage.named_threads(pid, VCPU)]
    before = sum(usage.thread_s(*vcpu) for vcpu in vcpus)
    with usage.measured(ends.processes) as used:
        end = measure.iperf3(ends.source, ends.destination, seconds=seconds)["end"]
    percent = end["cpu_utilization_percent"]
    client, server = percent["host_total"] / 100, percent["remote_total"] / 100
    load = {"load_cores": client + server, "cores_client": client, "cores_server": server}
    if vcpus:
        load["vcpu_cores"] = (sum(usage.thread_s(*vcpu) for vcpu in vcpus) - before) / used.seconds
    return {metric: end["sum_received"]["bits_per_second"]} | load | used.sample()


def sockperf(source: Node, destination: Node, seconds: float, *options: str, message_bytes: int = MESSAGE_BYTES) -> str:
    """Runs TCP requests back to back; returns sockperf's report. Options are for both ends."""
    where = ["--tcp", "-i", destination.address, "-p", str(SOCKPERF_PORT), *options]
    pid, log = destination.file(".sockperf.pid"), destination.file(".sockperf.log")
    process.start(machine.namespace_command(destination, ["sockperf", "server", *where]), pid, log)
    try:
        # sockperf buffers its message that it listens: wait for the socket instead.
        listening = ["ss", "-Hltn", f"sport = :{SOCKPERF_PORT}"]
        wait_until("sockperf to listen", lambda: machine.execute(destination, *listening).strip(), 10, log)
        words = ["sockperf", "ping-pong", *where, "-m", str(message_bytes), "-t", str(max(1, round(seconds)))]
        return machine.execute(source, *words, "--full-rtt", timeout_s=seconds + 30)
    finally:
        process.stop(pid)
