"""Generates the pages about measurements from stored results: `lab bench NAME --publish`, `lab bench publish`.

`docs/measurements/NAME.json` is the only source. The page and plots beside it, and the marked tables of
docs/performance.md and README.md, are generated from it. A test compares every page with its source.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from vnetlab.bench import bars, plot, report
from vnetlab.bench.case import Bench
from vnetlab.bench.result import Result
from vnetlab.bench.suite import BENCHES
from vnetlab.daemon import REPOSITORY
from vnetlab.run import LabError

FOLDER = REPOSITORY / "docs" / "measurements"


def stored() -> dict[str, Result]:
    """All stored results by bench, in the order of the benches."""
    paths = {name: FOLDER / f"{name}.json" for name in BENCHES}
    return {name: Result.read(path) for name, path in paths.items() if path.exists()}


def texts(results: dict[str, Result]) -> Iterator[tuple[Path, str]]:
    """Every generated page, and every page with a generated table, with the text that it must have."""
    for name, result in results.items():
        yield FOLDER / f"{name}.md", report.page(result, BENCHES[name].title)
    any_result = next(iter(results.values()))
    performance = REPOSITORY / "docs" / "performance.md"
    tables = {"machine": report.machine(any_result), "bars": bars.bars(results)}
    yield performance, replace(performance, performance.read_text(), tables)
    readme = REPOSITORY / "README.md"
    yield readme, replace(readme, readme.read_text(), {"figures": bars.headlines(results)})


def replace(path: Path, text: str, tables: dict[str, str]) -> str:
    """Puts each table between `<!-- NAME: begin` and `<!-- NAME: end -->`. Raises LabError if one is missing."""
    for name, table in tables.items():
        pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
        text, count = re.subn(
            pattern, lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise LabError(f"{path} has {count} parts between '<!-- {name}: begin' and '<!-- {name}: end -->', not one")
    return text


def store(result: Result) -> None:
    """Stores a result, as the source of the pages."""
    result.write(FOLDER / f"{result.bench}.json")


def publish(benches: Iterable[Bench]) -> list[Path]:
    """Draws the plots of `benches`, then regenerates every page. Returns the files that were written."""
    results = stored()
    written = []
    for bench in benches:
        if bench.name in results:
            written += plot.draw(results[bench.name], bench.title, bench.plotted, bench.axis, FOLDER)
    for path, text in texts(results):
        path.write_text(text)
        written.append(path)
    return written
