"""The experiments: benches whose contenders are the kinds of data paths, with the cases of the papers."""

from collections.abc import Callable

from vnetlab.bench import latency
from vnetlab.bench.result import EARLY_BYTES, Conditions
from vnetlab.evaluate import applications, files, guests, network
from vnetlab.evaluate.kinds import TINC, TUNNEL
from vnetlab.evaluate.options import FAST, EvaluateOptions, Experiment, between_two
from vnetlab.topology import Wire


def _once(_options: EvaluateOptions) -> list[Conditions]:
    return [{}]


def _sizes(sizes: tuple[int, ...], quick: tuple[int, ...] = ()) -> Callable[[EvaluateOptions], list[Conditions]]:
    """A condition for each size; `quick`: those of a quick run, by default the last one."""
    return lambda options: [{"bytes": size} for size in (quick if quick and options.quick else options.some(sizes))]


_1G, _1G_JUMBO = (Wire.GIGABIT, 1500), (Wire.GIGABIT, 9000)
_10G, _FREE, _FREE_JUMBO = (Wire.TEN_GIGABIT, 1500), (Wire.NONE, 1500), (Wire.NONE, 9000)
_JUDGED = (_1G, _1G_JUMBO, _10G, FAST)
"""Underlays of the bars."""
_SHAPED = "Wires are shaped by a token bucket on the underlay's devices: compare with native on the same wire."
_RANKS = (
    "Ranks poll, and yield while they wait: they take every processor that a daemon leaves them. Timed runs have "
    "two ranks; with more ranks than processors, times contain waiting for a processor."
)
EXPERIMENTS = {
    each.name: each
    for each in (
        Experiment(
            "streams",
            "TCP throughput and UDP goodput",
            between_two(_once, network.streams),
            ("tcp_bps", "udp_64000_bps"),
            (
                "iperf3, one TCP stream; UDP writes as fast as it can, of which only those that arrive whole count.",
                "TCP also in writes of several sizes. " + _SHAPED,
            ),
            under=(_1G, _10G, FAST, _FREE_JUMBO),
            rounds=2,
            usual_s=17,
        ),
        Experiment(
            "requests",
            "Round trips of TCP requests by size",
            between_two(
                _sizes(network.REQUEST_BYTES, (network.REQUEST_BYTES[0], network.REQUEST_BYTES[-1])),
                network.requests,
                TUNNEL,
            ),
            ("tcp_median_us", "tcp_p99_us", "flood_median_us"),
            (
                "Requests by sockperf (tcp), and pings back to back (flood), which always take the tunnel. A wire of "
                "10 Gbit/s would add what a request takes on it: 0.1 us for 64 bytes, 13 us for 16 KiB.",
            ),
            axis="bytes",
            under=(_FREE, _1G),
            rounds=2,
            usual_s=6,
        ),
        Experiment(
            "variation",
            "Variation of latency and throughput",
            between_two(network.stream_seconds, network.variation),
            ("ping_median_us", "ping_p99_us", "ping_max_us", "tcp_variation"),
            (
                "5 000 pings of 64 bytes, one per millisecond, then one TCP stream: the standard deviation of its rate "
                "over tenths of a second. The stream takes 30 s, with --long an hour.",
            ),
            under=(FAST,),
            rounds=2,
            usual_s=40,
        ),
        Experiment(
            "pings",
            "Round trips by size",
            between_two(_sizes(latency.PING_BYTES), network.pings),
            ("ping_median_us", "ping_p99_us"),
            ("ping, one per millisecond, or back to back when a round trip takes longer.",),
            axis="bytes",
            under=(_1G, _10G, FAST, _FREE),
            rounds=2,
            usual_s=4,
        ),
        Experiment(
            "messages",
            "MPI messages by size",
            between_two(_sizes(network.MESSAGE_BYTES, network.MESSAGE_BYTES[:1]), network.messages, TINC),
            ("oneway_us", "exchange_bps"),
            ("NetPIPE on Open MPI over TCP: ping-pong one way, then both directions at once.", _RANKS),
            axis="bytes",
            under=(_FREE, FAST),
            rounds=3,
            usual_s=6,
        ),
        Experiment(
            "challenge",
            "HPC Challenge",
            between_two(_once, applications.challenge),
            (
                "pingpong_latency_us",
                "ring_latency_us",
                "pingpong_bytes_per_s",
                "ptrans_bytes_per_s",
                "fft_flops",
                "updates_per_s",
            ),
            ("The HPC Challenge suite (Debian's hpcc) with a rank on each of two hosts.", _RANKS, _SHAPED),
            under=_JUDGED,
            rounds=3,
            usual_s=11,
        ),
        Experiment(
            "ipoib",
            "HPC Challenge on MTUs of IP over InfiniBand",
            applications.ipoib,
            ("pingpong_latency_us", "pingpong_bytes_per_s", "fft_flops", "updates_per_s"),
            (
                "The same suite; the underlay is a pair of tun devices with the MTUs of datagram and connected mode.",
                _RANKS,
            ),
            under=tuple((Wire.NONE, mtu) for mtu in applications.IPOIB_MTUS),
            rounds=2,
            usual_s=11,
            anywhere=False,
        ),
        Experiment(
            "dispatchers",
            "Pairs of containers by number of dispatchers",
            network.dispatchers,
            ("aggregate_bps",),
            (
                "One TCP stream in each of four pairs. More dispatchers than processors show the cost of sharing them. "
                "The wire is unlimited: a slower one would hide the dispatchers.",
            ),
            rounds=2,
            usual_s=5,
        ),
        Experiment(
            "single",
            "Kernels on one host, beside a stream",
            applications.single,
            ("operations_per_s",),
            (
                "Serial and OpenMP programs on the first host, while a TCP stream of 0.5 Gbit/s leaves the host on "
                "the same kind of data path: what the path takes from an application that only computes. The wire is "
                "faster than the stream, which is limited.",
            ),
            usual_s=9,
            relative=True,
        ),
        Experiment(
            "nas",
            "NAS Parallel Benchmarks",
            applications.nas,
            ("operations_per_s",),
            (
                "The kernels of docs/workloads.md with a rank on each host. A run whose result does not verify is a "
                "failure. Plots show multiples of native. EP communicates only once, at the end: the deviation of its "
                "ratios from 1 shows the measurement noise.",
                _RANKS,
                _SHAPED,
            ),
            under=_JUDGED,
            rounds=3,
            usual_s=7,
            relative=True,
        ),
        Experiment(
            "counts",
            "NAS Parallel Benchmarks by number of ranks",
            applications.counts,
            ("operations_per_s",),
            (
                "1 to 8 ranks, alternating between the hosts. More than two share two processors, and show that "
                "results are right: they are class S, which has too few rows for SP and BT.",
                _RANKS,
            ),
            axis="ranks",
            under=(_1G,),
            usual_s=5,
        ),
        Experiment(
            "pairs",
            "Pairs of containers at once",
            network.pairs,
            ("aggregate_bps",),
            ("One TCP stream in each pair; native has as many streams between the hosts. Sum of all rates.", _SHAPED),
            axis="pairs",
            under=(FAST, _FREE_JUMBO),
            rounds=2,
            usual_s=5,
        ),
        Experiment(
            "placement",
            "Advective application by placement",
            applications.placement,
            ("whole_s", "compute_s", "pack_s", "send_s", "wait_s"),
            (
                "Two ranks on each host, in a row, or two by two (2x2x1). inter: neighbours are always on different "
                "hosts. hybrid: some are. intra: as few as possible. one host: none.",
                _RANKS,
            ),
            under=(FAST,),
            rounds=2,
            usual_s=6,
        ),
        Experiment(
            "scaling",
            "Advective application by number of ranks",
            applications.scaling,
            ("whole_s", "compute_s", "wait_s"),
            (
                "Ranks in a row, neighbours always on different hosts. Class B has 256 steps on 256 x 256 x 256 cells.",
                _RANKS,
            ),
            axis="ranks",
            under=(FAST,),
            rounds=3,
            usual_s=16,
        ),
        Experiment(
            "share",
            "Advective application by share of messages between hosts",
            applications.share,
            ("whole_s", "wait_s"),
            ("Ranks in a row, four on each host.", _RANKS),
            axis="% of messages between hosts",
            under=(FAST,),
            rounds=2,
            usual_s=6,
        ),
        Experiment(
            "noise",
            "Round trips beside a noisy process",
            network.noise,
            ("ping_median_us", "tcp_median_us", "tcp_p99_us"),
            (
                "The first host also runs a process that computes, or one that writes files and synchronizes them. "
                "The wire is unlimited: 64 bytes take 0.1 us on 10 Gbit/s.",
            ),
            rounds=2,
            usual_s=8,
        ),
        Experiment(
            "interconnect",
            "RDMA writes by size",
            network.interconnect,
            ("transfer_bps", "cpu_s_a_gb", "user_cores", "kernel_cores"),
            (
                "vnet-rdma-perf over each kind of data path, iperf3 in writes of the same size (TCP), and datagrams "
                "between bare sockets without a protocol (vnet/examples/sockets.rs), in messages of 64 KB whatever the "
                "size of writes: the paper's bound, which TCP exceeds here, because its segments are larger. CPU time "
                "is the whole machine's, while the transfers run. The wire is unlimited: a slower one would limit all "
                "alike.",
            ),
            axis="bytes",
            under=(_FREE_JUMBO,),
            rounds=2,
            usual_s=5,
        ),
        Experiment(
            "files",
            "Writing and reading files",
            files.files,
            ("write_bytes_per_s", "read_bytes_per_s"),
            (
                "fio (psync, records of 1 MiB) writes a new file and reads it, with a cold and a warm page cache. "
                "Storage: a folder of the host, overlayfs as containers have it, an emulated guest's virtio-blk disk.",
            ),
            axis="MiB",
            rounds=2,
            usual_s=8,
            anywhere=False,
        ),
        Experiment(
            "ablation",
            "Which part of vnet buys what",
            guests.ablation,
            ("ping_median_us", "flood_median_us", "tcp_bps"),
            (
                "The rows of the bench of this name (docs/measurements/ablation.md). The wire is unlimited: a slower "
                "one would hide what the parts of vnet buy.",
            ),
            usual_s=25,
            anywhere=False,
        ),
        Experiment(
            "interrupts",
            "Early notifications of guests",
            guests.interrupts,
            tuple(f"ping_{size}_us" for size in EARLY_BYTES),
            (
                "Emulated guests: compare them with each other only. They fill 1.2 Gbit/s, so the wire is unlimited. "
                "The settings change in turn while machines run. "
                "Early: when data arrives, before it is received. A second "
                "notification follows at once if data arrives at a rate between alpha and beta. Premature ones came "
                "too soon and were repeated; masked ones were not sent, because the guest polls. At the end of "
                "coalescing a notification is withheld if the density is not between the two. The trace has the "
                "medians of each step since the event that shows vnetd a ping, as `lab timeline` has them.",
            ),
            usual_s=30,
            anywhere=False,
        ),
        Experiment(
            "machines",
            "Virtual machines: kernels, messages and streams",
            guests.machines,
            ("operations_per_s",),
            (
                "Virtual machines with Debian's Open MPI in their initramfs: kernels and the advective application, "
                "MPI messages by size, round trips, and streams in one to four pairs at once. Without KVM "
                "they are emulated, and run four kernels of class S: compare them with each other only. Emulated "
                "ones on vnet have no MSI-X, with which QEMU 7.2 crashes: interrupts cost more than on tap.",
            ),
            usual_s=15,
            anywhere=False,
        ),
    )
}
