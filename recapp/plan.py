"""`python -m recapp.plan VERB`: sharding plans on paper, for any machine, without devices and
without data.

| verb        | prints or writes                                                                   |
|-------------|------------------------------------------------------------------------------------|
| `explain`   | shards and costs of each rank, the next best plans, the bytes that ranks exchange; |
|             | `out=DIR` draws them                                                               |
| `types`     | the use of each sharding type                                                      |
| `export`    | the plan as a file to edit and to train with, or `as=hugectr`                      |
| `calibrate` | timings of this machine, as a hardware file for `topology.hardware=FILE`           |
| `devices`   | the fewest devices that hold the tables for serving, in 32, 16, 8 and 4 bits       |
| `scale`     | step time, memory and bytes of the tables as ranks grow                            |

Without `+plan`, recapp's planner chooses the plan.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

from collections.abc import Sequence
from importlib import import_module
from shutil import get_terminal_size
from textwrap import fill

from recapp import console
from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave
from recapp.processes.stopping import loading
from recapp.run.recipe import OnPaper

# the module of each verb, imported on use. It has a function with the verb's name
VERBS = {
    "explain": "recapp.plan_verbs",
    "types": __name__,
    "export": "recapp.plan_verbs",
    "calibrate": "recapp.calibration",
    "devices": "recapp.plan_verbs",
    "scale": "recapp.plan_verbs",
}

# the verbs that read a setting, of those that not all verbs read
READERS = {
    "out": ("explain",),
    "as": ("explain", "export"),
    "indent": ("export",),
    "path": ("export", "calibrate", "devices"),
    "ranks": ("scale",),
    "plans": ("scale",),
    "weak_batch": ("scale",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    return run("plan", answer, verbs=tuple(VERBS), writes=False, argv=argv)


def answer(recipe: OnPaper, job: Job) -> None:
    """Run the verb of the job.

    Raises:
        ConfigError: The verb does not read a setting.
    """
    for setting in job.overrides:
        verbs = READERS.get(setting.lstrip("+").partition("=")[0], (job.verb,))
        if job.verb not in verbs:
            raise ConfigError(
                f"{setting}: {job.verb} does not read it, only {', '.join(verbs)}: leave it out"
            )
    with loading():
        verb = getattr(import_module(VERBS[job.verb]), job.verb)
    verb(recipe, job)


def types(recipe: OnPaper, job: Job) -> None:
    """Print the use of each sharding type, including the user's own."""
    from recapp.sharding.sharding_types import SHARDING_TYPES  # imports numpy

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
    width = get_terminal_size((80, 24)).columns
    for row in rows:
        print(f"{row['type']}: {row['description']}")
        for heading, key in (("best for", "best_for"), ("+", "pros"), ("-", "cons")):
            print(fill(f"  {heading:10}{row[key]}", width, subsequent_indent=" " * 12))
        print()


if __name__ == "__main__":
    leave(main)
