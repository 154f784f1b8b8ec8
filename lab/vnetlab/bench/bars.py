"""The figures that docs/performance.md and README.md quote, looked up in docs/measurements/*.json."""

from dataclasses import replace

from vnetlab.bench.bar import DASH, Bar, Cell, Group, Results, Worst, table
from vnetlab.bench.case import MTUS
from vnetlab.bench.contenders import TAP as BY_TAP
from vnetlab.bench.contenders import VNET as DEFAULT
from vnetlab.bench.contenders import Bare, VxlanContainers, VxlanDevice
from vnetlab.bench.guests import TapGuests
from vnetlab.bench.interconnect import ALONE, BESIDE, FAULTS, MEMCPY, OVER_TCP, PRIORITY, RANKS, RDMA, SEALED, UDP
from vnetlab.bench.kinds import BRIDGE
from vnetlab.bench.latency import ADAPTIVE as ADAPTIVE_VNET
from vnetlab.bench.latency import LIKE_VNET_U
from vnetlab.bench.mpi import MESSAGE_BYTES
from vnetlab.bench.result import UDP_WRITES, Conditions
from vnetlab.bench.suite import NEW_FLOWS

VNET, TAP, NATIVE = DEFAULT.name, BY_TAP.name, Bare().name
"""vnet as a user gets it, its path by TAP, and the bare underlay."""
VXLAN, DEVICE = VxlanContainers().name, VxlanDevice().name
"""Kernel VXLAN with a bridge, and without."""
ADAPTIVE, LIKE_VNETU = ADAPTIVE_VNET.name, LIKE_VNET_U.name
QEMU_TAP = TapGuests().name
FRAMES, STREAM = "64-byte frames", "TSO stream"
MILLION = 1_000_000
SHORT_BYTES = 1_024
"""Messages whose one-way time is compared with native."""
ROUND_TRIPS = {"ping one per ms": "ping_median_us", "ping back to back": "flood_median_us", "TCP": "tcp_median_us"}
CHALLENGE = {
    "PTRANS": "ptrans_bytes_per_s",
    "FFT": "fft_flops",
    "ring": "ring_bytes_per_s",
    "RandomAccess": "updates_per_s",
}
"""Rates of the HPC Challenge suite."""
CHALLENGE_LATENCY = {"ping-pong": "pingpong_latency_us", "ring": "ring_latency_us"}
_COPIES = "four copies per byte that the kernel avoids ([note](lab-notes/2026-11-20-container-tcp.md))"
_FLOOR = "6 us above the minimal forwarder ([note](lab-notes/2026-11-22-round-trip-latency.md))"
_EMULATED = "the emulated vCPUs leave at most 1.16x ([note](lab-notes/2026-11-22-virtual-machine-tcp.md))"
_HEADROOM = "[note](lab-notes/2026-11-24-headroom.md)"
_CONTROL = "[note](lab-notes/2026-11-25-congestion-control.md)"
_QUEUE = f"the container's own device has one more queue; the programs take half of the difference ({_CONTROL})"
_HOP = f"after a pause caches miss, on one device and three hash tables more ({_HEADROOM})"
_WAKING = f"processes that wake take most of the time, on the bare underlay, too ({_HEADROOM})"
_NEW_FLOWS = f"a kernel bridge without vnet keeps no more: the scanner's own time ({_CONTROL})"
_LARGE = f"large messages cost 4 % more than between bare hosts; PTRANS and RandomAccess scatter ({_CONTROL})"
_BARS = "[note](lab-notes/2026-11-27-interconnect-bars.md)"
_PATH = f"plain UDP sockets on this path have native TCP's time; the engine adds 1 to 2 us ({_BARS})"
_NO_COPY = f"on this path not even a sender without copies reaches it ({_BARS})"
_FASTER_TAP = f"the TAP path has become faster than the 45 us of a message that the bar assumes ({_BARS})"
_SCATTERS = f"large messages take longer; four ranks on two processors wait for each other's time slices ({_BARS})"
_ONE_HOST = f"a bell and the protocol's work take 12 % of the sender's time ({_BARS})"
_BESIDE = (
    f"both guests have the same two processors; turns by nice have 2.0x and 2.4x, by SCHED_FIFO 0.9x and 1.0x ({_BARS})"
)
_VARIES = f"alternating turns of the same build have 0.78x, 0.85x and 1.01x ({_BARS})"
_SPENT = f"the copies of a stream alone take more ({_BARS})"
_LARGE_MESSAGES = f"the kernel's path with its two copies is TCP's, too, and the receiver copies once more ({_BARS})"
_SEVERAL = f"several packets cost 4 to 5 us more than with sockets; large messages are copied once more ({_BARS})"
_GUESTS = "the emulated guests' own time ([note](lab-notes/2026-11-22-virtual-machine-latency.md))"


def _tcp(wire: str, mtu: int, contender: str) -> Cell:
    return Cell("tcp", {"wire": wire, "MTU": mtu}, contender, "tcp_bps")


def _udp(contender: str, size: int, mtu: int) -> Cell:
    return Cell("udp", {"wire": "none", "MTU": mtu}, contender, f"udp_{size}_bps")


def _rtt(contender: str, metric: str, mtu: int = 1500) -> Cell:
    return Cell("rtt", {"wire": "none", "MTU": mtu}, contender, metric)


def _small(path: str, load: str, contender: str, metric: str) -> Cell:
    mtu = {"MTU": 1500} if path == "link" else {}
    return Cell("small", {"path": path, **mtu, "load": load}, contender, metric)


def _vm(contender: str, metric: str) -> Cell:
    return Cell("vm", {"wire": "none", "MTU": 1500}, contender, metric)


def _parts(between: str, contender: str, metric: str) -> Cell:
    return Cell("ablation", {"between": between}, contender, metric)


def _routes(count: int, metric: str) -> Cell:
    return Cell("scale", {"routes": count}, VNET, metric)


def _sockets(contender: str, metric: str, mtu: int) -> Cell:
    return Cell("sockets", {"wire": "none", "MTU": mtu}, contender, metric)


def _message(contender: str, metric: str, size: int, mtu: int) -> Cell:
    return Cell("mpi", {"wire": "none", "MTU": mtu, "bytes": size}, contender, metric)


def _challenge(contender: str, metric: str, wire: str, mtu: int) -> Cell:
    return Cell("mpi", {"wire": wire, "MTU": mtu, "load": "HPC Challenge"}, contender, metric)


def _by(means: str, conditions: Conditions, metric: str, path: str = VNET) -> Cell:
    return Cell("interconnect", conditions, f"{means}, {path}", metric)


def _one_host(contender: str, metric: str, rate: int | None = None) -> Cell:
    flows = {} if rate is None else {"new flows per second": rate}
    return Cell("one-host", {"between": "containers of one host"} | flows, contender, metric)


def _round_trips(base: str) -> tuple[Bar, ...]:
    """Median round trips of each kind against a contender's."""
    return tuple(
        Bar(f"{name}, MTU {mtu}", _rtt(VNET, metric, mtu), base=_rtt(base, metric, mtu))
        for mtu in MTUS
        for name, metric in ROUND_TRIPS.items()
    )


def _bytes(size: int) -> str:
    """A size as text."""
    unit = next(unit for unit in (1 << 20, 1 << 10, 1) if size >= unit)
    return f"{size // unit} {'MiB' if unit > 1024 else 'KiB' if unit > 1 else 'B'}"


def _messages(base: str, largest: int, metrics: dict[str, str]) -> tuple[Bar, ...]:
    """Times of MPI messages up to a size against a contender's."""
    return tuple(
        Bar(
            f"{_bytes(size)} {name}, MTU {mtu}",
            _message(VNET, metric, size, mtu),
            base=_message(base, metric, size, mtu),
        )
        for mtu in MTUS
        for size in MESSAGE_BYTES
        if size <= largest
        for name, metric in metrics.items()
    )


def _suite(base: str, metrics: dict[str, str], wires: dict[str, str], mtus: tuple[int, ...]) -> tuple[Bar, ...]:
    """Figures of the HPC Challenge suite against a contender's."""
    return tuple(
        Bar(f"{name}{on}, MTU {mtu}", _challenge(VNET, metric, wire, mtu), base=_challenge(base, metric, wire, mtu))
        for wire, on in wires.items()
        for mtu in mtus
        for name, metric in metrics.items()
    )


def _bounded(
    bars: tuple[Bar, ...], at_least: float | None = None, at_most: float | None = None, *, apart: bool = False
) -> tuple[Bar, ...]:
    """These bars with a common bound."""
    return tuple(replace(bar, at_least=at_least, at_most=at_most, apart=apart) for bar in bars)


UNLIMITED, WIRES = {"none": ""}, {"1g": " on 1 Gbit/s", "10g": " on 10 Gbit/s"}
BOTH_WAYS = {"one way": "oneway_us", "both ways": "exchange_us"}

KERNEL_PATH: tuple[Bar | Worst, ...] = (
    Bar("TCP / VXLAN device", _tcp("none", 1500, VNET), 1.0, None, _tcp("none", 1500, DEVICE), cause=_QUEUE),
    Bar("TCP / bridge and VXLAN", _tcp("none", 1500, VNET), 1.15, None, _tcp("none", 1500, VXLAN)),
    Worst("Ping and TCP request / VXLAN device", _bounded(_round_trips(DEVICE), at_most=1.0), _HOP),
    Worst("Ping and TCP request / bridge and VXLAN", _bounded(_round_trips(VXLAN), at_most=0.65), _WAKING),
    Bar("One host: TCP / bridge", _one_host(VNET, "tcp_bps"), 1.0, None, _one_host(BRIDGE.name, "tcp_bps")),
    Worst(
        "One host: ping and TCP request / bridge",
        tuple(
            Bar(name, _one_host(VNET, metric), None, 1.0, _one_host(BRIDGE.name, metric))
            for name, metric in ROUND_TRIPS.items()
        ),
    ),
    Worst(
        "UDP, 64 to 64 000-byte writes / bridge and VXLAN",
        tuple(
            Bar(f"{size} B, MTU {mtu}", _udp(VNET, size, mtu), 1.0, None, _udp(VXLAN, size, mtu))
            for mtu in MTUS
            for size in UDP_WRITES
        ),
    ),
    Worst(
        "MPI messages, 1 B to 4 MiB / bridge and VXLAN",
        _bounded(_messages(VXLAN, MESSAGE_BYTES[-1], BOTH_WAYS), at_most=1.0),
    ),
    Worst("MPI messages up to 1 KiB / native", _bounded(_messages(NATIVE, SHORT_BYTES, BOTH_WAYS), at_most=1.6)),
    Worst("HPC Challenge, rates / native", _bounded(_suite(NATIVE, CHALLENGE, UNLIMITED, MTUS), 0.95), _LARGE),
    Worst(
        "HPC Challenge, latencies / native",
        _bounded(_suite(NATIVE, CHALLENGE_LATENCY, UNLIMITED, MTUS), at_most=1.3),
    ),
    Worst(
        "HPC Challenge, rates / bridge and VXLAN",
        _bounded(_suite(VXLAN, CHALLENGE, UNLIMITED, MTUS), 1.0),
        _LARGE,
    ),
    Worst(
        "HPC Challenge, latencies / bridge and VXLAN",
        _bounded(_suite(VXLAN, CHALLENGE_LATENCY, UNLIMITED, MTUS), at_most=1.0),
    ),
    Worst(
        "HPC Challenge on 1 and 10 Gbit/s, MTU 9000, rates / native",
        _bounded(_suite(NATIVE, CHALLENGE, WIRES, (9000,)), 0.98),
        _LARGE,
    ),
    Worst(
        "HPC Challenge on 1 and 10 Gbit/s, MTU 1500, rates / native",
        _bounded(_suite(NATIVE, CHALLENGE, WIRES, (1500,)), 0.94),
        _LARGE,
    ),
    Worst(
        "HPC Challenge on 1 and 10 Gbit/s, latencies over native",
        _bounded(_suite(NATIVE, CHALLENGE_LATENCY, WIRES, MTUS), at_most=2, apart=True),
    ),
    Bar("TCP on 10 Gbit/s, MTU 9000 / native", _tcp("10g", 9000, VNET), 0.98, None, _tcp("10g", 9000, NATIVE)),
    Bar("TCP on 10 Gbit/s, MTU 1500 / native", _tcp("10g", 1500, VNET), 0.94, None, _tcp("10g", 1500, NATIVE)),
    Bar("TCP on 1 Gbit/s, MTU 9000 / native", _tcp("1g", 9000, VNET), 0.99, None, _tcp("1g", 9000, NATIVE)),
    Bar("TCP on 1 Gbit/s, MTU 1500 / native", _tcp("1g", 1500, VNET), 0.95, None, _tcp("1g", 1500, NATIVE)),
    Worst(
        "UDP sockets, 64 KB messages in datagrams that fit a tunnel / native",
        tuple(
            Bar(f"MTU {mtu}", _sockets(VNET, "fitting_bps", mtu), 0.6, None, _sockets(NATIVE, "fitting_bps", mtu))
            for mtu in MTUS
        ),
    ),
    Worst(
        "UDP sockets, 8 bytes one way / native",
        tuple(
            Bar(
                f"MTU {mtu}",
                _sockets(VNET, "datagram_oneway_us", mtu),
                at_most=1.4,
                base=_sockets(NATIVE, "datagram_oneway_us", mtu),
            )
            for mtu in MTUS
        ),
    ),
    Bar(
        "TCP beside 100 000 new flows a second / without",
        _one_host(VNET, "tcp_bps", NEW_FLOWS),
        at_least=0.95,
        base=_one_host(VNET, "tcp_bps", 0),
        cause=_NEW_FLOWS,
    ),
)
"""Containers whose known flows stay in the kernel."""


def _writes(metric: str, means: str, path: str) -> tuple[Bar, ...]:
    """Writes of the interconnect against another means on a path."""
    return tuple(
        Bar(f"MTU {mtu}", _by(RDMA, under, metric), base=_by(means, under, metric, path))
        for mtu in MTUS
        for under in ({"wire": "none", "MTU": mtu, "load": "writes"},)
    )


def _ranks(metrics: dict[str, str]) -> tuple[Bar, ...]:
    """The HPC Challenge suite over the provider against TCP on the bare underlay."""
    return tuple(
        Bar(f"{name}, {ranks} ranks, MTU {mtu}", _by(RDMA, suite, metric), base=_by(OVER_TCP, suite, metric, NATIVE))
        for mtu in MTUS
        for ranks in RANKS
        for suite in ({"wire": "none", "MTU": mtu, "load": "HPC Challenge", "ranks": ranks},)
        for name, metric in metrics.items()
    )


def _sized(metric: str, sizes: tuple[int, ...], path: str) -> tuple[Bar, ...]:
    """Open MPI's messages over the provider against TCP on a path."""
    return tuple(
        Bar(f"{_bytes(size)}, MTU {mtu}", _by(RDMA, each, metric), base=_by(OVER_TCP, each, metric, path))
        for mtu in MTUS
        for size in sizes
        for each in ({"wire": "none", "MTU": mtu, "bytes": size},)
    )


def _faulty(metric: str) -> dict[str, Cell]:
    """Figures of checked writes, by fault."""
    return {name: _by(RDMA, {"faults": name}, metric) for name in FAULTS}


_WRITES: Conditions = {"wire": "none", "load": "writes"}


def _sealed(metric: str, mtu: int) -> Cell:
    """Writes across a sealed link."""
    return _by(RDMA, _WRITES | {"MTU": mtu}, metric, SEALED.name)


_LOSSES = {name: cell for name, cell in _faulty("goodput_bps").items() if any(FAULTS[name])}
_SHORT = tuple(size for size in MESSAGE_BYTES if size <= SHORT_BYTES)
_HOST = {"between": "containers of one host"}

INTERCONNECT: tuple[Bar | Worst, ...] = (
    Worst("Writes of 2 MiB / UDP sockets without a protocol", _bounded(_writes("goodput_bps", UDP, VNET), 0.92)),
    Worst("Writes of 2 MiB / TCP, native", _bounded(_writes("goodput_bps", OVER_TCP, NATIVE), 2), _NO_COPY),
    Worst(
        "8-byte write, one way / TCP by a TAP",
        _bounded(_writes("datagram_oneway_us", OVER_TCP, TAP), at_most=0.36),
        _FASTER_TAP,
    ),
    Worst(
        "8-byte write, one way / TCP, native",
        _bounded(_writes("datagram_oneway_us", OVER_TCP, NATIVE), at_most=1.0),
        _PATH,
    ),
    Worst(
        "Sealed: writes of 2 MiB",
        tuple(Bar(f"MTU {mtu}", _sealed("goodput_bps", mtu), at_least=15) for mtu in MTUS),
        f"rounds of one build have 13.1 to 20.6 Gbit/s, as the machine's speed changes ({_BARS})",
    ),
    Worst(
        "Sealed: 8-byte write, one way, over clear text",
        tuple(
            Bar(
                f"MTU {mtu}",
                _sealed("datagram_oneway_us", mtu),
                at_most=2,
                base=_by(RDMA, _WRITES | {"MTU": mtu}, "datagram_oneway_us"),
                apart=True,
            )
            for mtu in MTUS
        ),
    ),
    Worst(
        "Applications' CPU time per GB / TCP",
        _bounded(_writes("application_s_a_gb", OVER_TCP, VNET), at_most=0.2),
        _SPENT,
    ),
    Bar(
        "One host: writes of 1 MiB / memcpy by shared memory",
        _by(RDMA, _HOST, "goodput_bps"),
        at_least=0.8,
        base=Cell("interconnect", _HOST, MEMCPY, "goodput_bps"),
        cause=_ONE_HOST,
    ),
    Worst(
        "Open MPI up to 1 KiB, one way / TCP by a TAP",
        _bounded(_sized("oneway_us", _SHORT, TAP), at_most=0.25),
        _FASTER_TAP,
    ),
    Worst(
        "Open MPI, 4 MiB, ping-pong / TCP",
        _bounded(_sized("oneway_bps", MESSAGE_BYTES[-1:], VNET), 1.3),
        _LARGE_MESSAGES,
    ),
    Worst(
        "Open MPI, 1 B to 4 MiB, one way / TCP, native",
        _bounded(_sized("oneway_us", MESSAGE_BYTES, NATIVE), at_most=1.0),
        _SEVERAL,
    ),
    Worst("HPC Challenge, PTRANS / TCP, native", _bounded(_ranks({"PTRANS": CHALLENGE["PTRANS"]}), 1.0), _SCATTERS),
    Worst("HPC Challenge, latencies / TCP, native", _bounded(_ranks(CHALLENGE_LATENCY), at_most=1.0), _PATH),
    Worst(
        "Checked writes beside loss and reordering / without",
        tuple(Bar(name, cell, at_least=0.8, base=_faulty("goodput_bps")["none"]) for name, cell in _LOSSES.items()),
        _VARIES,
    ),
    Worst(
        "Wrong bytes beside loss and reordering",
        tuple(Bar(name, cell, at_most=0) for name, cell in _faulty("wrong_bytes").items()),
    ),
    Bar(
        "8-byte write with priority, p99, beside a bulk guest / alone",
        _by(RDMA, {"beside": BESIDE}, "datagram_p99_us", f"{VNET}{PRIORITY}"),
        at_most=2,
        base=_by(RDMA, {"beside": ALONE}, "datagram_p99_us", f"{VNET}{PRIORITY}"),
        cause=_BESIDE,
    ),
)
"""Applications past TCP, on containers as a user gets them."""

BY_VNETD: tuple[Bar | Worst, ...] = (
    Bar(
        "TCP / bridge and VXLAN",
        _tcp("none", 1500, TAP),
        1.0,
        None,
        _tcp("none", 1500, VXLAN),
        _COPIES,
    ),
    Bar("TCP / tinc", _tcp("none", 1500, TAP), 10, None, _tcp("none", 1500, "tinc")),
    Bar("TCP / Nebula", _tcp("none", 1500, TAP), 10, None, _tcp("none", 1500, "Nebula")),
    Bar(
        "UDP, 8800-byte writes, MTU 9000 / bridge and VXLAN",
        _udp(TAP, 8800, 9000),
        at_least=3,
        base=_udp(VXLAN, 8800, 9000),
        cause="more than the bare underlay reaches ([note](lab-notes/2026-11-22-udp-receivers.md))",
    ),
    Bar("TCP on 1 Gbit/s, MTU 9000 / native", _tcp("1g", 9000, TAP), 0.99, None, _tcp("1g", 9000, NATIVE)),
    Bar("TCP on 1 Gbit/s, MTU 1500 / native", _tcp("1g", 1500, TAP), 0.95, None, _tcp("1g", 1500, NATIVE)),
    Bar(
        "TCP on 10 Gbit/s, MTU 9000 / native",
        _tcp("10g", 9000, TAP),
        0.98,
        None,
        _tcp("10g", 9000, NATIVE),
        _COPIES,
    ),
    Bar(
        "TCP on 10 Gbit/s, MTU 1500 / native",
        _tcp("10g", 1500, TAP),
        0.94,
        None,
        _tcp("10g", 1500, NATIVE),
        _COPIES,
    ),
    Bar("Ping, back to back", _parts("containers", ADAPTIVE, "flood_median_us"), at_most=25, cause=_FLOOR),
    Bar(
        "Ping, back to back / native",
        _parts("containers", ADAPTIVE, "flood_median_us"),
        at_most=8.3,
        base=_parts("containers", NATIVE, "flood_median_us"),
    ),
    Bar("Ping, one per ms", _parts("containers", ADAPTIVE, "ping_median_us"), at_most=25, cause=_FLOOR),
    Bar("Ping p99 / median (`rtt`)", _rtt(TAP, "ping_p99_us"), None, 3, _rtt(TAP, "ping_median_us")),
    Bar(
        "Ping p99 / median (`ablation`)",
        _parts("containers", ADAPTIVE, "ping_p99_us"),
        at_most=3,
        base=_parts("containers", ADAPTIVE, "ping_median_us"),
        cause="other threads on the two cores ([note](lab-notes/2026-11-22-round-trip-latency.md))",
    ),
    Bar("TCP request round trip / native", _rtt(TAP, "tcp_median_us"), None, 2, _rtt(NATIVE, "tcp_median_us")),
    Bar(
        "TCP request round trip / bridge and VXLAN",
        _rtt(TAP, "tcp_median_us"),
        None,
        1.25,
        _rtt(VXLAN, "tcp_median_us"),
    ),
    Bar(
        "Ping of a VNET/U-like configuration / vnet",
        _parts("containers", LIKE_VNETU, "ping_median_us"),
        at_least=7,
        base=_parts("containers", ADAPTIVE, "ping_median_us"),
        cause="the minimal forwarder gains 2.9x ([note](lab-notes/2026-11-22-latency-bars.md))",
    ),
    Bar(
        "TCP / VNET/U-like configuration",
        _parts("containers", ADAPTIVE, "tcp_bps"),
        at_least=10,
        base=_parts("containers", LIKE_VNETU, "tcp_bps"),
    ),
)
"""Containers on a TAP: every frame passes a dispatcher."""

MACHINES: tuple[Bar | Worst, ...] = (
    Bar(
        "vhost-user to vhost-user, 64 bytes: busy cycles per frame",
        _small("one host", FRAMES, VNET, "cycles_a_frame"),
        at_most=200,
        cause="cache lines of the other core, as for OVS-DPDK ([note](lab-notes/2026-11-22-same-host-copies.md))",
    ),
    Bar(
        "vhost-user to vhost-user, 64 bytes / OVS-DPDK",
        _small("one host", FRAMES, VNET, "frames_per_s"),
        at_least=1.0,
        base=_small("one host", FRAMES, "OVS-DPDK", "frames_per_s"),
    ),
    Bar("64 bytes across a link, per core", _small("link", FRAMES, VNET, "frames_per_s_a_core"), at_least=2),
    Bar(
        "TSO stream across a link, per dispatcher core",
        _small("link", STREAM, VNET, "tso_bps_a_core"),
        at_least=40,
        cause="bare UDP sockets reach less ([note](lab-notes/2026-11-22-super-frames-across-a-link.md))",
    ),
    Bar(
        "TCP between virtual machines / QEMU tap", _vm(VNET, "tcp_bps"), 1.2, None, _vm(QEMU_TAP, "tcp_bps"), _EMULATED
    ),
    Bar(
        "Virtual machine ping / QEMU tap",
        _vm(VNET, "ping_median_us"),
        None,
        0.9,
        _vm(QEMU_TAP, "ping_median_us"),
        _GUESTS,
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

TABLES: tuple[Bar | Worst, ...] = (
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
    Bar("Idle daemon, one interface", Cell("scale", {"interfaces": 1}, VNET, "daemon_cores_idle"), at_most=0.005),
    Bar("RSS, 256 interfaces", Cell("scale", {"interfaces": 256}, VNET, "rss_bytes"), at_most=64),
)

GROUPS = (
    Group("Containers, the kernel's own path", KERNEL_PATH, contender=TAP),
    Group("The interconnect", INTERCONNECT),
    Group("Containers, by a TAP and vnetd", BY_VNETD),
    Group("Virtual machines and vhost-user", MACHINES),
    Group("Routes and the daemon", TABLES),
)

HEADLINES: tuple[tuple[str, Cell, Cell | None, Cell | None, Cell | None], ...] = (
    (
        "TCP between containers, MTU 1500",
        _tcp("none", 1500, VNET),
        _tcp("none", 1500, VXLAN),
        None,
        _tcp("none", 1500, NATIVE),
    ),
    (
        "TCP between containers, MTU 1500, 1 Gbit/s wire",
        _tcp("1g", 1500, VNET),
        _tcp("1g", 1500, VXLAN),
        None,
        _tcp("1g", 1500, NATIVE),
    ),
    (
        "UDP between containers, 1400-byte writes, MTU 1500",
        _udp(VNET, 1400, 1500),
        _udp(VXLAN, 1400, 1500),
        None,
        _udp(NATIVE, 1400, 1500),
    ),
    (
        "UDP between containers, 8800-byte writes, MTU 9000",
        _udp(VNET, 8800, 9000),
        _udp(VXLAN, 8800, 9000),
        None,
        _udp(NATIVE, 8800, 9000),
    ),
    (
        "ping between containers, back to back",
        _rtt(VNET, "flood_median_us"),
        _rtt(VXLAN, "flood_median_us"),
        None,
        _rtt(NATIVE, "flood_median_us"),
    ),
    (
        "TCP request and response between containers",
        _rtt(VNET, "tcp_median_us"),
        _rtt(VXLAN, "tcp_median_us"),
        None,
        _rtt(NATIVE, "tcp_median_us"),
    ),
    (
        "64-byte frames between two vhost-user ports of one host",
        _small("one host", FRAMES, VNET, "frames_per_s"),
        None,
        _small("one host", FRAMES, "OVS-DPDK", "frames_per_s"),
        None,
    ),
    (
        "TCP between virtual machines (emulated processors; VXLAN behind QEMU's tap)",
        _vm(VNET, "tcp_bps"),
        _vm(QEMU_TAP, "tcp_bps"),
        None,
        None,
    ),
)
"""Rows of the README's table: title, then vnet, kernel VXLAN, OVS-DPDK and the bare underlay."""


def bars(results: Results) -> str:
    """The tables of all bars, as Markdown."""
    asked = [bar for group in GROUPS for bar in group.asked(results)]
    total = f"{sum(bar.met(results) for bar in asked)} of {len(asked)} measured bars are met."
    return "\n\n".join([total, *("\n".join(group.text(results)) for group in GROUPS)])


def headlines(results: Results) -> str:
    """The table of the README, as Markdown."""
    rows = [[text, *(cell.show(results) if cell else DASH for cell in cells)] for text, *cells in HEADLINES]
    return "\n".join(table(["", "vnet", "kernel VXLAN", "OVS-DPDK", "bare underlay"], rows))
