"""`python -m recapp.report path=DIR`: the report of a sweep, a training run or an evaluation, made
from what its directory holds.

    DIR -> DIR/report.html, DIR/*.png

A sweep of `recapp.train` ends with it; this makes it anew, or for a run of its own. Nothing is
measured, no rank is started, and the page needs neither network nor script.
"""

if __name__ == "__main__":
    from recapp.processes.stopping import end_on_signals

    end_on_signals()  # what follows takes its time to import

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recapp import console
from recapp.app.command import Job, run
from recapp.app.compose import (
    choices,
    compose,
    overrides_that_choose,
    to_plain,
    with_absolute_paths,
)
from recapp.errors import ConfigError
from recapp.processes.rank_process import leave

COLUMNS = (console.Column("what", "what"), console.Column("file", "file"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and answers its exit code.

    Args:
        argv: The arguments, by default those of the process.
    """

    def task(config: dict[str, Any], job: Job) -> None:
        from recapp.reporting.sweep_report import write_report

        try:
            rows = write_report(Path(str(config["path"])).expanduser(), _defaults)
        except OSError as error:
            raise ConfigError(
                f"path={config['path']}: {error.filename} cannot be written ({error.strerror})"
            ) from error
        if config["format"] == "text":
            rows = [{**row, "file": _file_or_why(row)} for row in rows]
        console.emit(rows, config["format"], COLUMNS)

    return run("report", task, writes=False, argv=argv)


def _file_or_why(row: Mapping[str, Any]) -> str:
    """One column for both: a column of reasons, mostly empty, would leave too little room for names
    of files.
    """
    return console.short_path(row["file"]) if row["file"] else f"left out: {row['left_out']}"


def _defaults(chosen: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a training run that is told nothing but some options, as a run leaves
    them.
    """
    config = compose("train", overrides_that_choose(chosen, "train"))
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    settings = to_plain(own, whole=False)
    return with_absolute_paths(settings) | {"choices": choices(config.hydra)}


if __name__ == "__main__":
    leave(main())
