"""Bars: bounds that vnet should reach. Whether one is met follows from the stored medians.

A table of bars therefore cannot contradict the pages of the benches. A bar whose bench has no stored result is listed
as not measured yet.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from vnetlab.bench.contenders import TAP, VNET
from vnetlab.bench.result import METRICS, Conditions, Metric, Result, Series

Results = Mapping[str, Result]
"""Stored results by bench."""
LEAST, MOST, DASH = "\u2265", "\u2264", "\N{EN DASH}"


@dataclass(frozen=True)
class Cell:
    """One median: its bench, conditions, contender and metric."""

    bench: str
    conditions: Conditions
    contender: str
    metric: str

    def series(self, results: Results) -> Series | None:
        """The series, or None if it is not stored.

        In results from before the kernel's own path, the contender "vnet" is the path by TAP.
        """
        result = results.get(self.bench)
        if result is None:
            return None
        before = self.contender == TAP.name and self.contender not in result.contenders()
        return result.find(self.conditions, VNET.name if before else self.contender, self.metric)

    def value(self, results: Results) -> float:
        """The median in base units. Raises KeyError if the bench has no such series."""
        series = self.series(results)
        if series is None:
            raise KeyError(f"{self.bench}.json has no {self.metric} of {self.contender} under {self.conditions}")
        return series.median

    def show(self, results: Results, unit: bool = True) -> str:
        """The median as text."""
        metric = METRICS[self.metric]
        return f"{metric.show(self.value(results))} {metric.unit if unit else ''}".strip()


@dataclass(frozen=True)
class Bar:
    """A bound for one median, for its ratio to another, or for the difference of the two."""

    text: str
    cell: Cell
    at_least: float | None = None
    at_most: float | None = None
    """Bounds in displayed units, not base units; bounds of the ratio if there is a `base`."""
    base: Cell | None = None
    cause: str = ""
    """Why the bar is missed; displayed only then."""
    apart: bool = False
    """Whether the bound is one of the difference to the `base`, in displayed units, instead of the ratio."""

    @property
    def bench(self) -> str:
        """The bench that measures it."""
        return self.cell.bench

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All medians that are compared."""
        return (self.cell, self.base) if self.base else (self.cell,)

    @property
    def limit(self) -> str:
        """The bound as text."""
        sign, bound = (LEAST, self.at_least) if self.at_least is not None else (MOST, self.at_most)
        unit = f" {self._metric.unit}".rstrip()
        if self.apart:
            return f"{sign} {bound:+g}{unit}"
        return f"{sign} {bound:g}{'x' if self.base else unit}"

    @property
    def _metric(self) -> Metric:
        return METRICS[self.cell.metric]

    def lacks(self, results: Results) -> str | None:
        """The contender whose figure is missing, or None."""
        return next((cell.contender for cell in self.cells if cell.series(results) is None), None)

    def asked(self, results: Results) -> bool:
        """Whether its bench measured under its conditions."""
        result = results.get(self.bench)
        return result is not None and all(cell.conditions in result.conditions() for cell in self.cells)

    def measured(self, results: Results) -> float:
        """The value that is compared with the bound."""
        value = self.cell.value(results)
        if not self.base:
            return value / self._metric.scale
        base = self.base.value(results)
        if self.apart:
            return (value - base) / self._metric.scale
        # A contender can lose everything in most rounds: of datagrams in many fragments, one that is lost is enough.
        return value / base if base else math.inf

    def margin(self, results: Results) -> float:
        """Distance to the bound, relative for ratios and values; negative if the bar is not met."""
        value = self.measured(results)
        bound, sign = (self.at_least, 1) if self.at_least is not None else (self.at_most, -1)
        return sign * (value - bound) / (1 if self.apart else bound or 1)

    def met(self, results: Results) -> bool:
        """Whether the measured value is within the bound."""
        return self.lacks(results) is None and self.margin(results) >= 0

    def figure(self, results: Results) -> str:
        """The measured value as text."""
        if not self.base:
            return self.cell.show(results)
        value = self.measured(results)
        shown = f"{value:+.{self._metric.digits}f} {self._metric.unit}" if self.apart else f"{value:.2f}x"
        return f"{shown} ({self.cell.show(results, unit=False)} / {self.base.show(results)})"

    def row(self, results: Results) -> list[str]:
        """The cells of the bar's row."""
        lacks = self.lacks(results)
        figure = DASH if lacks else self.figure(results)
        return _row(self, figure, self.met(results), f"no figure of {lacks}" if lacks else self.cause)


@dataclass(frozen=True)
class Worst:
    """The same bound for several medians: the one with the smallest margin counts.

    Conditions under which its bench did not measure are left out.
    """

    text: str
    bars: tuple[Bar, ...]
    """Named by what distinguishes them; all with the same bound."""
    cause: str = ""

    @property
    def bench(self) -> str:
        """The bench that measures it."""
        return self.bars[0].bench

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All medians that are compared."""
        return tuple(cell for bar in self.bars for cell in bar.cells)

    @property
    def limit(self) -> str:
        """The bound as text."""
        return self.bars[0].limit

    def asked(self, results: Results) -> bool:
        """Whether its bench measured under some of its conditions."""
        return any(bar.asked(results) for bar in self.bars)

    def met(self, results: Results) -> bool:
        """Whether all measured values are within the bound."""
        return all(bar.met(results) for bar in self.bars if bar.asked(results))

    def row(self, results: Results) -> list[str]:
        """The cells of the row: the worst value, and which one it is."""
        bars = [bar for bar in self.bars if bar.asked(results)]
        for bar in bars:
            if lacks := bar.lacks(results):
                return _row(self, DASH, met=False, cause=f"{bar.text}: no figure of {lacks}")
        worst = min(bars, key=lambda bar: bar.margin(results))
        figure = f"{worst.figure(results)}, {worst.text}: the worst of {len(bars)}"
        return _row(self, figure, self.met(results), self.cause)


def _row(bar: Bar | Worst, figure: str, met: bool, cause: str) -> list[str]:
    verdict = "met" if met else f"**not met**{': ' * bool(cause)}{cause}"
    return [f"{bar.text}: {bar.limit}", figure, verdict, f"[{bar.bench}](measurements/{bar.bench}.md)"]


@dataclass(frozen=True)
class Group:
    """Bars about one subject."""

    title: str
    bars: tuple[Bar | Worst, ...]
    contender: str = field(default="", kw_only=True)
    """A contender of every result that can answer; older results do not have it."""

    def asked(self, results: Results) -> list[Bar | Worst]:
        """Bars with a stored result."""
        return [bar for bar in self.bars if bar.asked(results) and self._answers(results[bar.bench])]

    def pending(self, results: Results) -> list[Bar | Worst]:
        """Bars without a stored result."""
        asked = self.asked(results)
        return [bar for bar in self.bars if bar not in asked]

    def _answers(self, result: Result) -> bool:
        return not self.contender or self.contender in result.contenders()

    def text(self, results: Results) -> list[str]:
        """The group's table as Markdown, and which benches could complete it."""
        asked, pending = self.asked(results), Counter(bar.bench for bar in self.pending(results))
        missing = ", ".join(f"{count} by `lab bench {bench}`" for bench, count in pending.items())
        text = f"**{self.title}**: {sum(bar.met(results) for bar in asked)} of {len(asked)} measured bars are met."
        if pending:
            text += f" Not measured yet: {missing}."
        rows = [bar.row(results) for bar in asked]
        return [text, "", *table(["bar", "measured", "", "bench"], rows)] if rows else [text]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table as Markdown."""
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]
