"""Measures round trips by ping and throughput by iperf3 between nodes, and formats them as a table."""

import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from vnetlab import machine
from vnetlab.run import LabError, progress
from vnetlab.topology import Kind, Node, Topology

PINGS = 200
PING_INTERVAL_S = 0.005
THROUGHPUT_S = 2
IPERF3_PORT = 5201
ENDED_S = "ended_s"
"""Key in a report of iperf3: the time on this machine's monotonic clock when it exited."""
PATIENCE = 4
"""Time limit of pings as a multiple of the ideal time: a busy machine sends them late."""
SENT = re.compile(r"(\d+) packets transmitted, ")
ANSWER = re.compile(r"bytes from .* icmp_seq=(\d+)(?:.* time=([\d.]+) ms)?")
WORDS = {Kind.HOST: "host", Kind.CONTAINER: "container", Kind.VM: "VM"}


@dataclass(frozen=True)
class Path:
    """Measurements from one node to another."""

    sent: int
    received: int
    rtt_us: float
    """Median round trip."""
    throughput_bps: float
    """Received TCP payload, bits per second; median of repeated runs."""

    @property
    def loss(self) -> float:
        """Share of unanswered pings."""
        return 1 - self.received / self.sent


@dataclass(frozen=True)
class Pair:
    """Two machines, the path between them, and the bare underlay between their hosts if they differ."""

    source: str
    destination: str
    words: str
    overlay: Path
    underlay: Path | None


def deadline_s(count: int, interval_s: float) -> int:
    """Time limit for `count` pings in seconds."""
    return math.ceil(PATIENCE * count * interval_s) + 2


def ping(
    source: Node,
    address: str,
    *options: str,
    count: int = PINGS,
    interval_s: float = PING_INTERVAL_S,
    timeout_s: float = 60,
) -> tuple[int, list[float]]:
    """Pings `count` times; returns the number of requests, and the round trips of answered ones in microseconds.

    A round trip is NaN if the payload is too small for a timestamp.

    With a count alone, ping exits two round trips after the last request, too early for late answers on a busy machine.
    With a deadline it waits and continues to send; requests beyond the count are ignored.

    Raises LabError if ping itself cannot run.
    """
    deadline = deadline_s(count, interval_s)
    words = ["ping", "-n", "-c", str(count), "-i", str(interval_s), "-w", str(deadline), *options, address]
    status, text = machine.attempt(source, *words, timeout_s=deadline + timeout_s)
    totals = SENT.search(text)
    if not totals:
        raise LabError(f"'{' '.join(words)}' on {source.name} failed with status {status}: {text.strip()[-200:]}")
    answers = ((int(sequence), float(time or "nan") * 1000) for sequence, time in ANSWER.findall(text))
    answered = {sequence: time for sequence, time in answers if sequence <= count}
    return min(int(totals[1]), count), list(answered.values())


def throughput(source: Node, destination: Node, *options: str, seconds: float = THROUGHPUT_S) -> float:
    """Runs iperf3 from `source` to `destination`; returns received bits per second.

    Raises LabError with iperf3's message if it fails.
    """
    end = iperf3(source, destination, *options, seconds=seconds)["end"]
    return (end.get("sum_received") or end["sum"])["bits_per_second"]


def iperf3(source: Node, destination: Node, *options: str, seconds: float = THROUGHPUT_S) -> dict:
    """Runs iperf3 from `source` to `destination`; returns its report.

    Raises LabError with iperf3's message if it fails.
    """
    iperf3_server(destination)
    return iperf3_client(source, destination, *options, seconds=seconds)


def iperf3_server(node: Node, port: int = IPERF3_PORT) -> None:
    """Starts an iperf3 server for one client."""
    server = f"iperf3 --server --one-off --idle-timeout 60 --daemon --port {port}"
    machine.execute(node, *server.split())


def iperf3_client(
    source: Node, destination: Node, *options: str, seconds: float = THROUGHPUT_S, port: int = IPERF3_PORT
) -> dict:
    """Runs iperf3 from `source` to the server on `destination`; returns its report.

    Raises LabError with iperf3's message if it fails.
    """
    client = [
        "iperf3",
        "--client",
        destination.address,
        "--port",
        str(port),
        "--json",
        "--time",
        str(seconds),
        *options,
    ]
    error = ""
    for _ in range(20):  # The server daemonizes before it listens: retry.
        text = machine.attempt(source, *client, timeout_s=seconds + 30)[1]
        report = _report(text) | {ENDED_S: time.monotonic()}
        error = report.get("error", "")
        if "Connection refused" not in error:
            break
        time.sleep(0.05)
    if error:
        raise LabError(f"iperf3 from {source.name} to {destination.name}: {error}")
    return report


def common_rate(reports: Iterable[dict]) -> float:
    """Bits per second that streams of these iperf3 reports send together while all of them run.

    Streams that start one after the other have the machine to themselves for a while at either end, so the sum of their
    averages would be too high.
    """
    streams = [list(_intervals(report)) for report in reports]
    begin = max(min(start for start, _, _ in stream) for stream in streams)
    end = min(max(stop for _, stop, _ in stream) for stream in streams)
    if end <= begin:
        raise LabError("iperf3's streams did not run at the same time")
    total = 0.0
    for start, stop, bits in itertools.chain.from_iterable(streams):
        total += bits * max(0.0, min(stop, end) - max(start, begin)) / (stop - start)
    return total / (end - begin)


def _intervals(report: dict) -> Iterator[tuple[float, float, float]]:
    """Start and end of each interval of an iperf3 report, in seconds, and the bits that were sent in it.

    iperf3 tells its start in whole seconds only, but exits as soon as its last interval is over.
    """
    intervals = [interval["sum"] for interval in report["intervals"]]
    zero = report[ENDED_S] - intervals[-1]["end"]
    for found in intervals:
        if found["end"] > found["start"]:
            yield zero + found["start"], zero + found["end"], found["bytes"] * 8


def _report(text: str) -> dict:
    """Parses iperf3's JSON report, which may follow warnings."""
    try:
        return json.JSONDecoder().raw_decode(text, text.index("{"))[0]
    except ValueError:
        return {"error": text.strip()[-200:] or "no report"}


def path(source: Node, destination: Node, repeat: int = 1) -> Path:
    """Measures one path, after a first ping that resolves addresses."""
    ping(source, destination.address, "-w", "10", count=1)
    sent, times = ping(source, destination.address)
    if not times:
        raise LabError(f"{destination.name} answers no ping from {source.name}")
    rates = [throughput(source, destination) for _ in range(repeat)]
    return Path(sent, len(times), statistics.median(times), statistics.median(rates))


def pairs(topology: Topology, repeat: int = 1) -> list[Pair]:
    """Measures every pair of machines, and the underlay between every pair of hosts."""
    hosts = {host.host: host for host in topology.hosts}
    underlay: dict[tuple[int, int], Path] = {}
    for one, other in itertools.combinations(hosts.values(), 2):
        progress(f"underlay {one.name} - {other.name}: ping, iperf3")
        underlay[one.host, other.host] = path(one, other, repeat)
    measured = []
    for source, destination in itertools.combinations(topology.machines(), 2):
        progress(f"{source.name} - {destination.name}: ping, iperf3")
        words = f"{WORDS[source.kind]} - {WORDS[destination.kind]}"
        overlay = path(source, destination, repeat)
        below = underlay.get((source.host, destination.host))
        measured.append(Pair(source.name, destination.name, words, overlay, below))
    return measured


def table(measured: Iterable[Pair]) -> str:
    """Measured pairs as a text table, those across hosts first."""
    column = f"{'LOSS':>8}{'RTT MEDIAN':>12}{'THROUGHPUT':>15}"
    rows = [
        f"{'':51} | {'overlay':^35} | {'bare underlay':^35}",
        f"{'PAIR':15}{'':36} | {column} | {column}",
        "-+-".join("-" * width for width in (51, 35, 35)),
    ]
    for pair in sorted(measured, key=lambda pair: pair.underlay is None):
        names = f"{pair.source} - {pair.destination}"
        where = "across hosts" if pair.underlay else "same host"
        below = _columns(pair.underlay) if pair.underlay else f"{'-':>8}{'-':>12}{'-':>15}"
        rows.append(f"{names:15}{pair.words:22}  {where:12} | {_columns(pair.overlay)} | {below}")
    return "\n".join(rows)


def as_json(topology: Topology, measured: Iterable[Pair]) -> str:
    """Measured pairs and the lab's settings as JSON."""
    return json.dumps({"settings": asdict(topology.settings), "pairs": [asdict(pair) for pair in measured]}, indent=2)


def _columns(measured: Path) -> str:
    return f"{measured.loss:8.1%}{measured.rtt_us:9.0f} us{measured.throughput_bps / 1e9:8.2f} Gbit/s"
