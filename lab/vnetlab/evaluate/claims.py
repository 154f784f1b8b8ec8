"""Claims of the papers about figures, compared with what was measured here."""

from dataclasses import dataclass, field

from vnetlab.bench.result import METRICS, Conditions, Result

TOLERANCE = 0.05
"""Figures agree if their ranges come this close."""


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
    where: Conditions = field(default_factory=dict)
    """Conditions that a case must have."""
    why: str = ""
    """Why figures differ from the paper's."""

    @property
    def theirs(self) -> str:
        """The paper's ratio as text."""
        return _range(self.low, self.high)

    def measured(self, result: Result | None) -> tuple[float, float] | None:
        """Smallest and largest ratio over all matching cases; None if there is none."""
        cases = [each for each in result.conditions() if self.where.items() <= each.items()] if result else []
        ratios = [each for each in (self._ratio(result, conditions) for conditions in cases) if each is not None]
        return (min(ratios), max(ratios)) if ratios else None

    def here(self, result: Result | None) -> str:
        """The ratio measured here as text."""
        found = self.measured(result)
        return _range(*found) if found else "not measured"

    def verdict(self, result: Result | None) -> str:
        """One sentence: whether the figures agree, and if not, why."""
        found = self.measured(result)
        if found is None:
            return "Not measured under these conditions."
        low, high = found
        if low <= self.high + TOLERANCE and high >= self.low - TOLERANCE:
            return "Agrees."
        more = low > self.high
        better = more == METRICS[self.metric].higher_is_better
        reason = f": {self.why}" if self.why and not better else ""
        return f"{'Better' if better else 'Worse'} here{reason}."

    def _ratio(self, result: Result, conditions: Conditions) -> float | None:
        base = result.find(conditions, self.base, self.metric)
        ours = [result.find(conditions, name, self.metric) for name in self.ours]
        medians = [series.median for series in ours if series]
        if not base or not base.median or not medians:
            return None
        best = max if METRICS[self.metric].higher_is_better else min
        return best(medians) / base.median


def _range(low: float, high: float) -> str:
    """Ratios as text: a single one if both are shown alike."""
    one, other = f"{low:.2f}", f"{high:.2f}"
    return f"{one}x" if one == other else f"{one}\N{EN DASH}{other}x"
