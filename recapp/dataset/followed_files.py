"""Files that appear while training runs (`dataset.follow=true`): which of them are whole, and which
one trains next.

    look 1       part-1.parquet             whole: trains next
                 part-2.csv                 2 MB
    look 2       part-1.parquet             has trained
                 part-2.csv                 3 MB, so somebody writes it
                 part-3.parquet             has no footer yet
    look 3       part-2.csv                 3 MB, as before: trains next
                 part-3.parquet             has no footer yet
                 part-0.parquet             whole: its name comes first, so it trains before part-2

A file is whole if its format finds it so, and if nobody has changed it for the seconds between two
looks. Names that begin with `_` or `.`, and suffixes of no format, are those of files that are
being written, as everywhere. Files that have trained are known by their names below the place,
which a checkpoint keeps. So a file trains once, whenever it comes, and whatever becomes of it
later; and the whole place may move.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from recapp.console import note_once
from recapp.dataset.data_file import (
    DataFile,
    Fingerprint,
    ResumeData,
    UnreadableFileError,
    difference,
    facts_of,
    file_facts,
    resumed_files,
)
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.files import NoFilesError, file_names, given_paths, literal
from recapp.dataset.formats import formats_of
from recapp.dataset.schema import Schema
from recapp.dataset.source import arrow_chunks, open_raw, open_source
from recapp.dataset.storage import Stamp, located, stamp_of
from recapp.errors import CheckpointError, DataError
from recapp.settings.uris import is_uri


@dataclass
class _Seen:
    """What was seen of a file that has not trained.

    Args:
        stamp: Its stamp.
        since: When the file was first seen with this stamp, in seconds.
        whole: Whether it is whole and has rows; None if that is not known yet.
        time: The time of its first rows; None if that is not known yet.
    """

    stamp: Stamp
    since: float
    whole: bool | None = None
    time: Any = None


LONGEST_NAP = 1.0  # seconds, after which ranks that wait meet, so that a signal ends all

# What this process has seen of files, by path: so a run that begins looks at each but once.
_seen: dict[str, _Seen] = {}


class FollowedFiles:
    """The files of a place that grows.

    Args:
        settings: The settings of the data set.

    Attributes:
        trained: What is known of each file that has trained, by its name, in that order. Plain
            values: `bytes` and `changed`, its stamp before it trained; `rows`; and whatever else
            the owner knows of it.
    """

    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings
        self.trained: dict[str, dict[str, Any]] = {}
        self._formats = formats_of(settings.files)

    def whole(self) -> dict[str, str]:
        """Return all files that are whole and have not trained, in the order in which they train:
        their paths by their names.

        Raises:
            DataError: The place cannot be listed, or holds files that are no data set.
        """
        return dict(self._in_order(self.paths()))

    def next(self) -> tuple[str, str] | None:
        """Return name and path of the file that trains next; None if no file is whole. A line says
        which file has changed since it trained.

        Raises:
            DataError: As for `whole`.
        """
        paths = self.paths()
        self._note_changes(paths)
        return next(iter(self._in_order(paths)), None)

    def paths(self) -> dict[str, str]:
        """Return the path of each file by its name below the followed place.

        Raises:
            DataError: The place cannot be listed, or two files have one name.
        """
        paths: dict[str, str] = {}
        for given in given_paths(self.settings.path):
            top = given if located(given).is_dir() else literal(given)[0]
            with suppress(NoFilesError):  # none yet
                for path in file_names(given, formats=self._formats):
                    name = os.path.relpath(path, top)
                    if paths.setdefault(name, path) != path:
                        raise DataError(
                            f"dataset.path: {paths[name]} and {path} have one name below the "
                            "places that are followed, by which a run knows what has trained: "
                            "follow a directory above both"
                        )
        return paths

    def resume(
        self,
        position: Mapping[str, Any],
        schema: Schema,
        checkpoint: str,
        resume_data: ResumeData = "check",
    ) -> tuple[dict[str, dict[str, Any]], tuple[str, str] | None]:
        """Return the files that have trained before a checkpoint; and name and path of the one in
        which it was saved, None if it was saved between two.

        A checkpoint of a run that follows no files has trained on all that were there.

        Args:
            position: The position in the data that the checkpoint has.
            schema: The columns of the files.
            checkpoint: The checkpoint, for messages.
            resume_data: Whether a file that has changed in the middle is refused.

        Raises:
            CheckpointError: The file in the middle has changed, or is gone; or which files have
                trained is not known.
        """
        paths = self.paths()
        batches = position["batches"]
        if "trained" in position:
            if (name := position["file"]) is None:
                return position["trained"], None
            if name not in paths:
                raise CheckpointError(
                    f"{checkpoint} was saved after {batches:,} batches of {name}, which is gone: "
                    "bring it back, or go on from a checkpoint that was saved behind a file"
                )
            facts = file_facts(open_source([paths[name]], schema).files)
            resumed_files(
                position["files"],
                facts,
                batches=max(batches, 1),
                checkpoint=checkpoint,
                resume_data=resume_data,
            )
            return position["trained"], (name, paths[name])
        before = Fingerprint.from_plain(position["files"], checkpoint)
        names = list(paths)[: before.count]
        opened = open_source([paths[name] for name in names], schema).files
        other = difference(before, file_facts(opened))
        if batches or other:
            raise CheckpointError(
                f"dataset.follow=true: {checkpoint} was saved "
                f"{f'after {batches:,} batches of' if batches else 'behind'} an epoch of several "
                f"files{f', of which {other}' if other else ''}: go on from a checkpoint of an "
                "epoch's end, with its files where they were"
            )
        return {name: known_of(file) for name, file in zip(names, opened, strict=True)}, None

    def _in_order(self, paths: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        whole = (
            one for one in paths.items() if one[0] not in self.trained and self._is_whole(one[1])
        )
        if self.settings.follow_time is None:
            return whole
        return iter(sorted(whole, key=lambda one: self._time_of(one[1])))

    def _is_whole(self, path: str) -> bool:
        """Return whether a file is whole, and has rows."""
        try:
            format = self._formats.of(path)
            stamp = stamp_of(path)
            seen = _seen.get(path, _Seen(stamp, time.monotonic()))
            if seen.stamp != stamp:
                seen = _Seen(stamp, time.monotonic())
            _seen[path] = seen
            if seen.whole is None and stamp.size and self._rests(path, seen):
                seen.whole = any(facts_of(format, path, stamp).rows)
        except UnreadableFileError as error:
            note_once(f"{path}: is not a whole file yet ({error}): it trains when it is")
            seen.whole = False  # with this stamp
        except OSError:  # gone in the meantime, or not there yet
            return False
        return bool(seen.whole)

    def _rests(self, path: str, seen: _Seen) -> bool:
        """Return whether nobody has changed a file for the seconds between two looks."""
        seconds = self.settings.follow_seconds
        age = 0.0 if is_uri(path) else time.time() - seen.stamp.changed / 1e9
        return max(age, time.monotonic() - seen.since) >= seconds

    def _time_of(self, path: str) -> Any:
        """Return the least time in the first rows of a file.

        Raises:
            DataError: The file has no such column, or these rows have no time.
        """
        column = str(self.settings.follow_time)
        seen = _seen[path]
        if seen.time is None:
            source = open_raw([path], self.settings.files).only([column])
            if not source.files[0].columns:
                raise DataError(f"{path}: has no column {column} (dataset.follow_time)")
            _, _, chunk = next(arrow_chunks(source))
            seen.time = pc.min(chunk.column(column)).as_py()
            if seen.time is None:
                raise DataError(f"{path}: its first rows have no {column} (dataset.follow_time)")
        return seen.time

    def _note_changes(self, paths: Mapping[str, str]) -> None:
        for name, known in self.trained.items():
            path = paths.get(name)
            with suppress(OSError):
                # of a file elsewhere that takes a trip
                if (
                    path
                    and not is_uri(path)
                    and stamp_of(path) != (known["bytes"], known["changed"])
                ):
                    note_once(f"{path}: has changed since it trained; no file trains twice")

    def nap(self, since: float, *, noted: bool = True) -> bool:
        """Wait a moment for files, with a line that says so once.

        Args:
            since: The time from which on no file has come.
            noted: Whether this process prints the line.

        Returns:
            Whether that is as long as `dataset.follow_idle`; then do not wait.
        """
        settings = self.settings
        idle = settings.follow_idle
        if idle is not None and time.monotonic() - since >= idle:
            return True
        if noted:
            place = ", ".join(given_paths(settings.path))
            end = "" if idle is None else f", or {idle:g} s without one (dataset.follow_idle)"
            note_once(
                f"dataset.follow=true: waiting for files in {place}; Ctrl-C ends training{end}"
            )
        time.sleep(min(settings.follow_seconds, LONGEST_NAP))
        return False


def known_of(file: DataFile) -> dict[str, Any]:
    """Return what is known of a file that has trained: its stamp before it trained, and its
    rows.
    """
    bytes, changed = file.stamp
    return {"bytes": bytes, "changed": changed, "rows": file.starts[-1]}


def first_files(settings: DataSettings, *, noted: bool = True) -> list[str]:
    """Return the paths of the files that are whole; wait until there is one.

    Args:
        settings: The settings of the data set.
        noted: Whether this process says in a line that it waits.

    Raises:
        DataError: The place cannot be listed, or holds files that are no data set; or no file has
            come for `dataset.follow_idle` seconds.
    """
    files = FollowedFiles(settings)
    since = time.monotonic()
    while not (paths := files.whole()):
        if files.nap(since, noted=noted):
            raise DataError(
                f"dataset.path={given_paths(settings.path)[0]}: has no file to train on, for "
                f"dataset.follow_idle={settings.follow_idle:g} s"
            )
    return list(paths.values())
