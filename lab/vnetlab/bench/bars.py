"""The figures that docs/performance.md and README.md quote, looked up in docs/measurements/*.json.

A bar is a bound that vnet should reach. Whether it is met follows from the stored medians, so the table cannot
contradict the pages of the benches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from vnetlab.bench.result import METRICS, Conditions, Result

Results = Mapping[str, Result]
"""Stored results by bench."""


@dataclass(frozen=True)
class Cell:
    """One median: its bench, conditions, contender and metric."""

    bench: str
    conditions: Conditions
    contender: str
    metric: str

    def value(self, results: Results) -> float:
        """The median in base units. Raises KeyError if the bench has no such series."""
        series = results[self.bench].find(self.conditions, self.contender, self.metric)
        if series is None:
            raise KeyError(f"{self.bench}.json has no {self.metric} of {self.contender} under {self.conditions}")
        return series.median

    def show(self, results: Results, unit: bool = True) -> str:
        """The median as text."""
        metric = METRICS[self.metric]
        return f"{metric.show(self.value(results))} {metric.unit if unit else ''}".strip()


@dataclass(frozen=True)
class Bar:
    """A bound for one median, or for its ratio to another."""

    text: str
    cell: Cell
    at_least: float | None = None
    at_most: float | None = None
    """Bounds in displayed units, not base units; bounds of the ratio if there is a `base`."""
    base: Cell | None = None
    cause: str = ""
    """Why the bar is missed; displayed only then."""

    def measured(self, results: Results) -> float:
        """The value that is compared with the bound."""
        if self.base:
            return self.cell.value(results) / self.base.value(results)
        return self.cell.value(results) / METRICS[self.cell.metric].scale

    def met(self, results: Results) -> bool:
        """Whether the measured value is within the bound."""
        value = self.measured(results)
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)

    def row(self, results: Results) -> list[str]:
        """The cells of the bar's row."""
        figure = self.cell.show(results)
        if self.base:
            figure = (
                f"{self.measured(results):.2f}x ({self.cell.show(results, unit=False)} / {self.base.show(results)})"
            )
        verdict = "met" if self.met(results) else f"**not met**{': ' * bool(self.cause)}{self.cause}"
        sign, bound = ("\u2265", self.at_least) if self.at_least is not None else ("\u2264", self.at_most)
        limit = f"{sign} {bound:g}{'x' if self.base else f' {METRICS[self.cell.metric].unit}'.rstrip()}"
        return [f"{self.text}: {limit}", figure, verdict, f"[{self.cell.bench}](measurements/{self.cell.bench}.md)"]


def _tcp(wire: str, mtu: int, contender: str) -> Cell:
    return Cell("tcp", {"wire": wire, "MTU": mtu}, contender, "tcp_bps")


def _udp(contender: str, size: int, mtu: int) -> Cell:
    return Cell("udp", {"wire": "none", "MTU": mtu}, contender, f"udp_{size}_bps")


def _rtt(contender: str, metric: str) -> Cell:
    return Cell("rtt", {"wire": "none", "MTU": 1500}, contender, metric)


def _small(path: str, load: str, contender: str, metric: str) -> Cell:
    mtu = {"MTU": 1500} if path == "link" else {}
    return Cell("small", {"path": path, **mtu, "load": load}, contender, metric)


def _vm(contender: str, metric: str) -> Cell:
    return Cell("vm", {"wire": "none", "MTU": 1500}, contender, metric)


def _parts(between: str, contender: str, metric: str) -> Cell:
    return Cell("ablation", {"between": between}, contender, metric)


def _routes(count: int, metric: str) -> Cell:
    return Cell("scale", {"routes": count}, "vnet", metric)


VXLAN = "kernel VXLAN, containers"
TAP = "QEMU tap, bridge, kernel VXLAN"
ADAPTIVE = "adaptive mode and yield"
LIKE_VNETU = "like VNET/U: one frame a system call, blocking"
FRAMES, STREAM = "64-byte frames", "TSO stream"
MILLION = 1_000_000
_COPIES = "four copies per byte that the kernel avoids ([note](lab-notes/2026-11-20-container-tcp.md))"
_FLOOR = "6 us above the minimal forwarder ([note](lab-notes/2026-11-22-round-trip-latency.md))"
_EMULATED = "the emulated vCPUs leave at most 1.16x ([note](lab-notes/2026-11-22-virtual-machine-tcp.md))"
_GUESTS = "the emulated guests' own time ([note](lab-notes/2026-11-22-virtual-machine-latency.md))"

BARS = (
    Bar(
        "TCP between containers / kernel VXLAN",
        _tcp("none", 1500, "vnet"),
        1.0,
        None,
        _tcp("none", 1500, VXLAN),
        _COPIES,
    ),
    Bar("TCP between containers / tinc", _tcp("none", 1500, "vnet"), 10, None, _tcp("none", 1500, "tinc")),
    Bar("TCP between containers / Nebula", _tcp("none", 1500, "vnet"), 10, None, _tcp("none", 1500, "Nebula")),
    Bar(
        "UDP, 8800-byte writes, MTU 9000 / kernel VXLAN",
        _udp("vnet", 8800, 9000),
        at_least=3,
        base=_udp(VXLAN, 8800, 9000),
        cause="more than the bare underlay reaches ([note](lab-notes/2026-11-22-udp-receivers.md))",
    ),
    Bar("TCP on 1 Gbit/s, MTU 9000 / native", _tcp("1g", 9000, "vnet"), 0.99, None, _tcp("1g", 9000, "native")),
    Bar("TCP on 1 Gbit/s, MTU 1500 / native", _tcp("1g", 1500, "vnet"), 0.95, None, _tcp("1g", 1500, "native")),
    Bar(
        "TCP on 10 Gbit/s, MTU 9000 / native",
        _tcp("10g", 9000, "vnet"),
        0.98,
        None,
        _tcp("10g", 9000, "native"),
        _COPIES,
    ),
    Bar(
        "TCP on 10 Gbit/s, MTU 1500 / native",
        _tcp("10g", 1500, "vnet"),
        0.94,
        None,
        _tcp("10g", 1500, "native"),
        _COPIES,
    ),
    Bar(
        "vhost-user to vhost-user, 64 bytes: busy cycles per frame",
        _small("one host", FRAMES, "vnet", "cycles_a_frame"),
        at_most=200,
        cause="cache lines of the other core, as for OVS-DPDK ([note](lab-notes/2026-11-22-same-host-copies.md))",
    ),
    Bar(
        "vhost-user to vhost-user, 64 bytes / OVS-DPDK",
        _small("one host", FRAMES, "vnet", "frames_per_s"),
        at_least=1.0,
        base=_small("one host", FRAMES, "OVS-DPDK", "frames_per_s"),
    ),
    Bar("64 bytes across a link, per core", _small("link", FRAMES, "vnet", "frames_per_s_a_core"), at_least=2),
    Bar(
        "TSO stream across a link, per dispatcher core",
        _small("link", STREAM, "vnet", "tso_bps_a_core"),
        at_least=40,
        cause="bare UDP sockets reach less ([note](lab-notes/2026-11-22-super-frames-across-a-link.md))",
    ),
    Bar("TCP between virtual machines / QEMU tap", _vm("vnet", "tcp_bps"), 1.2, None, _vm(TAP, "tcp_bps"), _EMULATED),
    Bar(
        "Cached lookup, 1 000 000 routes / 10 routes",
        _routes(MILLION, "cached_ns"),
        None,
        1.5,
        _routes(10, "cached_ns"),
    ),
    Bar("Table lookup, 1 000 000 routes / 10 routes", _routes(MILLION, "few_ns"), None, 1.5, _routes(10, "few_ns")),
    Bar(
        "Lookup over the whole table, 1 000 000 routes / 10 routes",
        _routes(MILLION, "all_ns"),
        at_most=1.5,
        base=_routes(10, "all_ns"),
        cause="a million keys do not fit the processor's caches",
    ),
    Bar("Memory per route, 1 000 000 routes", _routes(MILLION, "bytes_a_route"), at_most=200),
    Bar("Idle daemon, one interface", Cell("scale", {"interfaces": 1}, "vnet", "daemon_cores_idle"), at_most=0.005),
    Bar("RSS, 256 interfaces", Cell("scale", {"interfaces": 256}, "vnet", "rss_bytes"), at_most=64),
    Bar("Container ping, back to back", _parts("containers", ADAPTIVE, "flood_median_us"), at_most=25, cause=_FLOOR),
    Bar(
        "Container ping, back to back / native",
        _parts("containers", ADAPTIVE, "flood_median_us"),
        at_most=8.3,
        base=_parts("containers", "native", "flood_median_us"),
    ),
    Bar("Container ping, one per ms", _parts("containers", ADAPTIVE, "ping_median_us"), at_most=25, cause=_FLOOR),
    Bar("Container ping p99 / median (`rtt`)", _rtt("vnet", "ping_p99_us"), None, 3, _rtt("vnet", "ping_median_us")),
    Bar(
        "Container ping p99 / median (`ablation`)",
        _parts("containers", ADAPTIVE, "ping_p99_us"),
        at_most=3,
        base=_parts("containers", ADAPTIVE, "ping_median_us"),
        cause="other threads on the two cores ([note](lab-notes/2026-11-22-round-trip-latency.md))",
    ),
    Bar("TCP request round trip / native", _rtt("vnet", "tcp_median_us"), None, 2, _rtt("native", "tcp_median_us")),
    Bar(
        "TCP request round trip / kernel VXLAN", _rtt("vnet", "tcp_median_us"), None, 1.25, _rtt(VXLAN, "tcp_median_us")
    ),
    Bar(
        "Virtual machine ping / QEMU tap", _vm("vnet", "ping_median_us"), None, 0.9, _vm(TAP, "ping_median_us"), _GUESTS
    ),
    Bar(
        "Container ping of a VNET/U-like configuration / vnet",
        _parts("containers", LIKE_VNETU, "ping_median_us"),
        at_least=7,
        base=_parts("containers", ADAPTIVE, "ping_median_us"),
        cause="the minimal forwarder gains 2.9x ([note](lab-notes/2026-11-22-latency-bars.md))",
    ),
    Bar(
        "Container TCP / VNET/U-like configuration",
        _parts("containers", ADAPTIVE, "tcp_bps"),
        at_least=10,
        base=_parts("containers", LIKE_VNETU, "tcp_bps"),
    ),
    Bar(
        "Optimistic interrupts, small datagrams: notifications per frame",
        _parts("virtual machines", "+ optimistic interrupts", "small_notifications_a_frame"),
        at_most=0.2,
    ),
    Bar(
        "Optimistic interrupts, ping / direct",
        _parts("virtual machines", "+ optimistic interrupts", "ping_median_us"),
        at_most=1.0,
        base=_parts("virtual machines", ADAPTIVE, "ping_median_us"),
    ),
)


HEADLINES: tuple[tuple[str, Cell, Cell | None, Cell | None, Cell | None], ...] = (
    (
        "TCP between containers, MTU 1500",
        _tcp("none", 1500, "vnet"),
        _tcp("none", 1500, VXLAN),
        None,
        _tcp("none", 1500, "native"),
    ),
    (
        "TCP between containers, MTU 1500, 1 Gbit/s wire",
        _tcp("1g", 1500, "vnet"),
        _tcp("1g", 1500, VXLAN),
        None,
        _tcp("1g", 1500, "native"),
    ),
    (
        "UDP between containers, 1400-byte writes, MTU 1500",
        _udp("vnet", 1400, 1500),
        _udp(VXLAN, 1400, 1500),
        None,
        _udp("native", 1400, 1500),
    ),
    (
        "UDP between containers, 8800-byte writes, MTU 9000",
        _udp("vnet", 8800, 9000),
        _udp(VXLAN, 8800, 9000),
        None,
        _udp("native", 8800, 9000),
    ),
    (
        "ping between containers, back to back",
        _rtt("vnet", "flood_median_us"),
        _rtt(VXLAN, "flood_median_us"),
        None,
        _rtt("native", "flood_median_us"),
    ),
    (
        "TCP request and response between containers",
        _rtt("vnet", "tcp_median_us"),
        _rtt(VXLAN, "tcp_median_us"),
        None,
        _rtt("native", "tcp_median_us"),
    ),
    (
        "64-byte frames between two vhost-user ports of one host",
        _small("one host", FRAMES, "vnet", "frames_per_s"),
        None,
        _small("one host", FRAMES, "OVS-DPDK", "frames_per_s"),
        None,
    ),
    (
        "TCP between virtual machines (emulated processors; VXLAN behind QEMU's tap)",
        _vm("vnet", "tcp_bps"),
        _vm(TAP, "tcp_bps"),
        None,
        None,
    ),
)
"""Rows of the README's table: title, then vnet, kernel VXLAN, OVS-DPDK and the bare underlay."""


def bars(results: Results) -> str:
    """The table of all bars, as Markdown."""
    met = sum(bar.met(results) for bar in BARS)
    rows = [bar.row(results) for bar in BARS]
    return "\n".join([f"{met} of {len(BARS)} bars are met.", "", *_rows(["bar", "measured", "", "bench"], rows)])


def headlines(results: Results) -> str:
    """The table of the README, as Markdown."""
    rows = [[text, *(cell.show(results) if cell else "\N{EN DASH}" for cell in cells)] for text, *cells in HEADLINES]
    return "\n".join(_rows(["", "vnet", "kernel VXLAN", "OVS-DPDK", "bare underlay"], rows))


def _rows(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
