"""`python -m recapp.data VERB PATH`: raw logs before there is a model.

| verb      | does                                                                              |
|-----------|-----------------------------------------------------------------------------------|
| `inspect` | counts what the logs hold, and writes settings of a data set that train on them    |
| `convert` | writes the logs as typed Parquet, split, with vocabularies and a manifest         |

The first argument after the verb may be the path alone: `recapp.data inspect clicks.csv`.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # before the imports below, which take a while

import re
import sys
from collections.abc import Sequence
from importlib import import_module

from recapp.cli.command import run
from recapp.cli.job import Job
from recapp.errors import DataError
from recapp.processes.rank_process import leave
from recapp.processes.stopping import loading
from recapp.run.recipe import VERBS, Data

# the settings of these commands by their names in the group `dataset`
NAMES = {"bad_rows": "bad_rows", "text": "text", "format": "file_format"}
SETTINGS = re.compile(r"\bdataset\.(bad_rows|text|format)\b(?=[.=])")
# the module of each verb, imported on use. It has a function with the verb's name
MODULES = {"inspect": "recapp.logs.inspection", "convert": "recapp.logs.conversion"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: The arguments; None takes those of the process.
    """
    arguments = with_path(list(sys.argv[1:] if argv is None else argv))
    return run("data", answer, verbs=VERBS["data"], writes=False, argv=arguments)


def with_path(arguments: list[str]) -> list[str]:
    """Return a command line whose path, if it stands alone behind the verb, is a setting."""
    verb, *rest = arguments or [""]
    first = rest[0] if rest else ""
    setting = first.partition("=")[0].isidentifier() and "=" in first
    if not first or setting or first.startswith(("-", "+", "~")):
        return arguments
    quoted = first.replace("\\", "\\\\").replace("'", "\\'")
    return [verb, f"path='{quoted}'", *rest[1:]]


def answer(settings: Data, job: Job) -> None:
    """Run the verb of the job."""
    with loading():
        verb = getattr(import_module(MODULES[job.verb]), job.verb)
    try:
        verb(settings)
    except DataError as error:  # readers name the settings of the group `dataset`
        raise DataError(SETTINGS.sub(lambda found: NAMES[found[1]], str(error))) from error


if __name__ == "__main__":
    leave(main)
