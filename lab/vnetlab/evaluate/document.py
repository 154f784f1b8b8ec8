"""A document of headings, paragraphs, lists, tables and plots: as Markdown, and as one self-contained HTML page."""

import base64
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 14px; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
th { background: #f4f4f4; }
img { max-width: 100%; }
code { background: #f4f4f4; }
"""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")


@dataclass(frozen=True)
class Heading:
    """A heading; the document's title has level 1."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph. In all texts, `words` are code, **words** are bold and [words](address) is a link."""

    text: str


@dataclass(frozen=True)
class List:
    """A list of lines."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells, heading first."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plot:
    """An SVG file."""

    path: Path
    title: str


Block = Heading | Text | List | Table | Plot


def markdown(blocks: Iterable[Block]) -> str:
    """The document as Markdown; plots are links to files beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def page(title: str, blocks: Iterable[Block]) -> str:
    """The document as one HTML page that contains its plots."""
    body = "\n".join(_html(block) for block in blocks)
    head = f'<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case List(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Table(rows):
            lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
            return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])
        case Plot(path, title):
            return f"![{title}]({path.name})"


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case List(lines):
            return "<ul>\n" + "".join(f"<li>{_inline(line)}</li>\n" for line in lines) + "</ul>"
        case Table(rows):
            head, *rest = rows
            lines = [_row(head, "th"), *(_row(row, "td") for row in rest)]
            return "<table>\n" + "\n".join(lines) + "\n</table>"
        case Plot(path, title):
            data = base64.b64encode(path.read_bytes()).decode()
            return f'<p><img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}"></p>'


def _row(cells: Iterable[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{_inline(cell)}</{tag}>" for cell in cells) + "</tr>"


def _inline(text: str) -> str:
    """Text with code, bold words and links as HTML. Links to other files are plain: the page stands alone."""
    parts = []
    for number, part in enumerate(text.split("`")):
        if number % 2:
            parts.append(f"<code>{html.escape(part)}</code>")
            continue
        escaped = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(part))
        parts.append(LINK.sub(r"\1", escaped))
    return "".join(parts)
