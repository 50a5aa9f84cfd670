"""README.md taken apart: its commands, its script, and the names in it."""

import re
import shlex
from dataclasses import dataclass
from itertools import product
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TEXT = (REPOSITORY / "README.md").read_text()


@dataclass(frozen=True)
class Command:
    """One command of recapp: `python -m recapp.<name> <arguments>`, whatever starts it."""

    name: str
    arguments: tuple[str, ...]

    @property
    def overrides(self):
        """The settings of each of its jobs: more than one where it sweeps."""
        said = [argument for argument in self.arguments if not argument.startswith("-")]
        if "-m" not in self.arguments:
            return [said]
        swept = [argument.partition("=") for argument in said]
        return [
            list(job)
            for job in product(
                *([f"{name}={value}" for value in values.split(",")] for name, _, values in swept)
            )
        ]


def fenced(language, text=TEXT):
    """The blocks of a language, as they stand there."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def indented(text=TEXT):
    """The lines of indented blocks."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line.strip() for line in outside.splitlines() if line.startswith("    ")]


def commands(lines):
    """Those of the lines that are commands of recapp; `a && b` is two lines."""
    parts = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    found = [
        (part, i)
        for part in parts
        for i, word in enumerate(part)
        if word == "-m" and part[i + 1].startswith("recapp.")
    ]
    return [Command(part[i + 1].removeprefix("recapp."), tuple(part[i + 2 :])) for part, i in found]


def quoted(text=TEXT):
    """What stands between backticks in running text and tables."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def table(first_heading, text=TEXT):
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
