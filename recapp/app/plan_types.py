"""`recapp.plan types`: what each of the six sharding types is for."""

from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from recapp import console
from recapp.app.command import Job
from recapp.planner.types import TYPES


def types(settings: dict[str, Any], job: Job) -> None:
    """Print what each of the six sharding types is for."""
    rows = [t._asdict() for t in TYPES]
    if settings["format"] == "json":
        console.emit(rows, "json")
        return
    for row in rows:
        print(f"{row['type']}: {row['description']}")
        for heading, key in (("best for", "best_for"), ("+", "pros"), ("-", "cons")):
            print(
                fill(
                    row[key],
                    get_terminal_size((80, 24)).columns,
                    initial_indent=f"  {heading:10}",
                    subsequent_indent=" " * 12,
                )
            )
        print()
