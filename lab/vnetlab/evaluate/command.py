"""The `lab evaluate` command."""

import argparse
import os
import shutil
from functools import partial
from pathlib import Path

from vnetlab import remote, workloads
from vnetlab.bench import plot, runner
from vnetlab.bench.case import MTUS
from vnetlab.bench.result import Result
from vnetlab.evaluate import elsewhere, papers, ranks, report, store
from vnetlab.evaluate.applications import KERNELS
from vnetlab.evaluate.experiments import EXPERIMENTS
from vnetlab.evaluate.options import LAB, EvaluateOptions, Experiment
from vnetlab.run import LabError, progress
from vnetlab.topology import Wire

ALL = "all"
COVERAGE = "coverage"
SIZE, ADVECT_SIZE, QUICK_SIZE = "W", "A", "S"
EPILOG = f"""\
Papers:
{os.linesep.join(f"  {paper}  {title}" for paper, title in papers.PAPERS.items())}
Experiments: {", ".join(EXPERIMENTS)}.
A result is kept after each measurement in .cache/evaluate; a second call continues there.

Examples:
  lab evaluate 003 --quick
  lab evaluate nas --class S --wire 10g --contender vnet --contender native
  lab evaluate all --publish
  lab evaluate nas --native-hosts machines.txt
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to a parser."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "what",
        nargs="?",
        default=ALL,
        choices=[*papers.PAPERS, *EXPERIMENTS, ALL, COVERAGE],
        metavar="PAPER",
        help="a paper (000 to 004), an experiment, all (default), or coverage (writes docs/evaluation/papers.md)",
    )
    parser.add_argument(
        "--class",
        dest="size",
        choices=("S", "W", "A"),
        help=f"size of the workloads (default: {SIZE}, the advective application: {ADVECT_SIZE}, quick: {QUICK_SIZE})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round that only shows that the evaluation works"
    )
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="hosts that ranks are spread over (default: 2)"
    )
    parser.add_argument(
        "--native-hosts",
        type=Path,
        metavar="FILE",
        help=f"run on other machines over ssh: a line 'DESTINATION DEVICE' for each host, with the word "
        f"'{elsewhere.OWN}' if it takes the device itself; the first machine runs what needs one machine",
    )
    parser.add_argument("--long", action="store_true", help="the stream whose variation is measured takes an hour")
    parser.add_argument(
        "--repeat", type=int, metavar="N", help="rounds (default: 3 for what bars judge, 1 or 2 for the rest; quick: 1)"
    )
    parser.add_argument("--wire", action="append", choices=list(Wire), help="only this wire; repeatable")
    parser.add_argument("--mtu", action="append", type=int, choices=MTUS, help="only this underlay MTU; repeatable")
    parser.add_argument("--kernel", action="append", default=[], choices=KERNELS, help="only this kernel; repeatable")
    parser.add_argument("--contender", action="append", default=[], help="only kinds whose name contains this")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="where results are kept (default: .cache/evaluate)"
    )
    parser.add_argument("--fresh", action="store_true", help="discard kept results")
    parser.add_argument("--publish", action="store_true", help="write the report and its results to docs/evaluation")
    parser.add_argument("--name", default=LAB, help=f"which lab (default: {LAB})")


def command(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    if arguments.publish and arguments.quick:
        raise LabError("a quick run is not published: leave out --quick or --publish")
    if arguments.what == COVERAGE:
        report.COVERAGE.write_text(report.coverage_page())
        return
    chosen = _options(arguments)
    if chosen.machines and arguments.publish:
        raise LabError("figures of other machines are not published: leave out --native-hosts or --publish")
    kept = arguments.results or store.folder(chosen)
    names = [arguments.what] if arguments.what in EXPERIMENTS else papers.experiments(arguments.what)
    if not names:
        _explain(arguments.what)
        return
    plot.library()  # Check for it now, not after hours of measurements.
    progress(f"building {workloads.SOURCES.name}")
    ranks.build()
    elsewhere.check(chosen.machines)
    try:
        _run(names, chosen, arguments, kept)
    except LabError:
        _report(kept)
        raise
    _report(kept)
    if arguments.publish:
        _publish(kept, names)


def _run(names: list[str], chosen: EvaluateOptions, arguments: argparse.Namespace, kept: Path) -> None:
    """Runs experiments where the options say."""
    alone = [name for name in names if chosen.machines and not EXPERIMENTS[name].anywhere]
    spread = [name for name in names if name not in alone]
    # Before anything is discarded.
    if chosen.machines and spread:
        _check(spread, chosen)
    if arguments.fresh:
        store.clear(kept, EXPERIMENTS)
        for place in chosen.machines[:1]:
            elsewhere.discard(alone, place, kept)
    _measure(spread, chosen, arguments, kept)
    for name in alone:
        elsewhere.measure(name, chosen.machines[0], _words(arguments), kept)


def _report(kept: Path) -> None:
    """Writes the report of what has been measured, if anything has."""
    if report.stored(kept):
        for path in report.write(kept):
            progress(f"written: {path}")


def _measure(names: list[str], chosen: EvaluateOptions, arguments: argparse.Namespace, kept: Path) -> None:
    """Measures experiments whose hosts are namespaces here, or on several machines."""
    if not names:
        return
    work = [_begin(EXPERIMENTS[name], chosen, arguments, kept) for name in names]
    remaining = store.Remaining(work, chosen)
    progress(f"{len(work)} experiments, {remaining}")
    with runner.alone(arguments.name), remote.hosts_on(arguments.name, chosen.machines):
        for experiment, result in work:
            path = kept / f"{experiment.name}.json"
            try:
                runner.run(experiment, experiment.chosen(chosen), result, partial(remaining.measured, result, path))
            finally:
                result.write(path)


def _check(names: list[str], chosen: EvaluateOptions) -> None:
    """Raises LabError if these experiments cannot run on the options' machines."""
    if any(wire != Wire.NONE for wire in chosen.wires):
        raise LabError("the wires between other machines are theirs: choose --wire none")
    if len(chosen.machines) < 2:
        raise LabError(f"{', '.join(names)}: two machines at least, a line for each")


def _words(arguments: argparse.Namespace) -> list[str]:
    """The options with which another machine runs an experiment alone."""
    words = ["--name", arguments.name]
    words += [f"--{name}" for name in ("quick", "long") if getattr(arguments, name)]
    words += ["--class", arguments.size] if arguments.size else []
    words += ["--repeat", str(arguments.repeat)] if arguments.repeat else []
    for name in ("wire", "mtu", "kernel", "contender"):
        words += [word for value in getattr(arguments, name) or () for word in (f"--{name}", str(value))]
    return words


def _begin(
    experiment: Experiment, chosen: EvaluateOptions, arguments: argparse.Namespace, kept: Path
) -> tuple[Experiment, Result]:
    """An experiment with its kept or an empty result."""
    rounds = arguments.repeat or (1 if arguments.quick else experiment.rounds)
    return experiment, store.begin(experiment, chosen, rounds, kept)


def _options(arguments: argparse.Namespace) -> EvaluateOptions:
    quick = arguments.quick
    others = elsewhere.machines(arguments.native_hosts) if arguments.native_hosts else ()
    usual = MTUS[:1] if quick or others else ()
    return EvaluateOptions(
        quick=quick,
        wires=tuple(arguments.wire or ((Wire.NONE,) if quick or others else ())),
        mtus=tuple(arguments.mtu or usual),
        contenders=tuple(arguments.contender),
        size=arguments.size or (QUICK_SIZE if quick else SIZE),
        advect=arguments.size or (QUICK_SIZE if quick else ADVECT_SIZE),
        hosts=len(others) or arguments.hosts,
        machines=others,
        lab=arguments.name,
        long=arguments.long,
        kernels=tuple(arguments.kernel),
    )


def _explain(paper: str) -> None:
    """Prints why a paper has no experiments."""
    for entry in papers.ENTRIES:
        if entry.paper == paper:
            print(f"{entry.name}, {entry.title}: {entry.reason}")


def _publish(kept: Path, names: list[str]) -> None:
    """Copies results to docs/evaluation and writes the report there."""
    report.PUBLISHED.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(kept / f"{name}.json", report.PUBLISHED)
    for path in [*report.write(report.PUBLISHED), report.write_index(report.stored(report.PUBLISHED))]:
        progress(f"written: {path}")
