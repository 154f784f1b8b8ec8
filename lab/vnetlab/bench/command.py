"""The `lab bench` command."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from vnetlab.bench import compare, pages, plot, report, runner
from vnetlab.bench.case import MTUS, Bench, Options
from vnetlab.bench.result import METRICS, SIGNIFICANCE, Result
from vnetlab.bench.suite import BENCHES
from vnetlab.run import LabError, progress
from vnetlab.topology import Wire

ALL = "all"
COMPARE = "compare"
PUBLISH = "publish"
EPILOG = f"""\
Benches: {", ".join(f"{bench.name} ({bench.title})" for bench in BENCHES.values())}.
`bench compare REV_A REV_B [NAME]` builds two revisions of vnet and runs them in turn.
`bench publish` measures nothing: it writes plots and pages in docs/ anew from docs/measurements/*.json.

Examples:
  lab bench tcp --wire none --mtu 1500 --contender vnet --contender native
  lab bench all --publish
  lab bench compare main HEAD tcp --wire none
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to a parser."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "bench", choices=[*BENCHES, ALL, COMPARE, PUBLISH], metavar="NAME", help="a bench, or all, compare, publish"
    )
    parser.add_argument(
        "rest", nargs="*", metavar="REV_A REV_B [NAME]", help="with compare: the revisions, and the bench"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON (all: one file per bench)")
    parser.add_argument("--quick", action="store_true", help="two short rounds that only show that the bench works")
    parser.add_argument("--repeat", type=int, metavar="N", help=f"rounds (default: {runner.REPEAT})")
    parser.add_argument("--wire", action="append", choices=list(Wire), help="only this wire; repeatable")
    parser.add_argument("--mtu", action="append", type=int, choices=MTUS, help="only this underlay MTU; repeatable")
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        help="only contenders whose name is or else contains this; repeatable",
    )
    parser.add_argument("--pings", type=int, default=Options.pings, help="pings of each size (latency, ablation)")
    parser.add_argument("--publish", action="store_true", help="store the result, write its page and plots")


def command(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    if arguments.bench == COMPARE:
        _compare(arguments)
        return
    if arguments.rest:
        raise LabError(f"bench {arguments.bench} takes no '{arguments.rest[0]}'")
    if arguments.bench == PUBLISH:
        _publish(BENCHES.values())
        return
    benches = list(BENCHES.values()) if arguments.bench == ALL else [BENCHES[arguments.bench]]
    if arguments.publish:
        # Check for the library now, not after hours of measurements.
        plot.library()
    for bench in benches:
        result = _run(bench, arguments, _options(arguments))
        print(
            f"\n{bench.title} ({result.repeat} rounds: median, smallest\N{EN DASH}largest)\n\n{report.table(result)}\n"
        )
        if arguments.publish:
            pages.store(result)
            _publish([bench])


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        quick=arguments.quick,
        wires=tuple(arguments.wire or ()),
        mtus=tuple(arguments.mtu or MTUS),
        contenders=tuple(arguments.contender),
        pings=arguments.pings,
    )


def _run(bench: Bench, arguments: argparse.Namespace, options: Options) -> Result:
    """Runs a bench. An interrupted run still writes the figures measured so far."""
    repeat = arguments.repeat or (runner.REPEAT_QUICK if arguments.quick else runner.REPEAT)
    if repeat < 1:
        raise LabError(f"--repeat {repeat}: choose 1 or more")
    result = runner.begin(bench, options, repeat)
    try:
        with runner.alone():
            runner.run(bench, options, result)
    finally:
        if arguments.json:
            path = arguments.json
            if arguments.bench == ALL:
                path = path.with_name(f"{path.stem}-{bench.name}{path.suffix}")
            result.write(path)
    return result


def _publish(benches: Iterable[Bench]) -> None:
    """Draws the plots of benches and regenerates all pages."""
    for path in pages.publish(benches):
        progress(f"written: {path.relative_to(pages.REPOSITORY)}")


def _compare(arguments: argparse.Namespace) -> None:
    """Runs two revisions in turn, in one bench or all benches."""
    *names, bench = arguments.rest if len(arguments.rest) == 3 else [*arguments.rest, ALL]
    if len(names) != 2 or bench not in [*BENCHES, ALL]:
        raise LabError(f"bench compare REV_A REV_B [NAME], NAME one of {' '.join(BENCHES)}")
    vnets = compare.revisions(names)
    options = Options(arguments.quick, tuple(arguments.wire or ()), tuple(arguments.mtu or MTUS), vnets=tuple(vnets))
    arguments.bench = bench
    for each in BENCHES.values() if bench == ALL else [BENCHES[bench]]:
        result = _run(each, arguments, options)
        print(f"\n{each.title}: {vnets[1].name} against {vnets[0].name}, {result.repeat} rounds\n")
        for failure in result.failures:
            print(f"{failure.contender} could not run ({report.describe(failure.conditions)}): {failure.reason}")
        if len(result.contenders()) == 2:
            _print_differences(result)
    print(
        f"\nBETTER and WORSE mean that chance alone gives such a difference in at most {SIGNIFICANCE:.0%} of all runs\n"
        "(Mann-Whitney). Of twenty comparisons of equal revisions, expect one false alarm."
    )


def _print_differences(result: Result) -> None:
    for difference in compare.differences(result):
        metric = METRICS[difference.one.metric]
        what = f"{report.describe(difference.conditions)}: {metric.heading}"
        figures = f"{report.figure(difference.one):24} {report.figure(difference.other):24}"
        print(f"{what:60} {figures} {difference.change:+7.1%}  p {difference.p:.3f}  {difference.verdict}")
