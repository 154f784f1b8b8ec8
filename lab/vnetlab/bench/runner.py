"""Runs the cases of a bench: every contender once per round, in the same order."""

import contextlib
import fcntl
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from vnetlab import lab
from vnetlab.bench import environment
from vnetlab.bench.result import METRICS, Conditions, Failure, Result, Sample
from vnetlab.bench.suite import LAB, Bench, Case, Options, Turn, cases
from vnetlab.run import LabError, progress
from vnetlab.topology import Topology

LOCK = Path("/run/vnet-bench.lock")
REPEAT = 5
REPEAT_QUICK = 2


def begin(bench: Bench, options: Options, repeat: int) -> Result:
    """A result without figures: command, date, machine, versions."""
    return Result(
        bench=bench.name,
        command=shlex.join(["lab/lab", *sys.argv[1:]]),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        repeat=repeat,
        quick=options.quick,
        machine=environment.machine(),
        versions=environment.versions(),
        notes=list(bench.notes),
    )


def run(bench: Bench, options: Options, result: Result) -> None:
    """Runs a bench and adds its figures to `result`, which keeps them if the user interrupts the run.

    Contenders that cannot run are recorded with the reason. Everything is taken down, also after an interrupt.
    """
    with _alone():
        for case in cases(bench, options):
            progress(f"{bench.name}: {words(case.conditions)}")
            try:
                topology = lab.prepare(case.settings)
                _rounds(bench, case, topology, result)
            finally:
                lab.down(LAB)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Prevents a second bench from running on this machine."""
    with LOCK.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LabError("another bench is running on this machine") from error
        yield


def words(conditions: Conditions) -> str:
    """Conditions as text."""
    return ", ".join(f"{name} {value}" for name, value in conditions.items())


def _rounds(bench: Bench, case: Case, topology: Topology, result: Result) -> None:
    """Runs all rounds; a contender that fails once is excluded from the case."""
    out: set[str] = set()
    for turn in case.turns:
        reason = turn.missing()
        if reason:
            out.add(turn.contender)
            _note(result, case, turn, reason)
    for number in range(1, result.repeat + 1):
        for turn in case.turns:
            if turn.contender in out:
                continue
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


def _note(result: Result, case: Case, turn: Turn, reason: str) -> None:
    result.failures.append(Failure(dict(case.conditions), turn.contender, reason))
    progress(f"  {turn.contender} is excluded: {reason}")


def _shown(sample: Sample, bench: Bench) -> str:
    """The sample's plotted metrics, or its first ones if none is plotted."""
    names = [name for name in bench.plotted if name in sample] or list(sample)[:4]
    return ", ".join(f"{METRICS[name].title} {METRICS[name].show(sample[name])} {METRICS[name].unit}" for name in names)
