"""`start`: measure the time that a user waits for a whole command in a new process, up to the first
step and up to the prompt.

    round 1   recapp: train, eval, plan explain, ...   baseline: train, eval, plan explain, ...
    round 2   baseline: ...                            recapp: ...

The baseline is another recapp: the package of another Python, or a checkout. Each of the two trains
and evaluates on rows of its own. An untimed round before the first one generates these rows and
compiles kernels. The first step ends when its line is printed (`step 1/1, ...`); every version of
recapp prints this line.

The parts of a start come from the `metrics.json` of a run: the seconds from the command to the
start of its ranks, to the start of training and to the end of the first step. An older baseline may
not have them.

For `cold`, the system drops the page cache before each command, which only root may request.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recapp.benchmarks.timing import Measured, ratio
from recapp.console import note, progress
from recapp.errors import ConfigError, LaunchError
from recapp.reporting.phases import quartiles

from .lab import Lab, Settings

CACHES = ("warm", "cold")
OWN = "recapp"
BASELINE = "baseline"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
PAGES_AND_ENTRIES = "3"  # drops pages, and entries of directories (proc(5))
ROWS = 20_000  # of generated logs
STARTED = "step 1/1, "
LAST_LINES = 3  # of a command that failed
FIRST_STEP = "train, to its first step"
PROMPT = "train, to the prompt"
IMPORTS = "import recapp.train"
WAITS = (FIRST_STEP, PROMPT, "eval", "plan explain", "train --help", "--help", IMPORTS)
"""The measured waits, in the order of the table."""
PARTS = {
    "imports of the command": ("", "imports"),
    "settings and checks, until ranks are there": ("imports", "seconds_to_ranks"),
    "data, model, plan": ("seconds_to_ranks", "seconds_to_training"),
    "first step": ("seconds_to_training", "seconds_to_first_step"),
    "validation, checkpoint, end": ("seconds_to_first_step", "prompt"),
}
"""The parts of `train`, each with the moments of its begin and end in `metrics.json`; "" is the
start of the command.
"""
NOT_INHERITED = ("PYTHONPATH", "RECAPP_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "HYDRA_")
"""The beginnings of environment variables that a measured command does not inherit."""


@dataclass(frozen=True)
class Recapp:
    """A measured version of recapp.

    Args:
        name: `recapp` or `baseline`.
        python: The interpreter that has its dependencies.
        checkout: The directory that contains its package; None takes the installed package.
        folder: The working directory of its commands, with its own rows, checkpoint and runs.
    """

    name: str
    python: str
    checkout: Path | None
    folder: Path

    def run(self, arguments: Sequence[str], begun: str = "") -> tuple[float, float | None]:
        """Run a command of Python in a fresh process.

        Args:
            arguments: The arguments of Python.
            begun: The beginning of a line whose time is measured too; empty for none.

        Returns:
            The seconds until the command ended, and until it printed the line; None where it did
            not print the line.

        Raises:
            LaunchError: The command failed.
        """
        seen = None
        lines = []
        began = time.perf_counter()
        with subprocess.Popen(
            [self.python, *arguments],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if begun and seen is None and line.startswith(begun):
                    seen = time.perf_counter() - began
                lines.append(line)
        seconds = time.perf_counter() - began
        if process.returncode:
            said = " ".join("".join(lines[-LAST_LINES:]).split())
            raise LaunchError(f"{self.name}: python {' '.join(arguments)} failed: {said}")
        return seconds, seen

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
        return kept if self.checkout is None else {**kept, "PYTHONPATH": str(self.checkout)}


@dataclass
class Waits:
    """The commands of a recapp, and the milliseconds of each in each round.

    Args:
        recapp: The measured version of recapp.
        measured: The times of each command, and of each part of `train` that the run tells, by
            cache.
    """

    recapp: Recapp
    measured: dict[str, Measured] = field(default_factory=dict)

    def one_round(self, cache: str, prepare: Callable[[], None]) -> None:
        """Run each command once.

        Args:
            cache: The name of the state of the page cache.
            prepare: The function that is called before each command, untimed.
        """
        seconds: dict[str, float] = {}
        for what, arguments in COMMANDS.items():
            prepare()
            seconds[what], seen = self.recapp.run(arguments, STARTED if what == PROMPT else "")
            if what == PROMPT:
                if seen is None:
                    raise LaunchError(f"{self.recapp.name}: train printed no line {STARTED}")
                seconds[FIRST_STEP] = seen
        said = json.loads((self.recapp.folder / "run" / "metrics.json").read_text())
        moments = {"": 0.0, **said, "imports": seconds[IMPORTS], "prompt": seconds[PROMPT]}
        for part, (first, last) in PARTS.items():
            if moments.get(first) is not None and moments.get(last) is not None:
                seconds[part] = moments[last] - moments[first]
        times = {what: [s * 1e3] for what, s in seconds.items()}
        self.measured.setdefault(cache, Measured()).add(times)


COMMANDS = {
    PROMPT: [
        "-m",
        "recapp.train",
        "+plan=mixed",
        "trainer.max_steps=1",
        "trainer.log_every_n_steps=1",
        "dataset.path=logs",
        f"dataset.generate.rows={ROWS}",
        "hydra.run.dir=run",
    ],
    "eval": ["-m", "recapp.eval", "ckpt_path=run/checkpoints/last.ckpt", "hydra.run.dir=measured"],
    "plan explain": ["-m", "recapp.plan", "explain"],
    "train --help": ["-m", "recapp.train", "--help"],
    "--help": ["-m", "recapp", "--help"],
    IMPORTS: ["-c", IMPORTS],
}


def baseline_of(path: str | None, folder: Path) -> Recapp | None:
    """Return the version of recapp that `--baseline` names.

    Args:
        path: The Python of an environment with recapp, or a checkout; None for no baseline.
        folder: The working directory of its commands.

    Raises:
        ConfigError: There is no such Python or checkout, or it has no recapp.
    """
    if path is None:
        return None
    fix = "name the Python of an environment that has recapp, or the directory of a checkout"
    checkout = Path(path) if os.path.isdir(path) else None
    if checkout is None and not (os.path.isfile(path) and os.access(path, os.X_OK)):
        raise ConfigError(f"--baseline={path}: there is no such program or directory; {fix}")
    if checkout is not None and not (checkout / "recapp" / "train.py").is_file():
        raise ConfigError(f"--baseline={path}: holds no recapp/train.py; {fix}")
    found = Recapp(BASELINE, sys.executable if checkout else path, checkout, folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found.run(["-c", "import recapp.train"])
    except (LaunchError, OSError) as error:
        raise ConfigError(f"--baseline={path}: has no recapp ({error}); {fix}") from None
    return found


def can_drop_caches() -> bool:
    """Return whether this process may empty the system's page cache."""
    return os.access(DROP_CACHES, os.W_OK)


def drop_caches() -> None:
    """Empty the system's page cache, so that files are read from disk again."""
    os.sync()
    DROP_CACHES.write_text(PAGES_AND_ENTRIES)


def run(lab: Lab) -> None:
    """Time commands in processes of their own, and add the rows of commands and of parts."""
    if "cold" in lab.settings.cache and not can_drop_caches():
        note("--cache cold: only root may empty the page cache: these measurements are left out")
    with progress("start, rounds", lab.settings.rounds) as advance:
        for rows in measure(lab.settings, lab.folder, advance).values():
            lab.rows += rows


def measure(
    settings: Settings, folder: Path, advance: Callable[[int], None]
) -> dict[str, list[dict[str, Any]]]:
    """Run all commands in rounds.

    Args:
        settings: The settings: `rounds`, `cache`, `baseline`.
        folder: The directory of temporary files.
        advance: The function that is called with 1 after each round.

    Returns:
        The rows: `rows` of the commands, `parts` of a start.
    """
    own = Recapp(OWN, sys.executable, Path(__file__).parents[2], folder / OWN)
    own.folder.mkdir()
    baseline = baseline_of(settings.baseline, folder / BASELINE)
    contenders = [Waits(each) for each in (own, baseline) if each is not None]
    caches = {"warm": lambda: None, "cold": drop_caches}
    caches = {c: caches[c] for c in settings.cache if c == "warm" or can_drop_caches()}
    for waits in contenders:  # writes the rows, compiles kernels, reads files
        Waits(waits.recapp).one_round("", lambda: None)
    for number in range(settings.rounds):
        for cache, prepare in caches.items():
            for waits in contenders[:: 1 if number % 2 == 0 else -1]:
                waits.one_round(cache, prepare)
        advance(1)
    mine, theirs, *_ = [*(waits.measured for waits in contenders), {}]
    return {
        "rows": [
            _row("what", what, cache, mine, theirs)
            | ratio(BASELINE, theirs.get(cache), mine.get(cache, Measured()), what)
            for cache in settings.cache
            for what in WAITS
        ],
        "parts": [
            _row("part", part, cache, mine, theirs) for cache in settings.cache for part in PARTS
        ],
    }


ByCache = Mapping[str, Measured]
"""The times of a recapp by cache; empty where there is no baseline."""


def _row(
    kind: str, what: str, cache: str, own: ByCache, baseline: ByCache
) -> dict[str, str | float | None]:
    """Return the row of a command or of a part; its numbers are None where it was not measured.

    Args:
        kind: The key of the name: `what` or `part`.
        what: The name of the command or part.
        cache: The state of the page cache.
        own: The times of recapp.
        baseline: The times of the baseline.
    """
    found: dict[str, str | float | None] = {kind: what, "cache": cache}
    for prefix, measured in (("", own), ("baseline_", baseline)):
        steps = measured[cache].rounds.get(what, []) if cache in measured else []
        seconds = [ms / 1e3 for step in steps for ms in step]
        keys = (f"{prefix}median_s", f"{prefix}q1_s", f"{prefix}q3_s")
        found |= dict(zip(keys, quartiles(seconds) if seconds else (None,) * 3, strict=True))
    return found
