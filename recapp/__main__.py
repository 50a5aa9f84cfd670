"""`recapp COMMAND ...` runs `python -m recapp.COMMAND ...`; `recapp` alone lists the commands.

recapp train +plan=mixed        python -m recapp.train +plan=mixed
recapp                          python -m recapp
recapp --version                prints the versions of recapp and torch
"""

import sys
from collections.abc import Sequence
from runpy import run_module

from recapp.console import stop_printing
from recapp.errors import suggest

COMMANDS = {
    "data": "inspect raw logs, and convert them to typed Parquet",
    "train": "train a model on click logs, under any plan; -m for a sweep",
    "eval": "measure a checkpoint on validation or test rows, on any ranks",
    "predict": "score raw rows by a checkpoint or an artefact, on any ranks",
    "export": "make an artefact of a checkpoint, served without the trainer",
    "plan": "explain, draw, export and scale sharding plans on paper",
    "report": "draw the results of a run or a sweep as one page",
    "serve": "answer requests for scores over HTTP, with a trained model",
    "bench": "measure recapp on this machine, beside other systems",
}
VERSION = "--version"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with the rest of the command line.

    Args:
        arguments: The command and its arguments; None takes those of the process.

    Returns:
        The exit code, unless the command ends the process with its own.
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if name in ("--help", "-h"):
            print(_list(), flush=True)
            return 0
    except BrokenPipeError:  # `recapp | head` has read enough
        stop_printing()
        return 1
    if name == VERSION:
        from recapp.cli.command import versions

        print(versions())
        return 0
    if name not in COMMANDS:
        known = [*COMMANDS, VERSION, "--help"]
        print(f"error: recapp {name}: no such command; {suggest(name, known)}", file=sys.stderr)
        return 1
    sys.argv = [f"recapp {name}", *rest]
    run_module(f"recapp.{name}", run_name="__main__", alter_sys=True)
    return 0


def _list() -> str:
    lines = [f"    {name:9} {words}" for name, words in COMMANDS.items()]
    return "\n".join(
        [
            "recapp COMMAND key=value ...   (or python -m recapp.COMMAND key=value ...)",
            "",
            *lines,
            "",
            "recapp COMMAND --help lists a command's settings.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
