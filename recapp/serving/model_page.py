"""The page at `/`: the model, an example request, and the present latency and throughput.

    Served -> HTML with its style and script inside; the script reads /metrics once a second

The page loads nothing from other sites. Its Content-Security-Policy header lets the browser use
only the style and the script whose hashes it lists.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from starlette.responses import HTMLResponse, Response

from recapp.console import Column, readable
from recapp.serving.served_model import Served

LEFT_OUT = ("path",)  # visitors of the page need not know the path of the model


def page_of(served: Served, version: str) -> Response:
    """Return the page of a model in service.

    Args:
        served: The model.
        version: The version of recapp.
    """
    style = _file("model_page.css")
    script = _file("model_page.js")
    parts = {
        "style": style,
        "script": script,
        "name": escape(readable(served.name)),
        "version": escape(readable(served.scorer.version)),
        "facts": _facts(served.scorer.info),
        "features": _folded(
            "features, all of them needed in every request",
            [
                {"name": name, "datatype": served.datatype(name)}
                for name in served.scorer.schema.inputs
            ],
        ),
        "recapp": escape(version),
    }
    html = _file("model_page.html")
    for name, text in parts.items():
        html = html.replace(f"<!--{name}-->", text).replace(f"/*{name}*/", text)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return HTMLResponse(html, headers=headers)


@cache
def _file(name: str) -> str:
    return resources.files("recapp.serving").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _facts(info: Mapping[str, Any]) -> str:
    """Return the facts of a model as HTML: single facts as a list, tables as tables."""
    single: list[tuple[str, Any]] = []
    tables = []
    for name, value in info.items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            single += [(f"{inner}", item) for inner, item in value.items()]
        elif isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
            tables.append((name, value))
        else:
            single.append((name, value))
    items = "".join(
        f"<div><dt>{escape(readable(name.replace('_', ' ')))}</dt><dd>{_value(value)}</dd></div>"
        for name, value in single
    )
    return f'<dl class="facts">{items}</dl>' + "".join(_folded(*table) for table in tables)


def _value(value: Any) -> str:
    return escape(readable(Column("", "").show(value)))


def _folded(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(readable(key.replace('_', ' ')))}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{_value(row.get(key))}</td>" for key in keys) + "</tr>"
        for row in rows
    )
    title = f"{len(rows)} {escape(readable(name))}"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<details><summary>{title}</summary><div class="scroll">{table}</div></details>'
