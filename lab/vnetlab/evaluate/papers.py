"""Every table and figure of the papers: its figures, and the experiment that repeats it, or why none does."""

from vnetlab.bench.latency import ADAPTIVE, BOTH, CUT_THROUGH, PLUS_OPTIMISTIC
from vnetlab.bench.result import Conditions
from vnetlab.evaluate.claims import Claim
from vnetlab.evaluate.entries import Entry, bridged, direct, drawing, files, overlay
from vnetlab.evaluate.files import OVERLAY
from vnetlab.evaluate.guests import EARLY_ALWAYS
from vnetlab.evaluate.kinds import ALONE, BRIDGED, DIRECT, NATIVE, VNETS
from vnetlab.evaluate.network import BOUND, NATIVE_TCP
from vnetlab.evaluate.ratios import P_ON_1G, P_ON_10G, PASSTHROUGH, PLUS
from vnetlab.evaluate.reasons import (
    COPIES,
    EARLY_WHY,
    GATHERED,
    IPOIB,
    KITTEN,
    LATENCY,
    NO_GUEST,
    NO_XEN,
    OPENVZ,
    PLUS_WHY,
    PROTOCOL,
    RATES,
    SCATTER,
    SOCKETS,
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


def _nas(ratios: dict[str, tuple[float, float]], wire: str) -> tuple[Claim, ...]:
    """The overlay's operations per second against native, by kernel."""
    return tuple(
        overlay(f"{kernel} on {wire}", "operations_per_s", low, high, {"kernel": kernel, "wire": wire}, RATES)
        for kernel, (low, high) in ratios.items()
    )


_NO_FIGURE = "the paper's text has no figure of it"
_NO_INFINIBAND = "two ranks instead of 6 nodes, on tun devices with IPoIB's MTUs: there is no InfiniBand here"
_TEN = {"wire": "10g"}

_VNET_P = (
    Entry(
        "000",
        "table 1",
        "Parameters of VNET/P",
        reason="settings, not figures: `mode`, `yield` and `threads` in [configuration](../configuration.md)",
    ),
    drawing("000", 1, "Architecture", "[architecture](../../ARCHITECTURE.md)"),
    drawing("000", 2, "Routing inside the core", "[architecture](../../ARCHITECTURE.md)"),
    drawing("000", 3, "VMM-driven and guest-driven modes", f"both modes are rows of it; {_NO_FIGURE}", "ablation"),
    drawing(
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
    drawing("000", 6, "Adaptive mode", f"a row of it; {_NO_FIGURE}", "ablation"),
    drawing("000", 7, "Data paths of transmission and reception", "[architecture](../../ARCHITECTURE.md)"),
    Entry(
        "000",
        "figure 8",
        "TCP throughput and UDP goodput",
        "streams",
        (
            overlay("TCP on 1 Gbit/s", "tcp_bps", 1, 1, {"wire": "1g"}, COPIES),
            overlay("TCP on 10 Gbit/s", "tcp_bps", 0.74, 0.78, {"wire": "10g"}, COPIES),
            overlay("UDP, 64 000-byte writes, on 1 Gbit/s", "udp_64000_bps", 1, 1, {"wire": "1g"}, COPIES),
            overlay("UDP, 64 000-byte writes, on 10 Gbit/s", "udp_64000_bps", 0.74, 0.74, {"wire": "10g"}, COPIES),
        ),
    ),
    Entry(
        "000",
        "figure 9",
        "Round trips by ICMP size",
        "pings",
        (overlay("small pings", "ping_median_us", 2, 3, {"bytes": 56}, LATENCY),),
    ),
    Entry(
        "000",
        "figure 10",
        "MPI ping-pong, one way",
        "messages",
        (overlay("64 bytes", "oneway_us", 2.5, 2.5, {"bytes": 64}, LATENCY),),
    ),
    Entry(
        "000",
        "figure 11",
        "MPI bandwidth by size, one way and both ways",
        "messages",
        (
            overlay("4 MiB, time one way", "oneway_us", 1.35, 1.35, {"bytes": 4 << 20, "wire": "10g"}, COPIES),
            overlay("4 MiB, both ways", "exchange_bps", 0.62, 0.62, {"bytes": 4 << 20, "wire": "10g"}, COPIES),
        ),
    ),
    Entry(
        "000",
        "figure 12",
        "HPCC latency and bandwidth",
        "challenge",
        (
            overlay("latency on 1 Gbit/s", "pingpong_latency_us", 1.2, 2, {"wire": "1g"}, LATENCY),
            overlay("latency on 10 Gbit/s", "pingpong_latency_us", 2, 3, {"wire": "10g"}, LATENCY),
            overlay("bandwidth on 1 Gbit/s", "pingpong_bytes_per_s", 1, 1, {"wire": "1g"}, RATES),
            overlay("bandwidth on 10 Gbit/s", "pingpong_bytes_per_s", 0.6, 0.75, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "000",
        "figure 13",
        "HPCC RandomAccess and FFT",
        "challenge",
        (
            overlay("RandomAccess on 1 Gbit/s", "updates_per_s", 1, 1, {"wire": "1g"}, RATES),
            overlay("FFT on 1 Gbit/s", "fft_flops", 1, 1, {"wire": "1g"}, RATES),
            overlay("RandomAccess on 10 Gbit/s", "updates_per_s", 0.65, 0.7, {"wire": "10g"}, RATES),
            overlay("FFT on 10 Gbit/s", "fft_flops", 0.6, 0.7, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "000",
        "figure 14",
        "NAS Parallel Benchmarks",
        "nas",
        _nas(P_ON_1G, "1g") + _nas(P_ON_10G, "10g"),
        "two ranks and smaller classes instead of 8 to 16 ranks of classes B and C",
    ),
    Entry(
        "000",
        "figure 15",
        "HPCC latency and bandwidth over IPoIB",
        "ipoib",
        (
            overlay("ping-pong bandwidth", "pingpong_bytes_per_s", 0.7, 0.75, {}, IPOIB),
            overlay("ping-pong latency", "pingpong_latency_us", 3, 4, {}, IPOIB),
            overlay("ring bandwidth", "ring_bytes_per_s", 0.5, 0.55, {}, IPOIB),
            overlay("ring latency", "ring_latency_us", 2.5, 3, {}, IPOIB),
        ),
        _NO_INFINIBAND,
    ),
    Entry(
        "000",
        "figure 16",
        "HPCC applications over IPoIB",
        "ipoib",
        (
            overlay("RandomAccess", "updates_per_s", 0.75, 0.8, {}, IPOIB),
            overlay("FFT", "fft_flops", 0.3, 0.45, {}, IPOIB),
        ),
        _NO_INFINIBAND,
    ),
    Entry(
        "000",
        "figure 17",
        "VNET/P for Kitten",
        "streams",
        (
            Claim(
                "raw frames, TCP (section 6.3)",
                "tcp_bps",
                0.62,
                0.62,
                (DIRECT.name,),
                NATIVE.name,
                {"wire": "10g", "MTU": 9000},
                KITTEN,
                KITTEN,
            ),
        ),
        "a drawing; its host, the Kitten kernel, is not in scope: Ethernet frames on the wire without encapsulation "
        "(`vnet, local`) stand for it",
    ),
)


def _plus(text: str, metric: str, low: float, high: float, ours: str = BOTH.name, base: str = ADAPTIVE.name) -> Claim:
    """A claim about what parts of VNET/P+, by default all, gain in virtual machines over `base`, by default none."""
    where: Conditions = {"between": "virtual machines"}
    return Claim(text, metric, low, high, (ours,), base, where, PLUS_WHY, PLUS_WHY, "ablation")


_VNET_P_PLUS = (
    drawing("001", 1, "Architecture of VNET/P", "[architecture](../../ARCHITECTURE.md)"),
    drawing("001", 2, "Time line of a virtual interrupt", "interrupts are emulated by KVM or QEMU"),
    drawing(
        "001",
        3,
        "Early virtual interrupts",
        '`interrupts = "optimistic"`; its shares are those of section V; sockets have no interrupts of an '
        "adapter, of which the paper counts 1 to 1.5 notifications each",
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
            overlay("small pings", "ping_median_us", 1.24, 1.24, {"bytes": 56, **_TEN}, LATENCY),
            direct("small pings, passthrough", "ping_median_us", 1.12, 1.12, NATIVE.name, {"bytes": 56, **_TEN}),
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
            overlay("TCP on 10 Gbit/s", "tcp_bps", 0.94, 0.94, {"wire": "10g"}, COPIES),
            overlay("UDP, 8 800-byte writes, on 10 Gbit/s", "udp_8800_bps", 0.9, 0.9, {"wire": "10g"}, COPIES),
            _plus("VNET/P+ / VNET/P, TCP", "tcp_bps", 1.27, 1.5),
            _plus("cut-through alone, TCP (section V-D)", "tcp_bps", 1, 1.03, CUT_THROUGH.name),
            _plus(
                "cut-through beside optimistic interrupts, TCP (section V-D)",
                "tcp_bps",
                1.1,
                1.1,
                BOTH.name,
                PLUS_OPTIMISTIC.name,
            ),
        ),
        more=("ablation",),
    ),
    Entry(
        "001",
        "figure 6",
        "Variation of 5 000 pings and of an hour of TCP",
        "variation",
        claims=(
            _plus("VNET/P+ / VNET/P, longest ping: less", "ping_max_us", 0, 1),
            _plus("VNET/P+ / VNET/P, variation of TCP: less", "tcp_variation", 0, 1),
        ),
        reason="the stream takes 30 s, with `--long` an hour; `noise` has round trips beside a noisy process; of both "
        f"{_NO_FIGURE}, but that VNET/P+ varies less, which `ablation` has",
        more=("noise", "ablation"),
    ),
    Entry(
        "001",
        "figure 7",
        "MPI bandwidth by size, both ways",
        "messages",
        (overlay("4 MiB, both ways", "exchange_bps", 0.9, 1, {"bytes": 4 << 20, "wire": "10g"}, COPIES),),
    ),
    Entry(
        "001",
        "figure 8",
        "HPCC latency and bandwidth",
        "challenge",
        (
            overlay("latency on 10 Gbit/s", "pingpong_latency_us", 1.3, 1.3, {"wire": "10g"}, LATENCY),
            overlay("bandwidth on 10 Gbit/s", "pingpong_bytes_per_s", 0.9, 1, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "001",
        "figure 9",
        "HPCC RandomAccess, PTRANS and FFT",
        "challenge",
        (
            overlay("RandomAccess on 10 Gbit/s", "updates_per_s", 0.87, 0.87, {"wire": "10g"}, RATES),
            overlay("PTRANS on 10 Gbit/s", "ptrans_bytes_per_s", 1, 1, {"wire": "10g"}, RATES),
            overlay("FFT on 10 Gbit/s", "fft_flops", 1, 1, {"wire": "10g"}, RATES),
        ),
        "two ranks instead of 8 to 24",
    ),
    Entry(
        "001",
        "figure 10",
        "NAS Parallel Benchmarks",
        "nas",
        _nas(PLUS, "10g")
        + tuple(
            direct(f"{kernel}, passthrough", "operations_per_s", low, high, NATIVE.name, {"kernel": kernel, **_TEN})
            for kernel, (low, high) in PASSTHROUGH.items()
        ),
        "two ranks and smaller classes instead of 8 to 16 ranks of classes B and C; `machines` compares virtual "
        "machines with each other, of which the paper's text has no figure",
        more=("machines",),
    ),
)
_SINGLE = ("EP", "CG", "IS", "SP", "BT", "LU")
"""Kernels of paper 002's figure 3."""
_SERIAL_BY_XEN = ("SP", "BT")
"""Those of which Xen could not run the OpenMP programs."""
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
            overlay("Xen, bandwidth on 1 Gbit/s", "tcp_bps", 0.945, 0.945, {"wire": "1g"}, COPIES),
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
        "latency of 64 bytes instead of 1 byte; bandwidth by size of writes, and in `messages` of MPI messages; "
        "nothing stands for VMware Server (0.259x of the bandwidth) without KVM",
        more=("requests", "pings", "messages"),
    ),
    Entry(
        "002",
        "figure 2",
        "IOZone: reading and writing files",
        "files",
        (
            files("OpenVZ, reading", "read_bytes_per_s", 0.9, OVERLAY, "warm"),
            files("OpenVZ, writing", "write_bytes_per_s", 0.9, OVERLAY, "warm"),
        ),
        "fio instead of IOZone; Xen had 0.54x reading and 0.6x writing: the disk of an emulated guest is measured, but "
        "compared with nothing",
    ),
    Entry(
        "002",
        "figure 3",
        "NAS Parallel Benchmarks, serial and OpenMP",
        "single",
        tuple(
            Claim(
                f"{system}, {kernel}",
                "operations_per_s",
                0.99,
                1.01,
                ours,
                base,
                {"kernel": kernel, **({"threads": 1} if kernel in serial else {})},
                STREAM,
                SCATTER,
            )
            for system, ours, base, serial in (
                ("OpenVZ", (BRIDGED.name,), NATIVE.name, ()),
                ("Xen, also the stream's cost,", VNETS, ALONE.name, _SERIAL_BY_XEN),
            )
            for kernel in _SINGLE
        ),
        "here beside a stream, and with MG and FT, for which the paper lacked memory; without KVM a guest's computing "
        "time is the emulator's, so there are containers only, and nothing stands for VMware Server, which was up to "
        "10 % slower (serial, but IS) and more (OpenMP: IS, LU, CG)",
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
        "two ranks instead of up to 64; the text calls OpenVZ near native, read here as at least 0.95x; `counts` has "
        "1 to 8 ranks of the paper's four kernels and IS, of which the paper's text has no figures",
        more=("counts",),
    ),
)

_WAITING = "with more ranks than processors times contain waiting for one, and no bar judges them"
_INTER, _ALL = {"placement": "inter"}, {"% of messages between hosts": 100}
_PATHS = (
    Entry(
        "003",
        "table 1",
        "Bandwidth of four pairs, netperf",
        "pairs",
        (
            bridged("bridged", "aggregate_bps", 0.525, 0.525, {"pairs": 4, **_TEN}),
            direct("direct", "aggregate_bps", 0.782, 0.782, NATIVE.name, {"pairs": 4, **_TEN}),
        ),
        more=("machines",),
    ),
    Entry(
        "003",
        "table 2",
        "Bandwidth of four pairs, iperf",
        "pairs",
        (
            bridged("bridged", "aggregate_bps", 0.605, 0.605, {"pairs": 4, **_TEN}),
            direct("direct", "aggregate_bps", 0.715, 0.715, NATIVE.name, {"pairs": 4, **_TEN}),
        ),
        more=("machines",),
    ),
    drawing(
        "003", 1, "Placement of 16 processes", "the experiments placement, scaling and share place ranks like this"
    ),
    Entry(
        "003",
        "figure 2",
        "Advective application by placement and split",
        "placement",
        (
            direct("direct, between hosts, whole time", "whole_s", 1.59, 1.59, NATIVE.name, {**_INTER, **_TEN}),
            direct("direct, within hosts, whole time", "whole_s", 1.43, 1.43, NATIVE.name, {"placement": "intra"}),
            direct(
                "direct / bridged, between hosts, whole time", "whole_s", 0.5, 0.55, BRIDGED.name, {**_INTER, **_TEN}
            ),
        ),
        f"four ranks instead of 16; `inter`, `hybrid` and `intra` are its placements; {_WAITING}",
    ),
    Entry(
        "003",
        "figure 3",
        "Advective application by number of ranks",
        "scaling",
        (
            direct("direct, computing", "compute_s", 0.98, 1.02, NATIVE.name, {"ranks": 2}),
            direct("direct, whole time", "whole_s", 1.25, 1.25, NATIVE.name, {"ranks": 8}),
        ),
        f"2 to 8 ranks instead of 2 to 16; {_WAITING}",
    ),
    Entry(
        "003",
        "figure 4",
        "Direct over bridged by share of messages between hosts",
        "share",
        (
            direct("direct / bridged, all messages between hosts", "whole_s", 0.5, 0.71, BRIDGED.name, _ALL),
            direct(
                "direct / bridged, half of them",
                "whole_s",
                0.6,
                0.71,
                BRIDGED.name,
                {"% of messages between hosts": 43},
            ),
        ),
        f"eight ranks instead of 16; the paper chooses the bridge below 20 %, here 14 % is measured; {_WAITING}",
    ),
)
_WRITES = (
    "between containers: without KVM the emulator's speed hides that of an engine for virtual machines, which exists "
    "([interconnect](../interconnect.md#virtual-machines))"
)
_LARGE = {"bytes": 2 << 20}
_INTERCONNECT = (
    drawing("004", 1, "Data paths", "[interconnect](../interconnect.md)"),
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
        f"{_WRITES}; 28 us one way against 77 us by TCP are compared in [its bench](../measurements/interconnect.md); "
        "what a Xen guest itself costs, 0.59x of Linux, has no counterpart in containers",
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
        f"{_WRITES}; user, system and softirq time are columns of the experiment's table: there is no driver domain of "
        "which they would be shares",
    ),
)
ENTRIES = _VNET_P + _VNET_P_PLUS + _COMPARISON + _PATHS + _INTERCONNECT


def experiments(paper: str) -> list[str]:
    """Names of a paper's experiments, in the order of its figures; `all` selects all papers."""
    entries = [entry for entry in ENTRIES if paper in (entry.paper, "all")]
    return list(dict.fromkeys(name for entry in entries for name in (entry.experiment, *entry.more) if name))
