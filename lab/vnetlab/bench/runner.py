"""Runs the cases of a bench: every contender once per round, in the same order."""

import contextlib
import fcntl
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from vnetlab import lab
from vnetlab.bench import environment
from vnetlab.bench.case import LAB, Bench, Case, Options, Turn
from vnetlab.bench.result import METRICS, Conditions, Failure, Result, Sample
from vnetlab.bench.suite import cases
from vnetlab.run import LabError, progress
from vnetlab.topology import Topology

REPEAT = 5
REPEAT_QUICK = 2
Measured = Callable[[Case, float], None]
"""Called after each measurement, with its duration in seconds."""


def begin(bench: Bench, options: Options, repeat: int) -> Result:
    """A result without figures: command, date, machine, versions."""
    return Result(
        bench=bench.name,
        command=recorded(sys.argv[1:]),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        repeat=repeat,
        quick=options.quick,
        machine=environment.machine(),
        versions=environment.versions(),
        notes=list(bench.notes),
    )


def recorded(words: list[str]) -> str:
    """The command that measures the same again: where it also writes the result, `--json FILE`, is left out."""
    kept = [word for word, before in zip(words, ["", *words], strict=False) if "--json" not in (word, before)]
    return shlex.join(["lab/lab", *(word for word in kept if not word.startswith("--json="))])


def run(bench: Bench, options: Options, result: Result, measured: Measured = lambda *_: None) -> None:
    """Runs a bench and adds its figures to `result`, which keeps them if the user interrupts the run.

    A result that already has figures is continued: only the missing rounds are measured. `measured` is called after
    each measurement. Contenders that cannot run are recorded with the reason. Everything is taken down, also after an
    interrupt.
    """
    for case in cases(bench, options):
        if not left(case, result):
            continue
        progress(f"{bench.name}: {words(case.conditions)}")
        try:
            topology = lab.prepare(case.settings)
            _rounds(bench, case, topology, result, measured)
        finally:
            lab.down(case.settings.name)


def left(case: Case, result: Result) -> int:
    """Number of measurements of a case that a result does not have yet, without contenders that failed."""
    failed = {failure.contender for failure in result.failures if failure.conditions == case.conditions}
    names = [turn.contender for turn in case.turns if turn.contender not in failed]
    return sum(max(0, result.repeat - result.rounds(case.conditions, name)) for name in names)


@contextlib.contextmanager
def alone(name: str = LAB) -> Iterator[None]:
    """Prevents a second bench with labs of this name from running on this machine."""
    with Path(f"/run/vnet-{name}.lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LabError(f"another bench of lab {name} is running on this machine") from error
        yield


def words(conditions: Conditions) -> str:
    """Conditions as text."""
    return ", ".join(f"{name} {value}" for name, value in conditions.items())


def _rounds(bench: Bench, case: Case, topology: Topology, result: Result, measured: Measured) -> None:
    """Runs all rounds; a contender that fails once is excluded from the case."""
    out: set[str] = set()
    for turn in case.turns:
        reason = turn.missing()
        if reason:
            out.add(turn.contender)
            _note(result, case, turn, reason)
    for number in range(1, result.repeat + 1):
        for turn in case.turns:
            if turn.contender in out or number <= result.rounds(case.conditions, turn.contender):
                continue
            begin = time.monotonic()
            try:
                sample = turn.take(topology)
            except LabError as error:
                error.keep_log()
                out.add(turn.contender)
                last = (error.log_end or "").strip().splitlines()[-1:]
                _note(result, case, turn, " / ".join([f"round {number}: {error}", *(line.strip() for line in last)]))
                continue
            result.add(case.conditions, turn.contender, sample)
            progress(f"  {number}/{result.repeat} {turn.contender}: {_shown(sample, bench)}")
            measured(case, time.monotonic() - begin)


def _note(result: Result, case: Case, turn: Turn, reason: str) -> None:
    result.failures.append(Failure(dict(case.conditions), turn.contender, reason))
    progress(f"  {turn.contender} is excluded: {reason}")


def _shown(sample: Sample, bench: Bench) -> str:
    """The sample's plotted metrics, or its first ones if none is plotted."""
    names = [name for name in bench.plotted if name in sample] or list(sample)[:4]
    return ", ".join(f"{METRICS[name].title} {METRICS[name].show(sample[name])} {METRICS[name].unit}" for name in names)
