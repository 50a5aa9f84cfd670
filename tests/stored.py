"""Trained runs, artefacts and programs that several tests read and none changes.

    stored.small_run("+plan=mixed") -> SESSION/stored/<digest of how it is made>/checkpoints/...

Whichever worker of pytest asks first makes a thing, under a lock; it is read-only then, and every
file has to be as it was when the session ends. A test that damages one takes a `copy`.
"""

import fcntl
import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

from jobs import small

from recapp.inference.build_cpp import PROGRAM, build

WITHOUT_ARROW = f"{PROGRAM}_without_arrow"


class Stored:
    """The store of a session: directories that are made once, whoever of its workers needs them.

    Args:
        directory: The same in all workers of the session.
        jobs: Trains the runs.
    """

    def __init__(self, directory, jobs):
        self.directory = directory
        self.jobs = jobs
        directory.mkdir(exist_ok=True)

    def made(self, make, *settings):
        """The directory that `make(directory, *settings)` has filled.

        Args:
            make: A function of a module, which has no other input than these settings.
            settings: Plain values.
        """
        text = json.dumps([make.__module__, make.__qualname__, *settings])
        folder = self.directory / sha256(text.encode()).hexdigest()[:16]
        made = Path(f"{folder}.files.json")
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                folder.mkdir()
                make(folder, *settings)
                for path in files_of(folder):
                    os.chmod(folder / path, 0o444 | os.stat(folder / path).st_mode & 0o111)
                made.write_text(json.dumps(files_of(folder)))
        return folder

    def run(self, *overrides, world=2):
        """The directory of a training on the pool of ranks."""
        return self.made(self._train, world, overrides)

    def _train(self, folder, world, overrides):
        self.jobs.train(folder, *overrides, world=world)

    def small_run(self, *overrides, world=2, **logs):
        """That of a training on the logs of `small(**logs)`, which lie in it."""
        return self.made(self._train_small, world, logs, overrides)

    def _train_small(self, folder, world, logs, overrides):
        self._train(folder, world, [*small(folder / "logs", **logs), *overrides])

    def program(self, arrow=True):
        """The C++ program that scores rows."""
        return self.made(_build) / (PROGRAM if arrow else WITHOUT_ARROW)

    def check(self):
        """Fail where a test has changed what it should have copied."""
        for made in self.directory.glob("*.files.json"):
            folder = Path(str(made).removesuffix(".files.json"))
            now = files_of(folder)
            changed = [
                str(folder / path)
                for path, (size, time) in json.loads(made.read_text()).items()
                if now.get(path) != [size, time]
            ]
            assert not changed, f"tests have changed stored files: {changed}"


def copy(stored, folder):
    """A copy of a stored directory, which may be changed."""
    return Path(shutil.copytree(stored, folder, symlinks=True, copy_function=shutil.copyfile))


def _build(folder):
    build(folder, arrow=False).rename(folder / WITHOUT_ARROW)
    build(folder)


def files_of(folder):
    """Size and time of each file in a directory."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            found[str(path.relative_to(folder))] = [status.st_size, status.st_mtime_ns]
    return found
