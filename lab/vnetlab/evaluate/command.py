"""The `lab evaluate` command."""

import argparse
import os
import shutil
from functools import partial
from pathlib import Path

from vnetlab import workloads
from vnetlab.bench import plot, runner
from vnetlab.bench.suite import MTUS
from vnetlab.evaluate import papers, ranks, report, store
from vnetlab.evaluate.applications import KERNELS
from vnetlab.evaluate.experiments import EXPERIMENTS
from vnetlab.evaluate.options import LAB, EvaluateOptions
from vnetlab.run import LabError, progress
from vnetlab.topology import Wire

ALL = "all"
COVERAGE = "coverage"
REPEAT = 3
SIZE, QUICK_SIZE = "W", "S"
EPILOG = f"""\
Papers:
{os.linesep.join(f"  {paper}  {title}" for paper, title in papers.PAPERS.items())}
Experiments: {", ".join(EXPERIMENTS)}.
A result is kept after each measurement in .cache/evaluate; a second call continues there.

Examples:
  lab evaluate 003 --quick
  lab evaluate nas --class S --wire 10g --contender vnet --contender native
  lab evaluate all --publish
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
        help=f"size of the workloads (default: {SIZE}, quick: {QUICK_SIZE})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round that only shows that the evaluation works"
    )
    parser.add_argument(
        "--hosts", type=int, default=2, metavar="N", help="hosts that ranks are spread over (default: 2)"
    )
    parser.add_argument("--long", action="store_true", help="the stream whose variation is measured takes an hour")
    parser.add_argument("--repeat", type=int, metavar="N", help=f"rounds (default: {REPEAT}, quick: 1)")
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
    kept = arguments.results or store.folder(chosen)
    repeat = arguments.repeat or (1 if arguments.quick else REPEAT)
    names = [arguments.what] if arguments.what in EXPERIMENTS else papers.experiments(arguments.what)
    if not names:
        _explain(arguments.what)
        return
    plot.library()  # Check for it now, not after hours of measurements.
    if arguments.fresh:
        store.clear(kept)
    work = [(EXPERIMENTS[name], store.begin(EXPERIMENTS[name], chosen, repeat, kept)) for name in names]
    remaining = store.Remaining(work, chosen)
    progress(f"building {workloads.SOURCES.name}")
    ranks.build()
    progress(f"{len(work)} experiments, {remaining}")
    with runner.alone(arguments.name):
        for experiment, result in work:
            path = kept / f"{experiment.name}.json"
            try:
                runner.run(experiment, chosen, result, partial(remaining.measured, result, path))
            finally:
                result.write(path)
    for path in report.write(kept):
        progress(f"written: {path}")
    if arguments.publish:
        _publish(kept, names)


def _options(arguments: argparse.Namespace) -> EvaluateOptions:
    quick = arguments.quick
    return EvaluateOptions(
        quick=quick,
        wires=tuple(arguments.wire or ((Wire.NONE,) if quick else ())),
        mtus=tuple(arguments.mtu or (MTUS[:1] if quick else MTUS)),
        contenders=tuple(arguments.contender),
        size=arguments.size or (QUICK_SIZE if quick else SIZE),
        hosts=arguments.hosts,
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
    for path in report.write(report.PUBLISHED):
        progress(f"written: {path}")
