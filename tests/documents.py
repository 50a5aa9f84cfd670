"""The documents taken apart: pages, fenced blocks, commands, scripts, and the names in them."""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in (
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
    )
}
TEXT = PAGES["README.md"]
AS_WRITTEN = ("docs/lab_log.md",)  # its entries keep the names of their day
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    text: str

    @property
    def file(self):
        """The path at its top, if there is one: `# mine/model/linear.yaml`."""
        pattern = r"(?:# @package \w+\n)?# ([\w/]+\.(?:py|yaml))$"
        found = re.match(pattern, self.text, re.MULTILINE)
        return found[1] if found else None


@dataclass(frozen=True)
class Command:
    """One command of recapp: `python -m recapp.<name> <arguments>`, whatever starts it."""

    name: str
    arguments: tuple[str, ...]

    @property
    def folders(self):
        """Folders of options that it names."""
        return [b for a, b in pairwise(self.arguments) if a == "--config-dir"]

    @property
    def overrides(self):
        """The settings of each of its jobs: more than one where it sweeps."""
        said = [a for a in self.arguments if not a.startswith("-") and a not in self.folders]
        if "-m" not in self.arguments:
            return [said]
        swept = [argument.partition("=") for argument in said]
        return [
            list(job)
            for job in product(
                *([f"{name}={each}" for each in _swept(values)] for name, _, values in swept)
            )
        ]


def _swept(values):
    """The values of a sweep: commas inside of brackets are those of a list or of a function."""
    return re.findall(r"(?:\[[^]]*\]|\{[^}]*\}|\((?:[^()]|\([^)]*\))*\)|[^,])+", values)


def blocks(language=None, page=None):
    """The fenced blocks of the pages in order: those of a language, of a page, or all."""
    return [
        Block(name, *found)
        for name, text in PAGES.items()
        for found in FENCE.findall(text)
        if page in (None, name) and language in (None, found[0])
    ]


def fenced(language, page=None):
    """The texts of those blocks."""
    return [block.text for block in blocks(language, page)]


def commands(texts):
    """Those lines of the texts that are commands of recapp; `a && b` is two lines."""
    lines = [line for text in texts for line in text.replace("\\\n", " ").splitlines()]
    parts = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    found = [
        (part, i)
        for part in parts
        for i, word in enumerate(part)
        if word == "-m" and part[i + 1].startswith("recapp.")
    ]
    return [Command(part[i + 1].removeprefix("recapp."), tuple(part[i + 2 :])) for part, i in found]


def prose(text):
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def quoted(text=None):
    """What stands between backticks in running text and tables: of a text, or of all pages."""
    texts = (
        [text]
        if text is not None
        else [text for page, text in PAGES.items() if page not in AS_WRITTEN]
    )
    return [
        " ".join(span.split()) for text in texts for span in re.findall(r"`([^`]+)`", prose(text))
    ]


def table(first_heading, text):
    """The cells of the rows of the table whose first column has that heading."""
    lines = iter(text.splitlines())
    for line in lines:
        if re.match(rf"\| {first_heading} +\|", line):
            break
    else:
        raise AssertionError(f"no table with a column {first_heading}")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[1:]


def own_files(folder):
    """The files that stand in the pages as blocks, below a folder."""
    for block in blocks():
        if block.language in ("yaml", "python") and block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
