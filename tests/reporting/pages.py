"""Reads a page as a person's browser would: its parts without one, and what headless Chromium makes
of it.
"""

import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--virtual-time-budget=20000",
)
LISTEN = """<script>window.faults = [];
    addEventListener(
        'error', e => faults.push(e.message || e.target.src || e.target.href), true)</script>"""
FRAME = '<iframe style="border: 0" width="{width}" height="2000" srcdoc="{page}"></iframe>'
REPORT = """<script>addEventListener('load', () => {
    const columns = (w, e) => w.getComputedStyle(e).gridTemplateColumns.split(' ').length;
    const found = Array.from(frames).map(w => ({
        images: [...w.document.images].map(
            i => [i.alt, i.complete && i.naturalWidth ? i.width : 0]),
        faults: w.faults,
        window: w.innerWidth, wide: w.document.documentElement.scrollWidth,
        asked: w.performance.getEntriesByType('resource').map(e => e.name),
        boxes: [...w.document.querySelectorAll('.scroll')].map(
            e => [e.scrollWidth > e.clientWidth, w.getComputedStyle(e).backgroundAttachment]),
        columns: Math.max(
            0, ...[...w.document.querySelectorAll('.columns')].map(e => columns(w, e))),
        headings: [...w.document.querySelectorAll('h2')].map(h => h.textContent)}));
    document.documentElement.setAttribute('data-found', JSON.stringify(found))})</script>"""
SVG_NAMES = {
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1999/xlink",
    "http://www.w3.org/XML/1998/namespace",
}


class Parts(HTMLParser):
    """The parts of a page: images, other things that it would load, its text."""

    def __init__(self, text):
        super().__init__()
        self.images = []
        self.loaded = []
        self.said = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "img":
            self.images.append(given)
        elif tag in ("script", "iframe", "object", "embed", "video", "audio", "source") or (
            tag == "link" and given["rel"] != "icon"
        ):
            self.loaded.append(tag)
        self.loaded += [
            given[name]
            for name in ("src", "href", "srcset")
            if given.get(name) and not given[name].startswith("data:")
        ]

    def handle_data(self, data):
        self.said.append(data)


def parts(path):
    """Return the parts of a page; fail where it would load anything from elsewhere, or where an
    image has no text.
    """
    text = path.read_text()
    found = Parts(text)
    assert found.loaded == [] and "url(" not in text and "@import" not in text
    pictures = [
        base64.b64decode(image["src"].partition("base64,")[2]).decode() for image in found.images
    ]
    for document in (text, *pictures):
        assert set(re.findall(r"https?://[^\s\"'<>)]+", document)) <= SVG_NAMES
    assert all(picture.startswith("<svg") for picture in pictures)
    assert all(len(image["alt"]) > 30 for image in found.images)
    return found


def opened(path, folder, *widths):
    """Return what Chromium finds in a page, for each width of a window; skip where there is none.

    That is: images with the widths they are shown in (0: did not load), faults, requests, headings,
    how wide what is in the window is, the most columns, of each box whether it scrolls and what its
    shadows are attached to. Frames stand for windows, which are no narrower than 500 pixels.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    page = html.escape(path.read_text().replace("<head>", f"<head>{LISTEN}", 1))
    shown = "".join(FRAME.format(width=width, page=page) for width in widths)
    copy = folder / f"listened_{path.name}"
    copy.write_text(f"<!doctype html><html><body>{shown}{REPORT}</body></html>")
    ran = subprocess.run(
        [
            chromium,
            *FLAGS,
            f"--user-data-dir={folder / 'browser'}",
            "--window-size=2000,2000",
            "--dump-dom",
            f"file://{copy}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'data-found="([^"]*)"', ran.stdout)
    assert found, ran.stderr
    return json.loads(html.unescape(found[1]))
