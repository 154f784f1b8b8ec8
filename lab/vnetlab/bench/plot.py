"""Plots of results by matplotlib, which only the bench needs."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from vnetlab.bench.case import EMULATED
from vnetlab.bench.report import describe
from vnetlab.bench.result import METRICS, Conditions, Result, Series
from vnetlab.run import LabError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES = 9
HEIGHT_INCHES = 3.2
LABEL_MAX, LABEL_INCHES = 70, 0.16
"""Longest label of a legend beside a plot, in characters, and the height of one below it."""
FORMATS = ("svg", "png")
STYLES = ("solid", "dashed", "dotted", "dashdot")
"""Styles of lines, by conditions other than the axis."""


def library() -> ModuleType:
    """Loads pyplot of matplotlib; raises LabError if it is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415

        mpl.use("agg")
        from matplotlib import pyplot  # noqa: PLC0415
    except ImportError as error:
        raise LabError("plots need matplotlib: run 'make bench', or .venv/bin/python lab/lab bench") from error
    # Reproducible ids, so that the same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = "vnet"
    return pyplot


def draw(result: Result, title: str, metrics: tuple[str, ...], axis: str, folder: Path) -> list[Path]:
    """Draws each measured metric in a subplot, one below the other; returns the SVG and PNG files.

    Raises LabError if matplotlib is not installed.
    """
    pyplot = library()
    # Next to the other cases, emulated machines take so long that nothing else would be seen.
    result = replace(result, series=[each for each in result.series if EMULATED not in each.conditions.values()])
    drawn = [metric for metric in metrics if metric in result.metrics()]
    if not drawn:
        return []
    size = (WIDTH_INCHES, HEIGHT_INCHES * len(drawn))
    figure, rows = pyplot.subplots(len(drawn), 1, figsize=size, squeeze=False, layout="constrained")
    for metric, row in zip(drawn, rows[:, 0], strict=True):
        (_lines if axis else _bars)(row, result, metric, axis)
        row.set_ylabel(METRICS[metric].unit)
        row.set_ylim(0, 1.1 * row.get_ylim()[1])
        row.set_title(METRICS[metric].title)
        row.grid(axis="y", alpha=0.3)
    handles, labels = rows[0, 0].get_legend_handles_labels()
    if max(map(len, labels), default=0) > LABEL_MAX:
        # Beside the plots, long labels would leave no room for them.
        figure.set_size_inches(WIDTH_INCHES, size[1] + LABEL_INCHES * len(labels))
        figure.legend(handles, labels, fontsize="x-small", loc="outside lower left")
    else:
        rows[0, 0].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(title + (" (quick run: not for reading)" if result.quick else ""))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{result.bench}.{kind}" for kind in FORMATS]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths


def _bars(axes: "Axes", result: Result, metric: str, _axis: str) -> None:
    """A group of bars per condition, a bar per contender: the median with minimum and maximum."""
    groups = [
        each for each in result.conditions() if any(result.find(each, name, metric) for name in result.contenders())
    ]
    names = [name for name in result.contenders() if any(result.find(each, name, metric) for each in groups)]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [(at, result.find(each, name, metric)) for at, each in enumerate(groups)]
        there = [(at + (place + 0.5) * width - 0.4, series) for at, series in found if series]
        medians, below, above = _figures(metric, [series for _, series in there])
        axes.bar(
            [at for at, _ in there],
            medians,
            width,
            yerr=[below, above],
            label=name,
            color=_colour(result, name),
            capsize=2,
        )
    labels = [describe(each).replace(", ", "\n") for each in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize="x-small")


def _lines(axes: "Axes", result: Result, metric: str, axis: str) -> None:
    """A line per contender and combination of other conditions; the condition `axis` is the x axis."""
    if not any(axis in each and result.find(each, name, metric) for each, name in _pairs(result)):
        _bars(axes, result, metric, axis)
        return
    lines: dict[tuple[str, str], list[tuple[float, Series]]] = {}
    for each, name in _pairs(result):
        series = result.find(each, name, metric)
        if series and axis in each:
            others = describe({key: value for key, value in each.items() if key != axis})
            lines.setdefault((name, others), []).append((each[axis], series))
    groups = list(dict.fromkeys(others for _, others in lines))
    for (name, others), there in lines.items():
        medians, below, above = _figures(metric, [series for _, series in there])
        style = {"marker": "o", "color": _colour(result, name), "capsize": 2}
        style["linestyle"] = STYLES[groups.index(others) % len(STYLES)]
        style["label"] = f"{name} ({others})" if len(groups) > 1 else name
        axes.errorbar([at for at, _ in there], medians, yerr=[below, above], **style)
    axes.set_xscale("log")
    axes.set_xlabel(axis)


def _pairs(result: Result) -> Iterable[tuple[Conditions, str]]:
    """All pairs of conditions and contenders, contenders in the outer loop."""
    return ((each, name) for name in result.contenders() for each in result.conditions())


def _colour(result: Result, contender: str) -> str:
    """A contender's colour, the same in all plots of a result."""
    return f"C{result.contenders().index(contender)}"


def _figures(metric: str, found: list) -> tuple[list[float], list[float], list[float]]:
    """Medians and error bars (distance to minimum and maximum) in displayed units."""
    scale = METRICS[metric].scale
    medians = [series.median / scale for series in found]
    below = [(series.median - series.spread[0]) / scale for series in found]
    return medians, below, [(series.spread[1] - series.median) / scale for series in found]
