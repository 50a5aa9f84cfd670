"""A report as one HTML file that contains its texts, tables and pictures, so that it can be mailed,
archived and read without a network.

The page needs no script and no other file, and can be printed. Pictures are SVG, so they stay
sharp, and each has an alt text. A table or picture that is wider than the window scrolls in a box
of its own. A shadow at the edge of the box shows that the content continues there. The shadows are
fixed to the two edges of the box. Two white patches scroll with the content and cover a shadow
where the content ends. Pictures are white, so they are blended by multiplication, and do not hide
shadows and patches.
"""

import base64
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from recapp.console import Column
from recapp.reporting.drawing import Picture
from recapp.settings.whole_file import write_whole

_CSS = """
:root { color-scheme: light }
body { margin: 0 auto; max-width: 112rem; padding: 1.5rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 2.4rem 0 .6rem;
  border-top: 3px solid #1a1a1a; padding-top: .5rem }
h3 { font-size: 1.02rem; line-height: 1.3; margin: 0 0 .3rem }
p { max-width: 46rem; margin: .4rem 0; overflow-wrap: anywhere }
.quiet { color: #595959 }
.failed { color: #a01212 }
.lead { font-size: 1.2rem; line-height: 1.4; font-weight: 600 }
figure { margin: 0 0 1rem } figure img { display: block; max-width: 100%; height: auto }
figcaption { max-width: 46rem; color: #595959; font-size: .88rem; line-height: 1.4 }
.columns { display: grid;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1.6rem 2.4rem;
  margin-top: .8rem }
.columns.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 46rem), 1fr)) }
.columns > * { min-width: 0 }
.columns figure { margin: 0 }
.columns img { width: 100%; max-width: 42rem }
.columns.wide img { width: auto; max-width: 100% }
.scroll { overflow-x: auto; margin: .5rem 0;
  background: linear-gradient(to right, #fff 1.6rem, #fff0) left / 3.2rem 100% local,
  linear-gradient(to left, #fff 1.6rem, #fff0) right / 3.2rem 100% local,
  linear-gradient(to right, #0006, #0000) left top / 1.1rem calc(100% - 2px) scroll,
  linear-gradient(to left, #0006, #0000) right top / 1.1rem calc(100% - 2px) scroll;
  background-repeat: no-repeat; background-color: #fff }
.scroll img { mix-blend-mode: multiply }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #d9d9d9;
  vertical-align: top }
th { border-bottom: 2px solid #595959; vertical-align: bottom; white-space: pre-line }
.number { text-align: right }
td { white-space: nowrap }
td.long { white-space: normal; min-width: 14rem; overflow-wrap: anywhere }
tr.best td { font-weight: 700; background: #e6710018 }
tr.best td:first-child { box-shadow: inset 3px 0 #D55E00; padding-left: .5rem }
summary { cursor: pointer; margin: .5rem 0 }
footer { margin-top: 2.6rem; border-top: 1px solid #595959; padding-top: .6rem; color: #595959;
  font-size: .85rem }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0;
  max-width: 70rem }
dt { font-weight: 600 } dd { margin: 0; overflow-wrap: anywhere }
@media (max-width: 30rem) { body { padding: .75rem } }
@media print { body { max-width: none; padding: 0 } figure, tr { break-inside: avoid } }
"""
_MARKED = ' class="best"'
LONG = 60  # a table with more lines is folded


def heading(text: str) -> str:
    """Return the heading of a part of the page as HTML."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph as HTML.

    Args:
        text: The text, not yet escaped.
        kind: The style: `lead`, `quiet` or `failed`; empty for an ordinary paragraph.
    """
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def figure(picture: Picture, level: int = 2) -> str:
    """Return a picture as HTML, under its title and above its caption.

    Args:
        picture: The picture.
        level: The level of the title: 2 begins a part of the page, 3 is inside a part.
    """
    data = base64.b64encode(picture.svg.encode()).decode()
    image = (
        f'<div class="scroll"><img src="data:image/svg+xml;base64,{data}" style="min-width: '
        f'{picture.least_width}px" '
        f'alt="{escape(picture.alt)}"></div><figcaption>{escape(picture.caption)}</figcaption>'
    )
    title = heading(picture.title) if level == 2 else f"<h3>{escape(picture.title)}</h3>"
    where = escape(picture.name)
    return (
        f'{title}<figure id="{where}">{image}</figure>'
        if level == 2
        else f'<figure id="{where}">{title}{image}</figure>'
    )


def columns(parts: Sequence[str], *, wide: bool = False) -> str:
    """Return parts of a page as HTML: side by side in a wide window, else below each other.

    Args:
        parts: The HTML of each part.
        wide: Whether the parts are so wide that they need a wider window to be side by side.
    """
    kind = "columns wide" if wide else "columns"
    return f'<div class="{kind}">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def footer(entries: Sequence[tuple[str, str]]) -> str:
    """Return the foot of a page as HTML: pairs of a name and its text."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries)
    return f"<footer><dl>{items}</dl></footer>"


def table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    title: str = "",
    marked: Collection[int] = (),
) -> str:
    """Return records as an HTML table; a table of more than `LONG` lines is folded under its title.

    Args:
        rows: A record for each line.
        columns: The columns, each a key of the records with its title and format.
        title: A line above the table.
        marked: The numbers of the highlighted rows, from 0.
    """
    kinds = [_kind([row.get(column.key) for row in rows]) for column in columns]
    head = "".join(
        f"<th{kind}>{escape(column.title)}</th>"
        for column, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        f"<tr{_MARKED if number in marked else ''}>"
        + "".join(
            f"<td{kind}>{escape(column.show(row.get(column.key)))}</td>"
            for column, kind in zip(columns, kinds, strict=True)
        )
        + "</tr>\n"
        for number, row in enumerate(rows)
    )
    whole = (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )
    if len(rows) > LONG:
        return f"<details><summary>{escape(title)}</summary>{whole}</details>"
    return f"<p>{escape(title)}</p>{whole}" if title else whole


def _kind(values: Sequence[Any]) -> str:
    """Return the HTML class of a column: `number` aligns right, `long` wraps at a least width."""
    if all(isinstance(value, int | float | None) for value in values):
        return ' class="number"'
    return ' class="long"' if max(len(str(value)) for value in values) > 40 else ""


def write_page(path: Path, title: str, parts: Sequence[str]) -> Path:
    """Write a page. After a crash the file is either the old one or the whole new one.

    Args:
        path: The file of the page.
        title: The heading of the page.
        parts: The HTML from the functions above.

    Returns:
        The path.
    """
    write_whole(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><link rel="icon" '
        f'href="data:,"><title>{escape(title)}</title>'
        f"<style>{_CSS}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n",
    )
    return path


def part(title: str, texts: Sequence[str], drawn: Sequence[Picture | str]) -> list[str]:
    """Return a part of the page: a heading, paragraphs, and pictures side by side.

    Args:
        title: The heading.
        texts: The texts of the paragraphs.
        drawn: The pictures; in place of a picture that cannot be drawn, its title and the reason.
    """
    pictures = [figure(one, 3) for one in drawn if isinstance(one, Picture)]
    missing = [paragraph(f"Left out: {one}.", "quiet") for one in drawn if isinstance(one, str)]
    side_by_side = [columns(pictures)] if pictures else []
    return [heading(title), *map(paragraph, texts), *side_by_side, *missing]
