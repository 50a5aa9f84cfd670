"""A report as one HTML file: texts, tables and pictures inside it, so that it can be mailed, archived and read without a network.

It needs no script, asks for nothing from elsewhere, and prints. Pictures are SVG, so they stay sharp; each tells in words what it shows.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from recapp.console import Column
from recapp.reporting.drawing import Picture

_CSS = """
:root { color-scheme: light }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: #fff; color: #1a1a1a; font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem }
p { max-width: 46rem; margin: .4rem 0 } .quiet { color: #595959 } .failed { color: #a01212 }
figure { margin: 0 0 1rem } figure img { max-width: 100%; height: auto } figcaption { max-width: 46rem; color: #595959; font-size: .92rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; margin: .5rem 0 }
th, td { text-align: left; padding: .25rem .4rem; border-bottom: 1px solid #d9d9d9; vertical-align: top }
th { background: #fff; border-bottom: 2px solid #595959; vertical-align: bottom; white-space: pre-line }
.number { text-align: right } td { white-space: nowrap } td.long { white-space: normal; min-width: 18rem }
summary { cursor: pointer; margin: .5rem 0 }
@media print { body { max-width: none; padding: 0 } figure, tr { break-inside: avoid } }
"""
LONG = 60                   # a table of more lines is folded


def heading(text: str) -> str:
    """Of a part."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `quiet` and `failed` are kinds."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def figure(picture: Picture) -> str:
    """A picture under its title, with what it says in words and how to read it."""
    data = base64.b64encode(picture.svg.encode()).decode()
    return (f'{heading(picture.title)}<figure id="{escape(picture.name)}"><img src="data:image/svg+xml;base64,{data}" '
            f'alt="{escape(picture.alt)}"><figcaption>{escape(picture.caption)}</figcaption></figure>')


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str) -> str:
    """Records as a table; a long one is folded under its title."""
    kinds = [_kind([row.get(column.key) for row in rows]) for column in columns]
    head = "".join(f"<th{kind}>{escape(column.title)}</th>" for column, kind in zip(columns, kinds, strict=True))
    body = "".join("<tr>" + "".join(f"<td{kind}>{escape(column.show(row.get(column.key)))}</td>"
                                    for column, kind in zip(columns, kinds, strict=True)) + "</tr>\n" for row in rows)
    whole = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'
    return f"<details><summary>{escape(title)}</summary>{whole}</details>" if len(rows) > LONG else f"<p>{escape(title)}</p>{whole}"


def _kind(values: Sequence[Any]) -> str:
    """How a column is set: numbers at the right, sentences not too narrow."""
    if all(isinstance(value, int | float | None) for value in values):
        return ' class="number"'
    return ' class="long"' if max(len(str(value)) for value in values) > 40 else ""


def write_page(path: Path, title: str, parts: Sequence[str]) -> Path:
    """Writes a page: the new file is there whole, or the old one still is.

    Args:
        path: of the page.
        title: its heading.
        parts: HTML from the functions above.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
                          f'content="width=device-width, initial-scale=1"><link rel="icon" href="data:,"><title>{escape(title)}</title>'
                          f"<style>{_CSS}</style></head>\n<body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n")
    os.replace(unfinished, path)
    return path
