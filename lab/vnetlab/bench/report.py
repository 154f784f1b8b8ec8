"""Results as text: tables for the terminal, and a bench's page `docs/measurements/NAME.md`."""

import itertools
import re
from collections.abc import Iterator

from vnetlab.bench.result import METRICS, Conditions, Result, Series

WAYS = {"none": "unlimited", "1g": "1 Gbit/s", "10g": "10 Gbit/s"}


def table(result: Result) -> str:
    """The figures as a table for the terminal."""
    parts = []
    for rows in tables(result):
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        parts.append("\n".join([lines[0], "-" * len(lines[0]), *lines[1:]]))
    return "\n\n".join([*parts, "\n".join(failures(result))]).strip()


def page(result: Result, title: str) -> str:
    """The Markdown page of a bench. It depends only on the stored result and the title."""
    source = f"{result.bench}.json"
    lines = [f"# {title}", ""]
    lines += [f"<!-- Generated from {source} by `lab/lab bench publish`; do not edit. -->", ""]
    if result.quick:
        lines += ["**QUICK RUN: it only shows that the bench works. No figure here means anything.**", ""]
    rounds = f"{result.repeat} round{'s' * (result.repeat > 1)}"
    lines += [f"`{result.command}`, {result.date}, {rounds}: median (smallest\N{EN DASH}largest)."]
    lines += [*result.notes, f"Every value of every round: [{source}]({source})."]
    for head, *rows in tables(result):
        lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"- {line}" for line in failures(result))]
    lines += ["", f"![{title}]({result.bench}.svg)"]
    lines += ["", f"Machine: {machine(result)}.  "]
    lines += ["Versions: " + ", ".join(f"{name} {version}" for name, version in result.versions.items()) + "."]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def machine(result: Result) -> str:
    """The machine a result was measured on, in one line."""
    return ", ".join(f"{name} {value}" for name, value in result.machine.items())


def figure(series: Series) -> str:
    """A median with its spread: "14.2 (13.9-14.4)"."""
    metric = METRICS[series.metric]
    low, high = series.spread
    return f"{metric.show(series.median)} ({metric.show(low)}\N{EN DASH}{metric.show(high)})"


def describe(conditions: Conditions) -> str:
    """Conditions as text: "wire 1 Gbit/s, MTU 1500"."""
    parts = {name: WAYS.get(str(value), str(value)) if name == "wire" else value for name, value in conditions.items()}
    return ", ".join(str(value) if name in ("path", "load") else f"{name} {value}" for name, value in parts.items())


def tables(result: Result) -> Iterator[list[list[str]]]:
    """Tables as rows of cells, heading first; consecutive conditions with the same metrics share a table."""

    def measured(conditions: Conditions) -> list[str]:
        there = {series.metric for series in result.series if series.conditions == conditions}
        return [metric for metric in METRICS if metric in there and METRICS[metric].in_tables]

    for metrics, together in itertools.groupby(filter(measured, result.conditions()), measured):
        rows = [["conditions", "contender", *(METRICS[metric].heading for metric in metrics)]]
        for conditions in together:
            for contender in result.contenders():
                found = [result.find(conditions, contender, metric) for metric in metrics]
                if any(found):
                    rows.append([describe(conditions), contender, *(figure(each) if each else "" for each in found)])
        yield rows


def failures(result: Result) -> list[str]:
    """Contenders that could not be measured: one line per contender and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for failure in result.failures:
        reasons.setdefault((failure.contender, failure.reason), []).append(describe(failure.conditions))
    return [f"{name} could not run ({'; '.join(where)}): {reason}" for (name, reason), where in reasons.items()]
