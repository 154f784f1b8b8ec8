"""Results as text for the terminal and as Markdown for docs/measurements.md, which keeps one part for each bench."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from vnetlab.bench.result import METRICS, Conditions, Result, Series
from vnetlab.daemon import REPOSITORY

PAGE = REPOSITORY / "docs" / "measurements.md"
FIGURES = REPOSITORY / "docs" / "measurements"
"""Where what the page shows is kept: plots and JSON."""
HEADING = """\
# Measurements

Medians over interleaved runs (`make bench`; one of them: `lab/lab bench NAME --publish`), with the smallest and the
largest in brackets. How it is done stands in `lab/vnetlab/bench/`. Each part is written by the bench of its name.
"""
MARKERS = ("<!-- bench {name}: begin -->", "<!-- bench {name}: end -->")
WAYS = {"none": "unlimited", "1g": "1 Gbit/s", "10g": "10 Gbit/s"}


def table(result: Result) -> str:
    """The figures as a table for the terminal."""
    parts = []
    for rows in _tables(result):
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        parts.append("\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]))
    return "\n\n".join([*parts, "\n".join(_failures(result))]).strip()


def markdown(result: Result, title: str, plots: Iterable[str]) -> str:
    """The part of docs/measurements.md that a bench writes; `plots` are paths of images from there."""
    kind = "QUICK RUN, only to show that it works: no figure here means anything" if result.quick else ""
    lines = [f"## {title}", "", *([f"**{kind}.**", ""] if kind else [])]
    lines += [f"`{result.command}`, {result.date}, {result.repeat} round{'s' * (result.repeat > 1)}."]
    lines += [" ".join(result.notes)]
    for head, *rows in _tables(result):
        lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"- {line}" for line in _failures(result))]
    lines += ["", *(f"![{title}]({plot})" for plot in plots)]
    lines += ["", "Machine: " + ", ".join(f"{name} {value}" for name, value in result.machine.items()) + ".  "]
    lines += ["Versions: " + ", ".join(f"{name} {version}" for name, version in result.versions.items()) + "."]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def publish(page: Path, name: str, part: str) -> None:
    """Writes a bench's part into the page, in place of the one before, at the end when there was none."""
    begin, end = (marker.format(name=name) for marker in MARKERS)
    text = page.read_text() if page.exists() else HEADING
    part = f"{begin}\n{part.strip()}\n{end}"
    before, found, rest = text.partition(begin)
    if found:
        _, closed, after = rest.partition(end)
        if not closed:
            raise ValueError(f"{page} has '{begin}' without '{end}'")
        text = before + part + after
    else:
        text = f"{text.rstrip()}\n\n{part}\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text)


def figure(series: Series) -> str:
    """A median with its spread: "14.2 (13.9-14.4)"."""
    metric = METRICS[series.metric]
    low, high = series.spread
    return f"{metric.show(series.median)} ({metric.show(low)}\N{EN DASH}{metric.show(high)})"


def describe(conditions: Conditions) -> str:
    """Conditions as readers know them."""
    parts = {name: WAYS.get(str(value), str(value)) if name == "wire" else value for name, value in conditions.items()}
    return ", ".join(str(value) if name in ("path", "load") else f"{name} {value}" for name, value in parts.items())


def _tables(result: Result) -> Iterator[list[list[str]]]:
    """Tables as rows of cells, the heading first: one for all conditions under which the same was measured."""

    def measured(conditions: Conditions) -> list[str]:
        there = {series.metric for series in result.series if series.conditions == conditions}
        return [metric for metric in METRICS if metric in there and METRICS[metric].in_tables]

    for metrics, together in itertools.groupby(filter(measured, result.conditions()), measured):
        units = [f"{METRICS[metric].title}, {METRICS[metric].unit}" for metric in metrics]
        rows = [["conditions", "contender", *units]]
        for conditions in together:
            for contender in result.contenders():
                found = [result.find(conditions, contender, metric) for metric in metrics]
                if any(found):
                    rows.append([describe(conditions), contender, *(figure(each) if each else "" for each in found)])
        yield rows


def _failures(result: Result) -> list[str]:
    """Who could not be measured, said once for each reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for failure in result.failures:
        reasons.setdefault((failure.contender, failure.reason), []).append(describe(failure.conditions))
    return [f"{name} could not run ({'; '.join(where)}): {reason}" for (name, reason), where in reasons.items()]
