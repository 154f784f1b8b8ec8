"""Claims of the papers about figures, compared with what was measured here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vnetlab.bench.result import METRICS, Conditions, Result

TOLERANCE, SHARE_TOLERANCE = 0.05, 0.01
"""Ratios, or shares, agree if their ranges come this close."""
Reasons = Mapping[str, str]
"""Why figures differ from the paper's, by the contender whose figure counts."""


class Measured(NamedTuple):
    """A ratio measured here."""

    ratio: float
    contender: str
    """The one of ours whose figure counts."""
    conditions: Conditions


@dataclass(frozen=True)
class Ratio:
    """A ratio of data paths in a result."""

    metric: str
    ours: tuple[str, ...]
    """The best of these contenders counts."""
    base: str
    """The contender that figures are divided by; empty: none, figures stand for themselves."""
    where: Conditions = field(default_factory=dict)
    """Conditions that a case must have."""

    def measured(self, result: Result) -> list[Measured]:
        """The ratios of all matching cases, smallest first."""
        found = [self._in(result, conditions) for conditions in self.cases(result)]
        return sorted((each for each in found if each is not None), key=lambda each: each.ratio)

    def cases(self, result: Result) -> list[Conditions]:
        """Matching cases in which somebody has a figure, or one of these contenders failed."""
        matching = [each for each in result.conditions() if self.where.items() <= each.items()]
        figures = [each.conditions for each in result.series if each.metric == self.metric]
        failed = [each.conditions for each in result.failures if each.contender in (*self.ours, self.base)]
        return [each for each in matching if each in figures or each in failed]

    def _in(self, result: Result, conditions: Conditions) -> Measured | None:
        base = result.find(conditions, self.base, self.metric) if self.base else None
        ours = {name: series for name in self.ours if (series := result.find(conditions, name, self.metric))}
        if not ours or (self.base and not (base and base.median)):
            return None
        best = max if METRICS[self.metric].higher_is_better else min
        name = best(ours, key=lambda name: ours[name].median)
        return Measured(ours[name].median / (base.median if base else 1), name, conditions)


@dataclass(frozen=True)
class Claim:
    """A ratio of one data path to another in a paper, as a range, and where the same ratio is measured here."""

    text: str
    metric: str
    low: float
    high: float
    ours: tuple[str, ...]
    """Contenders that take the part of the paper's path; the best of them counts."""
    base: str
    """The contender that figures are divided by; empty: the paper has the figure itself."""
    where: Conditions = field(default_factory=dict)
    """Conditions that a case must have."""
    worse: Reasons = field(default_factory=dict)
    """Why figures are worse than the paper's."""
    better: Reasons = field(default_factory=dict)
    """Why figures are better than the paper's."""
    experiment: str = ""
    """The experiment that measures it; empty: the first one of the table or figure."""

    @property
    def theirs(self) -> str:
        """The paper's ratio as text."""
        return self._range(self.low, self.high)

    def all_measured(self, result: Result | None) -> list[Measured]:
        """The ratios of all matching cases, smallest first."""
        return Ratio(self.metric, self.ours, self.base, self.where).measured(result) if result else []

    def measured(self, result: Result | None) -> tuple[float, float] | None:
        """Smallest and largest ratio over all matching cases; None if there is none."""
        found = self.all_measured(result)
        return (found[0].ratio, found[-1].ratio) if found else None

    def here(self, result: Result | None) -> str:
        """The ratio measured here as text."""
        found = self.measured(result)
        return self._range(*found) if found else "not measured"

    def verdict(self, result: Result | None) -> str:
        """One sentence: in how many cases the figures agree, and why others do not."""
        found = self.all_measured(result)
        if not found:
            return "Not measured under these conditions."
        low, high = found[0], found[-1]
        close = TOLERANCE if self.base else SHARE_TOLERANCE
        less = sum(each.ratio < self.low - close for each in found)
        more = sum(each.ratio > self.high + close for each in found)
        if not less + more:
            return "Agrees."
        if max(less, more) < len(found):
            better, worse = (more, less) if METRICS[self.metric].higher_is_better else (less, more)
            parts = [f"{count} {word}" for count, word in ((better, "better"), (worse, "worse")) if count]
            agreeing = len(found) - less - more
            begin = f"Agrees in {agreeing} of {len(found)} cases" if agreeing else f"Agrees in no case of {len(found)}"
            return f"{begin}: {' and '.join(parts)}. {self._why(low, high)}"
        return self._why(low, high)

    def _why(self, low: Measured, high: Measured) -> str:
        """Why the case differs that deviates most from the paper, of the smallest and the largest ratio."""
        is_more = high.ratio - self.high > self.low - low.ratio
        better = is_more == METRICS[self.metric].higher_is_better
        name = (high if is_more else low).contender
        reason = (self.better if better else self.worse)[name]
        path = f" with {name}" * (len(self.ours) > 1)
        return f"{'Better' if better else 'Worse'} here{path}: {reason}."

    def _range(self, low: float, high: float) -> str:
        """Figures as text: a single one if both are shown alike."""
        metric = METRICS[self.metric]
        one, other = (f"{each:.2f}" if self.base else metric.show(each) for each in (low, high))
        unit = "x" if self.base else f" {metric.unit}"
        return f"{one}{unit}" if one == other else f"{one}\N{EN DASH}{other}{unit}"
