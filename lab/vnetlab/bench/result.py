"""Metrics and their units, results as JSON, medians and spreads, and the significance test for two series."""

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self, TypeVar

_T = TypeVar("_T")

Conditions = dict[str, str | int]
"""The conditions of a whole series: {"wire": "10g", "MTU": 9000}."""
Sample = dict[str, float]
"""The values of one run of one contender, by metric."""

SIGNIFICANCE = 0.05
"""Significance level: maximum p-value at which a difference counts."""


@dataclass(frozen=True)
class Metric:
    """A quantity. Values are stored in base units and displayed divided by `scale`."""

    title: str
    unit: str
    scale: float = 1
    digits: int = 2
    higher_is_better: bool = False
    in_tables: bool = True
    """Whether tables contain the metric. The JSON always does."""

    def show(self, value: float) -> str:
        """The value as text, without its unit."""
        return f"{value / self.scale:.{self.digits}f}"

    @property
    def heading(self) -> str:
        """Title and unit: "TCP, Gbit/s"."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


def _rate(title: str, digits: int = 2) -> Metric:
    return Metric(title, "Gbit/s", 1e9, digits, higher_is_better=True)


def _time(title: str) -> Metric:
    return Metric(title, "us", digits=1)


def _seconds(title: str) -> Metric:
    return Metric(title, "s", digits=3)


def _bytes(title: str) -> Metric:
    return Metric(title, "GB/s", 1e9, higher_is_better=True)


def _share(title: str) -> Metric:
    return Metric(title, "%", 0.01, digits=1)


PROCESSES = ("h1", "h2", "h1v1", "h2v1", "OVS", "ovsdb", "client", "server")
"""Processes whose CPU time is stored individually: daemons, virtual machines, Open vSwitch, iperf3's two ends."""
ROUND_TRIPS = ("ping", "flood", "tcp")
"""Pings at intervals, pings back to back, requests over TCP."""
EARLY_BYTES = (56, 256, 1_024, 2_048, 4_096)
"""Sizes of pings that show what early notifications buy."""
UDP_WRITES = (64, 1400, 8800, 64000)
TCP_WRITES = (1_024, 8_800, 64_000)
STEPS = ("announced", "received", "delivered", "notified", "reacted")
"""Steps of a ping through vnetd to a virtual machine, as `vnet interface timeline` has them."""
METRICS = {
    "tcp_bps": _rate("TCP"),
    **{f"tcp_{size}_bps": _rate(f"TCP {size} B") for size in TCP_WRITES},
    **{f"udp_{size}_bps": _rate(f"UDP {size} B", digits=3) for size in UDP_WRITES},
    "ping_min_us": _time("ping min"),
    **{f"{kind}_{rank}_us": _time(f"{kind} {rank}") for kind in ROUND_TRIPS for rank in ("median", "p99", "p99.9")},
    "ping_max_us": _time("ping max"),
    "way_us": _time("overlay round trip"),
    "machines_us": _time("guests' own time"),
    "oneway_us": _time("one way"),
    "exchange_us": _time("both ways at once"),
    "exchange_bps": _rate("both directions"),
    "messages_bps": _rate("64 KB messages"),
    "fitting_bps": _rate("64 KB messages, fitting datagrams"),
    "datagram_oneway_us": _time("8 bytes, one way"),
    "oneway_bps": _rate("ping-pong", digits=3),
    "goodput_bps": _rate("goodput"),
    "datagram_p99_us": _time("8 bytes, one way, p99"),
    "application_s_a_gb": Metric("applications' CPU time per GB", "s", digits=3),
    "resent": Metric("packets sent again", "", digits=0),
    "wrong_bytes": Metric("wrong bytes", "", digits=0),
    "pingpong_latency_us": _time("ping-pong latency"),
    "pingpong_bytes_per_s": _bytes("ping-pong"),
    "ring_latency_us": _time("ring latency"),
    "ring_bytes_per_s": _bytes("ring"),
    "ptrans_bytes_per_s": _bytes("PTRANS"),
    "fft_flops": Metric("FFT", "Gflop/s", 1e9, higher_is_better=True),
    "updates_per_s": Metric("RandomAccess", "M/s", 1e6, higher_is_better=True, digits=3),
    "operations_per_s": Metric("operations", "M/s", 1e6, digits=1, higher_is_better=True),
    "of_native": Metric("multiple of native", "x", higher_is_better=True),
    "whole_s": _seconds("whole"),
    "compute_s": _seconds("compute"),
    "pack_s": _seconds("pack"),
    "send_s": _seconds("send"),
    "wait_s": _seconds("wait"),
    "aggregate_bps": _rate("all pairs together"),
    "transfer_bps": _rate("transfers", digits=3),
    "cpu_s_a_gb": Metric("CPU time per GB", "s", digits=3),
    "user_cores": Metric("user", "cores", digits=3),
    "kernel_cores": Metric("system", "cores", digits=3),
    "softirq_cores": Metric("softirq", "cores", digits=3),
    "write_bytes_per_s": _bytes("writing"),
    "read_bytes_per_s": _bytes("reading"),
    **{f"ping_{size}_us": _time(f"ping {size} B") for size in EARLY_BYTES},
    "early_share": _share("early of all notifications"),
    "arrival_share": _share("at arrival of early"),
    "mispredicted_share": _share("mispredicted of those at arrival"),
    "premature_share": _share("premature of early"),
    "masked_share": _share("masked of early"),
    "withheld_share": _share("withheld of ends of coalescing"),
    "injected_share": _share("at the end of coalescing, of all notifications"),
    "trace_rtt_us": _time("round trip"),
    **{f"trace_{step}_us": _time(step) for step in STEPS},
    "trace_early_share": _share("announced before the receive"),
    "trace_late_share": _share("notified after it"),
    "tcp_variation": Metric("TCP, standard deviation", "%", 0.01, digits=1),
    "notifications_a_frame": Metric("notifications per frame", "", digits=3),
    "small_frames_per_s": Metric("small datagrams", "k/s", 1e3, higher_is_better=True, digits=1),
    "small_notifications_a_frame": Metric("small datagrams: notifications per frame", "", digits=3),
    "stream_notifications_a_frame": Metric("stream: notifications per frame", "", digits=3),
    "stream_daemon_cores": Metric("stream: daemons", "cores", digits=3),
    "kicks_a_frame": Metric("kicks per frame", "", digits=3),
    "wakeups_a_frame": Metric("wake-ups per frame", "", digits=3),
    "frames_per_s": Metric("frames", "M/s", 1e6, higher_is_better=True),
    "frames_per_s_a_core": Metric("frames per core", "M/s", 1e6, higher_is_better=True),
    "cycles_a_frame": Metric("busy cycles per frame", "cycles", digits=0),
    "thread_cycles_a_frame": Metric("all cycles per frame", "cycles", digits=0),
    "tso_bps": _rate("TSO stream"),
    "tso_bps_a_core": _rate("TSO stream per dispatcher core"),
    "cached_ns": Metric("lookup, cached", "ns", digits=1),
    "few_ns": Metric("lookup, table", "ns", digits=1),
    "all_ns": Metric("lookup, whole table", "ns", digits=1),
    "bytes_a_route": Metric("memory per route", "bytes", digits=0),
    "build_ms": Metric("time to build the table", "ms", digits=1),
    "seal_bps": _rate("sealing, per core"),
    "open_bps": _rate("opening, per core"),
    "wakeups_per_s": Metric("wake-ups", "1/s", digits=1),
    "rss_bytes": Metric("RSS", "MiB", 2**20, digits=1),
    "view_s": Metric("time to full view", "s"),
    "move_p99_s": Metric("move visible to 99 % after", "s", digits=3),
    "agent_cores": Metric("per agent", "cores", digits=4),
    "daemon_cores": Metric("daemons", "cores", digits=3),
    "daemon_cores_idle": Metric("idle daemon", "cores", digits=3),
    "vcpu_cores": Metric("vCPUs during TCP", "cores"),
    "load_cores": Metric("load generators", "cores"),
    "system_cores": Metric("whole machine", "cores"),
    **{f"cores_{name}": Metric(name, "cores", digits=3, in_tables=False) for name in PROCESSES},
}


BASE_UNITS = {
    "Gbit/s": "bit/s",
    "GB/s": "bytes/s",
    "Gflop/s": "flop/s",
    "M/s": "1/s",
    "k/s": "1/s",
    "MiB": "bytes",
    "%": "share",
}
"""Units of stored values by displayed unit, where the two differ."""


@dataclass
class Series:
    """All values of one metric of one contender under the same conditions, in round order."""

    conditions: Conditions
    contender: str
    metric: str
    values: list[float]

    @property
    def median(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Minimum and maximum."""
        return min(self.values), max(self.values)


@dataclass(frozen=True)
class Failure:
    """A contender that could not be measured, with the reason."""

    conditions: Conditions
    contender: str
    reason: str


@dataclass
class Result:
    """One run of one bench."""

    bench: str
    command: str
    date: str
    repeat: int
    quick: bool
    machine: dict[str, str]
    versions: dict[str, str]
    notes: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, conditions: Conditions, contender: str, sample: Sample) -> None:
        """Adds the values of one run."""
        for metric, value in sample.items():
            found = self.find(conditions, contender, metric)
            if found:
                found.values.append(value)
            else:
                self.series.append(Series(dict(conditions), contender, metric, [value]))

    def rounds(self, conditions: Conditions, contender: str) -> int:
        """Number of rounds in which the contender was measured under these conditions."""
        found = (each for each in self.series if (each.conditions, each.contender) == (conditions, contender))
        return max((len(series.values) for series in found), default=0)

    def find(self, conditions: Conditions, contender: str, metric: str) -> Series | None:
        """The series, or None if it was not measured."""
        for series in self.series:
            if (series.conditions, series.contender, series.metric) == (conditions, contender, metric):
                return series
        return None

    def metrics(self) -> list[str]:
        """All measured metrics, in the order of METRICS."""
        there = {series.metric for series in self.series}
        return [metric for metric in METRICS if metric in there]

    def conditions(self) -> list[Conditions]:
        """All conditions in the order of measurement."""
        return _distinct(entry.conditions for entry in [*self.series, *self.failures])

    def contenders(self) -> list[str]:
        """All contenders in the order of measurement, including failed ones."""
        return _distinct(entry.contender for entry in [*self.series, *self.failures])

    def write(self, path: Path) -> None:
        """Writes the result as JSON, as a whole or not at all; for readers, each series includes median and spread."""
        text = asdict(self)
        for entry, series in zip(text["series"], self.series, strict=True):
            low, high = series.spread
            entry |= {"unit": _base_unit(series.metric), "median": series.median, "min": low, "max": high}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps(text, indent=2) + "\n")
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file written by `write`."""
        return cls.parse(path.read_text())

    @classmethod
    def parse(cls, content: str) -> Self:
        """The result in such a file's text."""
        text = json.loads(content)
        fields = ("conditions", "contender", "metric", "values")
        series = [Series(**{name: entry[name] for name in fields}) for entry in text.pop("series")]
        failures = [Failure(**entry) for entry in text.pop("failures")]
        return cls(**text, series=series, failures=failures)


def _base_unit(metric: str) -> str:
    """The unit of stored values."""
    known = METRICS[metric]
    return known.unit if known.scale == 1 else BASE_UNITS[known.unit]


def _distinct(entries: Iterator[_T]) -> list[_T]:
    seen: list[_T] = []
    for entry in entries:
        if entry not in seen:
            seen.append(entry)
    return seen


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the smallest value with at least `share` of all values at or below it."""
    ordered = sorted(values)
    rank = -(-share * len(ordered) // 1)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


def difference_p(one: Sequence[float], other: Sequence[float]) -> float:
    """The p-value of the exact two-sided Mann-Whitney test.

    It enumerates every split of the pooled values, so it is suitable for at most about 10 values per series.
    """
    pooled = [*one, *other]
    middle = len(one) * len(other) / 2
    beaten = [[(a > b) + 0.5 * (a == b) for b in pooled] for a in pooled]

    def distance(chosen: tuple[int, ...]) -> float:
        rest = [index for index in range(len(pooled)) if index not in chosen]
        return abs(sum(beaten[a][b] for a in chosen for b in rest) - middle)

    observed = distance(tuple(range(len(one))))
    splits = [distance(chosen) for chosen in itertools.combinations(range(len(pooled)), len(one))]
    return sum(split >= observed - 1e-9 for split in splits) / len(splits)


def smallest_p(one: int, other: int) -> float:
    """The smallest p-value that `difference_p` can return for series of these lengths."""
    return difference_p(range(one), range(one, one + other))
