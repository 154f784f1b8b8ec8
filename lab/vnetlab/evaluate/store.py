"""Keeps the results of an evaluation: a file per experiment, continued by a second call."""

from collections.abc import Iterable
from pathlib import Path

from vnetlab.bench import runner
from vnetlab.bench.case import Case
from vnetlab.bench.result import Result
from vnetlab.bench.suite import cases
from vnetlab.evaluate.options import STREAM_SECONDS, EvaluateOptions, Experiment
from vnetlab.lab import CACHE
from vnetlab.run import LabError, progress

QUICK_GUESS_S = 5
"""Duration of a measurement of a quick run before any has been made."""


def folder(options: EvaluateOptions) -> Path:
    """Where results of these options are kept. Quick figures, classes and machines do not mix."""
    words = [options.size, *(each.destination for each in options.machines), *(["quick"] if options.quick else [])]
    return CACHE / "evaluate" / "-".join(words)


def begin(experiment: Experiment, options: EvaluateOptions, repeat: int, kept: Path) -> Result:
    """The kept result of an experiment, to be continued, or an empty one.

    Raises LabError if the kept figures are those of another vnet or another machine.
    """
    path = kept / f"{experiment.name}.json"
    empty = runner.begin(experiment, options, repeat)
    if options.machines:
        empty.machine["hosts"] = ", ".join(f"{each.destination} ({each.device})" for each in options.machines)
    if not path.exists():
        return empty
    result = Result.read(path)
    if result.quick != options.quick:
        raise LabError(f"{path} has figures of a {'quick' if result.quick else 'full'} run: choose another --results")
    for what, old, new in (
        ("vnet", result.versions["vnet"], empty.versions["vnet"]),
        ("kernel", result.machine["kernel"], empty.machine["kernel"]),
        ("processor", result.machine["processor"], empty.machine["processor"]),
    ):
        if old != new:
            raise LabError(f"{path} has figures of {what} {old}, this is {new}: choose --fresh to measure all anew")
    # Contenders that failed get another chance.
    result.failures, result.repeat, result.command, result.notes = [], repeat, empty.command, empty.notes
    return result


def clear(kept: Path, experiments: Iterable[str]) -> None:
    """Removes kept results of these experiments, and nothing else: the folder may have other files."""
    for name in experiments:
        (kept / f"{name}.json").unlink(missing_ok=True)


class Remaining:
    """Counts the measurements that are left, and estimates how long they take."""

    def __init__(self, work: list[tuple[Experiment, Result]], options: EvaluateOptions) -> None:
        self._cases = [
            (case, result) for experiment, result in work for case in cases(experiment, experiment.chosen(options))
        ]
        self._usual_s = {
            experiment.name: QUICK_GUESS_S if options.quick else experiment.usual_s for experiment, _ in work
        }
        self._seconds: dict[str, list[float]] = {}

    @property
    def count(self) -> int:
        """Measurements that are left."""
        return sum(runner.left(case, result) for case, result in self._cases)

    @property
    def seconds(self) -> float:
        """Their estimated duration: the mean of those of the same experiment, else what it usually takes."""
        total = 0.0
        for case, result in self._cases:
            own = self._seconds.get(result.bench)
            usual = sum(own) / len(own) if own else self._usual_s[result.bench]
            total += runner.left(case, result) * max(usual, float(case.conditions.get(STREAM_SECONDS, 0)))
        return total

    def measured(self, result: Result, path: Path, _case: Case, seconds: float) -> None:
        """Writes a result after a measurement, and prints what is left."""
        result.write(path)
        self._seconds.setdefault(result.bench, []).append(seconds)
        progress(f"  {self}")

    def __str__(self) -> str:
        """What is left, as text."""
        minutes, seconds = divmod(round(self.seconds), 60)
        hours, minutes = divmod(minutes, 60)
        time = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
        return f"{self.count} measurement{'s' * (self.count != 1)} left, about {time}"
