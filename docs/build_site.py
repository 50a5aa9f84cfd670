"""Build the pages as a site: `pip install ".[docs]"`, then `python docs/build_site.py`.

    *.md, docs/*.md, docs/pictures   as they are     -> build/pages
    docs/*.ipynb                     by nbconvert    -> build/pages/docs/*.md
    the table of names in python.md  by mkdocstrings -> build/pages/docs/reference.md
    build/pages                      by mkdocs       -> build/site/index.html

Pages keep their places, so a link leads to the same page on a code host and in the site. A link
that leads nowhere, a page without a place in the order, or a docstring whose arguments are not
those of its function ends the build with code 1.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
CONFIG = ROOT / "docs" / "mkdocs.yml"
COPIED = ("*.md", "LICENSE", "data/*.md", "docs/*.md", "docs/site.css", "docs/pictures/*.svg")
NAMES = re.compile(r"^\| (`[^|]*`) +\| ([^|]*?) +\|$", re.MULTILINE)  # a row of the table of names


def stage() -> None:
    """Write all pages into an empty folder, at the paths that they have in the repository."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            _write(path.relative_to(ROOT), path.read_text())
    for path in ROOT.glob("docs/*.ipynb"):
        text, found = MarkdownExporter().from_filename(str(path))
        page = path.relative_to(ROOT).with_suffix(".md")
        _write(page, text)
        for name, picture in found["outputs"].items():
            (PAGES / page).with_name(name).write_bytes(picture)
    _write(Path("docs/reference.md"), "\n".join(reference()))


def reference() -> Iterator[str]:
    """Yield the lines of the page of all public names, in the order of the page on Python."""
    text = (ROOT / "docs" / "python.md").read_text()
    table = text[text.index("| names ") :].partition("\n\n")[0]
    yield "# All public names"
    yield ""
    yield "Each is imported from `recapp`; [Python](python.md) shows them at work."
    for names, words in NAMES.findall(table):
        yield f"\n## {words[0].upper()}{words[1:]}\n"
        yield from (f"::: recapp.{name}" for name in re.findall(r"`(\w+)`", names))


def _write(page: Path, text: str) -> None:
    """Write a page; where it names a notebook, the site has a page of it."""
    (PAGES / page).parent.mkdir(parents=True, exist_ok=True)
    (PAGES / page).write_text(text.replace(".ipynb)", ".md)"))


if __name__ == "__main__":
    stage()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG)]
    built = subprocess.run(command)
    if built.returncode == 0:
        print(ROOT / "build" / "site" / "index.html")
    sys.exit(built.returncode)
