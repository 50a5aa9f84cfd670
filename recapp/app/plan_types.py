"""`recapp.plan types`: the use of each sharding type."""

from shutil import get_terminal_size
from textwrap import fill

from recapp import console
from recapp.app.job import Job
from recapp.recipe.commands import OnPaper
from recapp.recipe.own_sharding_types import register_own_types
from recapp.sharding.sharding_types import SHARDING_TYPES


def types(recipe: OnPaper, job: Job) -> None:
    """Print the use of each sharding type, including the user's own."""
    register_own_types(recipe)
    rows = [
        {
            "type": record.name,
            "description": record.description,
            "best_for": record.best_for,
            "pros": record.pros,
            "cons": record.cons,
        }
        for record in SHARDING_TYPES.values()
    ]
    if recipe.format == "json":
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
