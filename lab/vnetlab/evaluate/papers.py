"""Every table and figure of the papers: its figures, and the experiment that repeats it, or why none does."""

from dataclasses import dataclass

from vnetlab.bench.latency import ADAPTIVE, BOTH
from vnetlab.bench.result import Conditions
from vnetlab.evaluate.claims import Claim, Reasons
from vnetlab.evaluate.files import OVERLAY, ROOT, VIRTIO
from vnetlab.evaluate.guests import EARLY_ALWAYS
from vnetlab.evaluate.kinds import BRIDGED, MACVLAN, NATIVE, VNETS
from vnetlab.evaluate.network import BOUND, NATIVE_TCP
from vnetlab.evaluate.reasons import (
    COPIES,
    EARLY_WHY,
    EMULATED,
    FASTER_FILES,
    GATHERED,
    LATENCY,
    NO_GUEST,
    NO_XEN,
    OPENVZ,
    PLUS_WHY,
    PROTOCOL,
    RATES,
    SCATTER,
    SOCKETS,
    STAND_IN,
    STREAM,
    TODAY,
)

PAPERS = {
    "000": "Xia et al., Fast VMM-based overlay networking for bridging the cloud and high performance computing "
    "(VNET/P)",
    "001": "Cui et al., Optimizing overlay-based virtual networking through optimistic interrupts and cut-through "
    "forwarding (VNET/P+)",
    "002": "Walters et al., A comparison of virtualization technologies for HPC",
    "003": "Nanos et al., Exploring I/O virtualization data paths for MPI applications in a cluster of VMs",
    "004": "Nanos et al., A smart HPC interconnect for clusters of virtual machines",
}


@dataclass(frozen=True)
class Entry:
    """A table or figure."""

    paper: str
    name: str
    title: str
    experiment: str = ""
    """The experiment that repeats it; empty if there is none."""
    claims: tuple[Claim, ...] = ()
    reason: str = ""
    """Why there is no experiment, or what an experiment leaves out."""
    more: tuple[str, ...] = ()
    """Further experiments on the same subject."""


def _overlay(text: str, metric: str, low: float, high: float, where: Conditions, worse: Reasons) -> Claim:
    """A claim about the paper's overlay against native, here vnet's best path."""
    return Claim(text, metric, low, high, VNETS, NATIVE.name, where, worse, NO_GUEST)


def _direct(text: str, metric: str, low: float, high: float, base: str, where: Conditions) -> Claim:
    """A claim about the paper's direct path."""
    return Claim(text, metric, low, high, (MACVLAN.name,), base, where, STAND_IN, STAND_IN)


def _bridged(text: str, metric: str, low: float, high: float, where: Conditions) -> Claim:
    """A claim about the paper's bridged path against native."""
    return Claim(text, metric, low, high, (BRIDGED.name,), NATIVE.name, where, STAND_IN, STAND_IN)


def _files(text: str, metric: str, low: float, storage: str, cache: str) -> Claim:
    """A claim about a rate of files on a kind of storage against the host's disk."""
    return Claim(text, metric, low, 1, (storage,), ROOT, {"cache": cache}, EMULATED, FASTER_FILES)


def _nas(ratios: dict[str, tuple[float, float]], wire: str) -> tuple[Claim, ...]:
    """The overlay's operations per second against native, by kernel."""
    return tuple(
        _overlay(f"{kernel} on {wire}", "operations_per_s", low, high, {"kernel": kernel, "wire": wire}, RATES)
        for kernel, (low, high) in ratios.items()
    )


def _drawing(
    paper: str, number: int, title: str, place: str, experiment: str = "", claims: tuple[Claim, ...] = ()
) -> Entry:
    reason = f"a drawing without figures; here: {place}"
    return Entry(paper, f"figure {number}", title, experiment, claims, reason)


_NO_FIGURE = "the paper's text has no figure of it"
_NO_INFINIBAND = "two ranks instead of 6 nodes, on tun devices with IPoIB's MTUs: there is no InfiniBand here"
_P_1G = {
    "EP": (0.988, 0.995),
    "MG": (0.873, 0.995),
    "CG": (0.855, 0.994),
    "FT": (0.819, 0.819),
    "IS": (0.917, 0.994),
    "LU": (0.806, 0.853),
    "SP": (0.893, 0.940),
    "BT": (0.946, 0.963),
}
_P_10G = {
    "EP": (0.989, 0.999),
    "MG": (0.743, 0.810),
    "CG": (0.862, 0.937),
    "FT": (0.858, 0.858),
    "IS": (0.989, 0.998),
    "LU": (0.743, 0.839),
    "SP": (0.919, 0.969),
    "BT": (0.780, 0.967),
}
_PLUS = {
    "EP": (0.994, 0.999),
    "MG": (0.904, 0.909),
    "CG": (0.864, 0.999),
    "FT": (0.999, 0.999),
    "IS": (0.998, 0.999),
    "LU": (0.940, 0.953),
    "SP": (0.981, 0.999),
    "BT": (0.918, 0.990),
}
_PASSTHROUGH = {
    "EP": (0.996, 0.999),
    "MG": (0.912, 0.918),
    "CG": (0.870, 0.999),
    "FT": (0.999, 0.999),
    "IS": (0.991, 0.999),
    "LU": (0.896, 0.938),
    "SP": (0.999, 0.999),
    "BT": (0.908, 0.999),
}
_TEN = {"wire": "10g"}

_VNET_P = (
    Entry(
        "000",
        "table 1",
        "Parameters of VNET/P",
        reason="settings, not figures: `mode`, `yield` and `threads` in [configuration](../configuration.md)",
    ),
    _drawing("000", 1, "Architecture", "[architecture](../../ARCHITECTURE.md)"),
    _drawing("000", 2, "Routing inside the core", "[architecture](../../ARCHITECTURE.md)"),
    _drawing("000", 3, "VMM-driven and guest-driven modes", f"both modes are rows of it; {_NO_FIGURE}", "ablation"),
    _drawing(
        "000",
        4,
        "Dispatchers on several cores",
        "`threads`, `threads_min` and `cpus` in [configuration](../configuration.md#threads-by-load)",
    ),
    Entry(
        "000",
        "figure 5",
        "Receive throughput by number of cores",
        "dispatchers",
        reason=f"with two processors it shows what sharing them costs, not the gain of further cores; {_NO_FIGURE}",
    ),
    _drawing("000", 6, "Adaptive mode", f"a row of it; {_NO_FIGURE}", "ablation"),
    _drawing("000", 7, "Data paths of transmission and reception", "[architecture](../../ARCHITECTURE.md)"),
    Entry(
        "000",
        "figure 8",
        "TCP throughput and UDP goodput",
        "streams",
        (
            _overlay("TCP on 1 Gbit/s", "tcp_bps", 1, 1, {"wire": "1g"}, COPIES),
            _overlay("TCP on 10 Gbit/s", "tcp_bps", 0.74, 0.78, {"wire": "10g"}, COPIES),
            _overlay("UDP, 64 000-byte writes, on 1 Gbit/s", "udp_64000_bps", 1, 1, {"wire": "1g"}, COPIES),
            _overlay("UDP, 64 000-byte writes, on 10 Gbit/s", "udp_64000_bps", 0.74, 0.74, {"wire": "10g"}, COPIES),
        ),
    ),
    Entry(
        "000",
        "figure 9",
        "Round trips by ICMP size",
        "pings",
        (_overlay("small pings", "ping_median_us", 2, 3, {"bytes": 56}, LATENCY),),
    ),
    Entry(
        "000",
        "figure 10",
        "MPI ping-pong, one way",
        "messages",
        (_overlay("64 bytes", "oneway_us", 2.5, 2.5, {"bytes": 64}, LATENCY),),
    ),
    Entry(
        "000",
        "figure 11",
        "MPI bandwidth by size, one way and both ways",
        "messages",
        (
            _overlay("4 MiB, time one way", "oneway_us", 1.35, 1.35, {"bytes": 4 << 20, "wire": "10g"}, COPIES),
            _overlay("4 MiB, both ways", "exchange_bps", 0.62, 0.62, {"bytes": 4 << 20, "wire": "10g"}, COPIES),
        ),
    ),
    Entry(
        "000",
        "figure 12",
        "HPCC latency and bandwidth",
        "challenge",
        (
            _overlay("latency on 1 Gbit/s", "pingpong_latency_us", 1.2, 2, {"wire": "1g"}, LATENCY),
            _overlay("latency on 10 Gbit/s", "pingpong_latency_us", 2, 3, {"wire": "10g"}, LATENCY),
            _overlay("bandwidth on 10 Gbit/s", "pingpong_bytes_per_s", 0.6, 0.75, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "000",
        "figure 13",
        "HPCC RandomAccess and FFT",
        "challenge",
        (
            _overlay("RandomAccess on 10 Gbit/s", "updates_per_s", 0.65, 0.7, {"wire": "10g"}, RATES),
            _overlay("FFT on 10 Gbit/s", "fft_flops", 0.6, 0.7, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "000",
        "figure 14",
        "NAS Parallel Benchmarks",
        "nas",
        _nas(_P_1G, "1g") + _nas(_P_10G, "10g"),
        "two ranks and smaller classes instead of 8 to 16 ranks of classes B and C",
    ),
    Entry(
        "000",
        "figure 15",
        "HPCC latency and bandwidth over IPoIB",
        "ipoib",
        (
            _overlay("ping-pong bandwidth", "pingpong_bytes_per_s", 0.7, 0.75, {}, RATES),
            _overlay("ping-pong latency", "pingpong_latency_us", 3, 4, {}, LATENCY),
            _overlay("ring bandwidth", "ring_bytes_per_s", 0.5, 0.55, {}, RATES),
            _overlay("ring latency", "ring_latency_us", 2.5, 3, {}, LATENCY),
        ),
        _NO_INFINIBAND,
    ),
    Entry(
        "000",
        "figure 16",
        "HPCC applications over IPoIB",
        "ipoib",
        (
            _overlay("RandomAccess", "updates_per_s", 0.75, 0.8, {}, RATES),
            _overlay("FFT", "fft_flops", 0.3, 0.45, {}, RATES),
        ),
        _NO_INFINIBAND,
    ),
    _drawing("000", 17, "VNET/P for Kitten", "not in scope; its host is the Kitten kernel"),
)


def _plus(text: str, metric: str, low: float, high: float) -> Claim:
    """A claim about what early interrupts and cut-through together gain in virtual machines."""
    where: Conditions = {"between": "virtual machines"}
    return Claim(text, metric, low, high, (BOTH.name,), ADAPTIVE.name, where, PLUS_WHY, PLUS_WHY, "ablation")


_VNET_P_PLUS = (
    _drawing("001", 1, "Architecture of VNET/P", "[architecture](../../ARCHITECTURE.md)"),
    _drawing("001", 2, "Time line of a virtual interrupt", "interrupts are emulated by KVM or QEMU"),
    _drawing(
        "001",
        3,
        "Early virtual interrupts",
        '`interrupts = "optimistic"`; its shares are those of section V',
        "interrupts",
        tuple(
            Claim(
                text, metric, share, share, (EARLY_ALWAYS,), "", {"between": "virtual machines"}, EARLY_WHY, EARLY_WHY
            )
            for text, metric, share in (
                ("premature of early", "premature_share", 0.005),
                ("masked of early", "masked_share", 0.1),
            )
        ),
    ),
    Entry(
        "001",
        "figure 4",
        "Round trips by ICMP size",
        "pings",
        (
            _overlay("small pings", "ping_median_us", 1.24, 1.24, {"bytes": 56, **_TEN}, LATENCY),
            _direct("small pings, passthrough", "ping_median_us", 1.12, 1.12, NATIVE.name, {"bytes": 56, **_TEN}),
            _plus("VNET/P+ / VNET/P, small pings", "ping_median_us", 0.43, 0.5),
        ),
        more=("ablation",),
    ),
    Entry(
        "001",
        "figure 5",
        "UDP goodput and TCP throughput",
        "streams",
        (
            _overlay("TCP on 10 Gbit/s", "tcp_bps", 0.94, 0.94, {"wire": "10g"}, COPIES),
            _overlay("UDP, 8 800-byte writes, on 10 Gbit/s", "udp_8800_bps", 0.9, 0.9, {"wire": "10g"}, COPIES),
            _plus("VNET/P+ / VNET/P, TCP", "tcp_bps", 1.27, 1.3),
        ),
        more=("ablation",),
    ),
    Entry(
        "001",
        "figure 6",
        "Variation of 5 000 pings and of an hour of TCP",
        "variation",
        reason="the stream takes 30 s, with `--long` an hour; `noise` has round trips beside a noisy process; "
        f"{_NO_FIGURE}",
        more=("noise",),
    ),
    Entry(
        "001",
        "figure 7",
        "MPI bandwidth by size, both ways",
        "messages",
        (_overlay("4 MiB, both ways", "exchange_bps", 0.9, 1, {"bytes": 4 << 20, "wire": "10g"}, COPIES),),
    ),
    Entry(
        "001",
        "figure 8",
        "HPCC latency and bandwidth",
        "challenge",
        (
            _overlay("latency on 10 Gbit/s", "pingpong_latency_us", 1.3, 1.3, {"wire": "10g"}, LATENCY),
            _overlay("bandwidth on 10 Gbit/s", "pingpong_bytes_per_s", 0.9, 1, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "001",
        "figure 9",
        "HPCC RandomAccess, PTRANS and FFT",
        "challenge",
        (
            _overlay("RandomAccess on 10 Gbit/s", "updates_per_s", 0.87, 0.87, {"wire": "10g"}, RATES),
            _overlay("PTRANS on 10 Gbit/s", "ptrans_bytes_per_s", 1, 1, {"wire": "10g"}, RATES),
            _overlay("FFT on 10 Gbit/s", "fft_flops", 1, 1, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "001",
        "figure 10",
        "NAS Parallel Benchmarks",
        "nas",
        _nas(_PLUS, "10g")
        + tuple(
            _direct(f"{kernel}, passthrough", "operations_per_s", low, high, NATIVE.name, {"kernel": kernel, **_TEN})
            for kernel, (low, high) in _PASSTHROUGH.items()
        ),
        "two ranks and smaller classes instead of 8 to 16 ranks of classes B and C; `machines` compares virtual "
        "machines with each other, of which the paper's text has no figure",
        more=("machines",),
    ),
)
_COMPARISON = (
    Entry(
        "002",
        "figure 1",
        "Network latency and bandwidth",
        "streams",
        (
            Claim(
                "OpenVZ, bandwidth on 1 Gbit/s",
                "tcp_bps",
                0.353,
                0.353,
                (BRIDGED.name,),
                NATIVE.name,
                {"wire": "1g"},
                OPENVZ,
                TODAY,
            ),
            _overlay("Xen, bandwidth on 1 Gbit/s", "tcp_bps", 0.945, 0.945, {"wire": "1g"}, COPIES),
            Claim(
                "OpenVZ, latency",
                "tcp_median_us",
                1.06,
                1.06,
                (BRIDGED.name,),
                NATIVE.name,
                {"wire": "1g", "bytes": 64},
                OPENVZ,
                SCATTER,
                "requests",
            ),
            Claim(
                "Xen, latency",
                "tcp_median_us",
                2.0,
                2.0,
                VNETS,
                NATIVE.name,
                {"wire": "1g", "bytes": 64},
                LATENCY,
                NO_GUEST,
                "requests",
            ),
        ),
        "latency of 64 bytes instead of 1 byte; bandwidth by size of writes, and in `messages` of MPI messages",
        more=("requests", "pings", "messages"),
    ),
    Entry(
        "002",
        "figure 2",
        "IOZone: reading and writing files",
        "files",
        (
            _files("OpenVZ, reading", "read_bytes_per_s", 0.9, OVERLAY, "warm"),
            _files("OpenVZ, writing", "write_bytes_per_s", 0.9, OVERLAY, "warm"),
            _files("Xen, reading", "read_bytes_per_s", 0.54, VIRTIO, "cold"),
            _files("Xen, writing", "write_bytes_per_s", 0.6, VIRTIO, "cold"),
        ),
        "fio instead of IOZone",
    ),
    Entry(
        "002",
        "figure 3",
        "NAS Parallel Benchmarks, serial and OpenMP",
        "single",
        tuple(
            Claim(
                f"OpenVZ, {kernel}",
                "operations_per_s",
                0.99,
                1.01,
                (BRIDGED.name,),
                NATIVE.name,
                {"kernel": kernel},
                STREAM,
                SCATTER,
            )
            for kernel in ("EP", "CG", "MG", "FT", "SP", "BT", "LU")
        ),
        "here beside a stream; without KVM a guest's computing time is the emulator's, so there are containers only",
    ),
    Entry(
        "002",
        "figure 4",
        "NAS Parallel Benchmarks by MPI",
        "nas",
        tuple(
            Claim(
                f"OpenVZ, {kernel} on 1 Gbit/s",
                "operations_per_s",
                0.95,
                1,
                (BRIDGED.name,),
                NATIVE.name,
                {"kernel": kernel, "wire": "1g"},
                OPENVZ,
                SCATTER,
            )
            for kernel in ("EP", "BT", "CG", "SP")
        ),
        "two ranks instead of up to 64; `counts` has 1 to 8, of which the paper's text has no figures",
        more=("counts",),
    ),
)

_INTER, _ALL = {"placement": "inter"}, {"% of messages between hosts": 100}
_PATHS = (
    Entry(
        "003",
        "table 1",
        "Bandwidth of four pairs, netperf",
        "pairs",
        (
            _bridged("bridged", "aggregate_bps", 0.525, 0.525, {"pairs": 4, **_TEN}),
            _direct("direct", "aggregate_bps", 0.782, 0.782, NATIVE.name, {"pairs": 4, **_TEN}),
        ),
    ),
    Entry(
        "003",
        "table 2",
        "Bandwidth of four pairs, iperf",
        "pairs",
        (
            _bridged("bridged", "aggregate_bps", 0.605, 0.605, {"pairs": 4, **_TEN}),
            _direct("direct", "aggregate_bps", 0.715, 0.715, NATIVE.name, {"pairs": 4, **_TEN}),
        ),
    ),
    _drawing(
        "003", 1, "Placement of 16 processes", "the experiments placement, scaling and share place ranks like this"
    ),
    Entry(
        "003",
        "figure 2",
        "Advective application by placement and split",
        "placement",
        (
            _direct("direct, between hosts, whole time", "whole_s", 1.59, 1.59, NATIVE.name, {**_INTER, **_TEN}),
            _direct("direct, within hosts, whole time", "whole_s", 1.43, 1.43, NATIVE.name, {"placement": "intra"}),
            _direct(
                "direct / bridged, between hosts, whole time", "whole_s", 0.5, 0.55, BRIDGED.name, {**_INTER, **_TEN}
            ),
        ),
        "four ranks instead of 16; `inter`, `hybrid` and `intra` are its placements",
    ),
    Entry(
        "003",
        "figure 3",
        "Advective application by number of ranks",
        "scaling",
        (
            _direct("direct, computing", "compute_s", 0.98, 1.02, NATIVE.name, {"ranks": 2}),
            _direct("direct, whole time", "whole_s", 1.25, 1.25, NATIVE.name, {"ranks": 8}),
        ),
        "2 to 8 ranks instead of 2 to 16",
    ),
    Entry(
        "003",
        "figure 4",
        "Direct over bridged by share of messages between hosts",
        "share",
        (
            _direct("direct / bridged, all messages between hosts", "whole_s", 0.5, 0.71, BRIDGED.name, _ALL),
            _direct(
                "direct / bridged, half of them",
                "whole_s",
                0.6,
                0.71,
                BRIDGED.name,
                {"% of messages between hosts": 43},
            ),
        ),
        "eight ranks instead of 16",
    ),
)
_WRITES = (
    "between containers: without KVM the emulator's speed hides that of an engine for virtual machines, which exists "
    "([interconnect](../interconnect.md#virtual-machines))"
)
_LARGE = {"bytes": 2 << 20}
_INTERCONNECT = (
    _drawing("004", 1, "Data paths", "[interconnect](../interconnect.md)"),
    Entry(
        "004",
        "figure 2",
        "Rates by message size",
        "interconnect",
        (
            Claim("2 MiB / bound", "transfer_bps", 0.92, 0.92, (NATIVE.name,), BOUND, _LARGE, PROTOCOL, SOCKETS),
            Claim("2 MiB / TCP", "transfer_bps", 3, 3, (NATIVE.name,), NATIVE_TCP, _LARGE, NO_XEN, NO_XEN),
            Claim(
                "128 KiB / TCP", "transfer_bps", 3, 3, (NATIVE.name,), NATIVE_TCP, {"bytes": 128 << 10}, NO_XEN, NO_XEN
            ),
            *(
                Claim(
                    f"{size} bytes / TCP",
                    "transfer_bps",
                    4.3,
                    4.3,
                    (NATIVE.name,),
                    NATIVE_TCP,
                    {"bytes": size},
                    GATHERED,
                    NO_XEN,
                )
                for size in (64, 1_024)
            ),
        ),
        _WRITES,
    ),
    Entry(
        "004",
        "figure 3",
        "CPU time by message size",
        "interconnect",
        (
            Claim(
                "32 KiB / TCP", "cpu_s_a_gb", 0.15, 0.3, (NATIVE.name,), NATIVE_TCP, {"bytes": 32_768}, NO_XEN, NO_XEN
            ),
        ),
        _WRITES,
    ),
)
ENTRIES = _VNET_P + _VNET_P_PLUS + _COMPARISON + _PATHS + _INTERCONNECT


def experiments(paper: str) -> list[str]:
    """Names of a paper's experiments, in the order of its figures; `all` selects all papers."""
    entries = [entry for entry in ENTRIES if paper in (entry.paper, "all")]
    return list(dict.fromkeys(name for entry in entries for name in (entry.experiment, *entry.more) if name))
