"""The evaluation's bars: bounds that vnet should reach. Whether one is met follows from the measured medians."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from vnetlab.bench import report as bench
from vnetlab.bench.result import EARLY_BYTES, METRICS, Conditions, Result
from vnetlab.evaluate import ranks
from vnetlab.evaluate.claims import Measured, Ratio, Reasons
from vnetlab.evaluate.guests import EARLY_ALWAYS, EARLY_DEFAULT, OFF
from vnetlab.evaluate.kinds import BRIDGED, NATIVE, TINC, VNETS
from vnetlab.evaluate.network import MESSAGE_BYTES
from vnetlab.evaluate.reasons import LATENCY, NATIVE_LATENCY, NOISE, RATES, TRACED
from vnetlab.topology import Wire

HEAD = ("bar", "bound", "measured", "", "experiment")
MET, MISSED, BESIDE = "met", "**not met**", "shown beside it"
LEAST, MOST, DASH = "\u2265", "\u2264", "\N{EN DASH}"


@dataclass(frozen=True)
class Bar:
    """A bound for ratios in every case of an experiment: the worst one counts."""

    text: str
    experiment: str
    ratios: tuple[Ratio, ...]
    """Each must be measured."""
    at_least: float | None = None
    """Bound of the performance: of rates, or of the inverse of times."""
    at_most: float | None = None
    """Bound of times. Without any bound, figures are shown only."""
    strict: bool = False
    """Whether the bound itself is outside."""
    worse: Reasons = field(default_factory=dict)
    """Why the bar is missed, by contender; displayed only then."""

    @property
    def bound(self) -> str:
        """The bound as text."""
        if self.at_least is None and self.at_most is None:
            return DASH
        if self.at_most is not None:
            return f"{'<' if self.strict else MOST} {self.at_most:.2f}x"
        return f"{'>' if self.strict else LEAST} {self.at_least:.2f}x"

    def met(self, result: Result | None) -> bool | None:
        """Whether all ratios are within the bound; None if there is no bound, or nothing was measured."""
        if result is None or self.bound == DASH or not any(ratio.cases(result) for ratio in self.ratios):
            return None
        if self._lacking(result):
            return False
        worst = self._worst(result)[0]
        bound = self.at_most if self.at_most is not None else self.at_least
        margin = (bound - worst) if self.at_most is not None else (worst - bound)
        return margin > 0 if self.strict else margin >= 0

    def row(self, result: Result | None) -> tuple[str, ...]:
        """The cells of the bar's row."""
        if result is None or not any(ratio.cases(result) for ratio in self.ratios):
            return (self.text, self.bound, "not measured", "", f"`{self.experiment}`")
        lacking, met = self._lacking(result), self.met(result)
        figure = f"no figures: {lacking}"
        verdict = MISSED
        if not lacking:
            found = self._found(result)
            value, ratio, worst = self._worst(result)
            several = len({each.metric for each in self.ratios}) > 1
            metric = f"{METRICS[ratio.metric].title}: " * several
            figure = f"{metric}{value:.3f}x with {worst.contender} ({bench.describe(worst.conditions)})"
            if len(found) > 1:
                figure += f", the worst of {len(found)}"
                if all(0 < other < math.inf for other, _, _ in found):
                    mean = statistics.geometric_mean(other for other, _, _ in found)
                    figure += f"; geometric mean {mean:.3f}x"
            reason = self.worse.get(worst.contender, "")
            verdict = BESIDE if met is None else MET if met else f"{MISSED}{': ' * bool(reason)}{reason}"
        return (self.text, self.bound, figure, verdict, f"`{self.experiment}`")

    def _found(self, result: Result) -> list[tuple[float, Ratio, Measured]]:
        """The value of each case, with its ratio and its measurement."""
        return [(self._value(ratio, each), ratio, each) for ratio in self.ratios for each in ratio.measured(result)]

    def _worst(self, result: Result) -> tuple[float, Ratio, Measured]:
        """The case with the worst value, as in `_found`."""
        return (max if self.at_most is not None else min)(self._found(result), key=lambda each: each[0])

    def _value(self, ratio: Ratio, measured: Measured) -> float:
        """What is compared with the bound."""
        if self.at_most is not None or METRICS[ratio.metric].higher_is_better:
            return measured.ratio
        return 1 / measured.ratio if measured.ratio else math.inf

    def _lacking(self, result: Result) -> str:
        """Cases without a ratio: those that were to be measured, and those where a contender failed."""
        lacking: list[Conditions] = []
        for ratio in self.ratios:
            cases, found = ratio.cases(result), [each.conditions for each in ratio.measured(result)]
            lacking += [each for each in cases if each not in found] if cases else [ratio.where]
        return "; ".join(dict.fromkeys(map(bench.describe, lacking)))


def _on_wires(metrics: tuple[str, ...], base: str, mtus: tuple[int, ...]) -> tuple[Ratio, ...]:
    """Ratios of vnet's best path to a contender, on both shaped wires."""
    wires = (Wire.GIGABIT, Wire.TEN_GIGABIT)
    under: list[Conditions] = [{"wire": wire, "MTU": mtu} for wire in wires for mtu in mtus]
    return tuple(Ratio(metric, VNETS, base, each) for each in under for metric in metrics)


OPERATIONS = ("operations_per_s",)
HPCC_RATES = ("pingpong_bytes_per_s", "ring_bytes_per_s", "ptrans_bytes_per_s", "fft_flops", "updates_per_s")
HPCC_TIMES = ("pingpong_latency_us", "ring_latency_us")
APPLICATIONS = (
    ("NPB", "nas", OPERATIONS, RATES),
    ("HPCC, rates", "challenge", HPCC_RATES, RATES),
    ("HPCC, latencies", "challenge", HPCC_TIMES, NATIVE_LATENCY),
)
ON_WIRES = "1 and 10 Gbit/s"
_TWO: Conditions = {"ranks": 2, "placement": ranks.INTER}
_EARLY: Conditions = {"between": "virtual machines"}
SMALL_BYTES = 1_024
"""From this size on, early notifications must be faster, not only as fast."""


def _early(name: str, sizes: list[int], *, strict: bool) -> Bar:
    """Round trips of pings with early notifications against those without."""
    text = f"{name}: pings of {', '.join(map(str, sizes))} bytes / {OFF}"
    ratios = tuple(Ratio(f"ping_{size}_us", (name,), OFF, _EARLY) for size in sizes)
    return Bar(text, "interrupts", ratios, at_most=1, strict=strict, worse={name: TRACED})


def _messages(size: int, base: str) -> Bar:
    """Time of MPI messages one way beside a contender's; never behind tinc."""
    text = f"MPI one way, {size if size < 1 << 20 else f'{size >> 20} MiB'}{' bytes' * (size < 1 << 20)} / {base}"
    ratios = (Ratio("oneway_us", VNETS, base, {"bytes": size}),)
    return Bar(text, "messages", ratios, at_least=1 if base == TINC.name else None, worse=LATENCY)


BARS = (
    *(
        Bar(
            f"{name} on {ON_WIRES}, MTU {mtu} / native",
            experiment,
            _on_wires(metrics, NATIVE.name, (mtu,)),
            least,
            worse=why,
        )
        for name, experiment, metrics, why in APPLICATIONS
        for mtu, least in ((9000, 0.98), (1500, 0.94))
    ),
    *(
        Bar(
            f"{name} on {ON_WIRES} / {BRIDGED.name}",
            experiment,
            _on_wires(metrics, BRIDGED.name, (9000, 1500)),
            1,
            worse=NOISE,
        )
        for name, experiment, metrics, _ in APPLICATIONS
    ),
    Bar(
        "advective application, 2 ranks, inter: computing at most 2 % more / native",
        "scaling",
        (Ratio("compute_s", VNETS, NATIVE.name, _TWO),),
        at_most=1.02,
    ),
    Bar(
        "advective application, 2 ranks, inter: whole / native",
        "scaling",
        (Ratio("whole_s", VNETS, NATIVE.name, _TWO),),
        at_least=0.95,
        worse=LATENCY,
    ),
    *(
        _messages(size, base)
        for size in (MESSAGE_BYTES[0], MESSAGE_BYTES[-1])
        for base in (NATIVE.name, BRIDGED.name, TINC.name)
    ),
    *(
        _early(name, sizes, strict=strict)
        for name in (EARLY_ALWAYS, EARLY_DEFAULT)
        for sizes, strict in (
            ([size for size in EARLY_BYTES if size < SMALL_BYTES], False),
            ([size for size in EARLY_BYTES if size >= SMALL_BYTES], True),
        )
    ),
)


def rows(results: Mapping[str, Result]) -> tuple[tuple[str, ...], ...]:
    """The table of bars, heading first."""
    return (HEAD, *(bar.row(results.get(bar.experiment)) for bar in BARS))


def summary(results: Mapping[str, Result]) -> str:
    """How many bars are met."""
    verdicts = [bar.met(results.get(bar.experiment)) for bar in BARS if bar.bound != DASH]
    measured = [each for each in verdicts if each is not None]
    left = len(verdicts) - len(measured)
    return f"{sum(measured)} of {len(measured)} measured bars are met{f'; {left} are not measured' if left else ''}."
