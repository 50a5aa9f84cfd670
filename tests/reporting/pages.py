"""Reads a page as a person's browser would: its parts without one, and what headless Chromium makes of it."""

import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-extensions", "--virtual-time-budget=20000")
LISTEN = """<script>window.faults = [];
    addEventListener('error', e => faults.push(e.message || e.target.src || e.target.href), true)</script>"""
TELL = """<script>addEventListener('load', () => document.documentElement.setAttribute('data-found', JSON.stringify({
    images: [...document.images].map(i => [i.alt, i.complete ? i.naturalWidth : 0]), faults: window.faults,
    wide: document.documentElement.scrollWidth, asked: performance.getEntriesByType('resource').map(e => e.name),
    headings: [...document.querySelectorAll('h2')].map(h => h.textContent)})))</script>"""
SVG_NAMES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink", "http://www.w3.org/XML/1998/namespace"}


class Parts(HTMLParser):
    """What a page is made of: images, other things it would load, its text."""

    def __init__(self, text):
        super().__init__()
        self.images, self.loaded, self.said = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "img":
            self.images.append(given)
        elif tag in ("script", "iframe", "object", "embed", "video", "audio", "source") or (tag == "link" and given["rel"] != "icon"):
            self.loaded.append(tag)
        self.loaded += [given[name] for name in ("src", "href", "srcset") if given.get(name) and not given[name].startswith("data:")]

    def handle_data(self, data):
        self.said.append(data)


def parts(path):
    """Of a page; fails where the page would ask for anything from elsewhere, or an image says nothing in words."""
    text = path.read_text()
    found = Parts(text)
    assert found.loaded == [] and "url(" not in text and "@import" not in text
    pictures = [base64.b64decode(image["src"].partition("base64,")[2]).decode() for image in found.images]
    for document in (text, *pictures):
        assert set(re.findall(r"https?://[^\s\"'<>)]+", document)) <= SVG_NAMES
    assert all(picture.startswith("<svg") for picture in pictures)
    assert all(len(image["alt"]) > 30 for image in found.images)
    return found


def opened(path, folder):
    """What Chromium finds in a page: images with their widths (0: did not load), faults, requests, headings; or a skip."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH (Debian's package of that name)")
    copy = folder / f"listened_{path.name}"
    copy.write_text(path.read_text().replace("<head>", f"<head>{LISTEN}", 1).replace("</body>", f"{TELL}</body>", 1))
    ran = subprocess.run([chromium, *FLAGS, f"--user-data-dir={folder / 'browser'}", "--window-size=1280,2000", "--dump-dom",
                          f"file://{copy}"], capture_output=True, text=True, timeout=120)
    told = re.search(r'data-found="([^"]*)"', ran.stdout)
    assert told, ran.stderr
    return json.loads(html.unescape(told[1]))
