"""The `lab bench` command."""

import argparse
from pathlib import Path

from vnetlab.bench import compare, plot, report, runner
from vnetlab.bench.result import METRICS, SIGNIFICANCE, Result
from vnetlab.bench.suite import BENCHES, MTUS, Bench, Options
from vnetlab.run import LabError, progress
from vnetlab.topology import Wire

ALL = "all"
EPILOG = f"""\
Benches: {", ".join(f"{bench.name} ({bench.title})" for bench in BENCHES.values())}.
`bench compare REV_A REV_B [NAME]` builds two revisions of vnet and runs them against each other.

Examples:
  lab bench tcp --wire none --mtu 1500 --contender vnet --contender native
  lab bench all --publish
  lab bench compare main HEAD tcp --wire none
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the command's arguments."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("bench", choices=[*BENCHES, ALL, "compare"], metavar="NAME", help="which, or all, or compare")
    parser.add_argument("rest", nargs="*", metavar="REV_A REV_B [NAME]", help="with compare: what, and by which bench")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there (all: one file each)")
    parser.add_argument("--quick", action="store_true", help="two short rounds, only to see that it works")
    parser.add_argument("--repeat", type=int, metavar="N", help=f"rounds (default: {runner.REPEAT})")
    parser.add_argument("--wire", action="append", choices=list(Wire), help="only this underlay; may be repeated")
    parser.add_argument("--mtu", action="append", type=int, choices=MTUS, help="only this underlay MTU")
    parser.add_argument("--contender", action="append", default=[], help="only those whose name has this in it")
    parser.add_argument("--pings", type=int, default=Options.pings, help="of each size (latency, ablation)")
    parser.add_argument("--publish", action="store_true", help="write table and plots into docs/")


def command(arguments: argparse.Namespace) -> None:
    """Runs it."""
    if arguments.bench == "compare":
        _compare(arguments)
        return
    if arguments.rest:
        raise LabError(f"bench {arguments.bench} takes no '{arguments.rest[0]}'")
    benches = list(BENCHES.values()) if arguments.bench == ALL else [BENCHES[arguments.bench]]
    if arguments.publish:
        # Hours before it is needed.
        plot.library()
    for bench in benches:
        result = _run(bench, arguments, _options(arguments))
        print(f"\n{bench.title} ({result.repeat} rounds: median, smallest and largest)\n\n{report.table(result)}\n")
        if arguments.publish:
            _publish(bench, result)


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        quick=arguments.quick,
        wires=tuple(arguments.wire or ()),
        mtus=tuple(arguments.mtu or MTUS),
        contenders=tuple(arguments.contender),
        pings=arguments.pings,
    )


def _run(bench: Bench, arguments: argparse.Namespace, options: Options) -> Result:
    """Runs a bench; what there is is written also when it is interrupted."""
    repeat = arguments.repeat or (runner.REPEAT_QUICK if arguments.quick else runner.REPEAT)
    if repeat < 1:
        raise LabError(f"--repeat {repeat}: choose 1 or more")
    result = runner.begin(bench, options, repeat)
    try:
        runner.run(bench, options, result)
    finally:
        if arguments.json:
            path = arguments.json
            if arguments.bench == ALL:
                path = path.with_name(f"{path.stem}-{bench.name}{path.suffix}")
            result.write(path)
    return result


def _publish(bench: Bench, result: Result) -> None:
    """Writes the bench's part of docs/measurements.md, its plots and its figures."""
    result.write(report.FIGURES / f"{bench.name}.json")
    plots = plot.draw(result, bench.title, bench.plotted, bench.axis, report.FIGURES)
    shown = [f"{report.FIGURES.name}/{path.name}" for path in plots if path.suffix == ".svg"]
    report.publish(report.PAGE, bench.name, report.markdown(result, bench.title, shown))
    progress(f"written: {report.PAGE}, and figures beside it")


def _compare(arguments: argparse.Namespace) -> None:
    """Runs two revisions against each other, by one bench or all."""
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
        f"\nA difference exceeds the noise when chance makes one like it in at most {SIGNIFICANCE:.0%} of all runs\n"
        "(Mann-Whitney); of twenty comparisons without any difference one is still expected to look like one."
    )


def _print_differences(result: Result) -> None:
    for difference in compare.differences(result):
        metric = METRICS[difference.one.metric]
        what = f"{report.describe(difference.conditions)}: {metric.title}, {metric.unit}"
        figures = f"{report.figure(difference.one):24} {report.figure(difference.other):24}"
        print(f"{what:60} {figures} {difference.change:+7.1%}  p {difference.p:.3f}  {difference.verdict}")
