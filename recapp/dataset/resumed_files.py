"""Choose the files with which an epoch continues after a resume.

current files                  inside of an epoch                       between two epochs
the same                       continue                                 continue
the same, then new files       finish the epoch without the new files   take all files, with a note
other files                    refuse, or take with resume_data=ignore  take all files, with a note
no files in the checkpoint     continue, with a note                    continue, with a note
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from recapp.dataset.fingerprint import FileFacts, Fingerprint, compare
from recapp.errors import CheckpointError, ConfigError

ResumeData = Literal["check", "ignore"]
"""Whether to refuse a resume inside of an epoch if the files differ from the checkpoint's."""


@dataclass(frozen=True)
class ResumedFiles:
    """The files of the epoch in which a checkpoint was saved.

    Args:
        count: The number of first files with which the epoch is finished; None takes all files.
        note: A note for people, or an empty text.
    """

    count: int | None = None
    note: str = ""


def resumed_files(
    stored: Any,
    found: Sequence[FileFacts],
    *,
    batches: int,
    checkpoint: str | Path,
    resume_data: ResumeData = "check",
) -> ResumedFiles:
    """Return the files with which the epoch continues.

    Args:
        stored: The fingerprint of the checkpoint, as plain values; None if it has none.
        found: The facts of the current files.
        batches: The batches of the epoch that were trained before the save.
        checkpoint: The checkpoint, for messages.
        resume_data: `check` refuses different files, `ignore` takes them.

    Raises:
        CheckpointError: The files differ in the middle of an epoch, or the fingerprint is damaged.
    """
    if stored is None:
        return ResumedFiles(
            note=f"{checkpoint} was written before checkpoints knew their data: whether the "
            "training files have changed since is not checked"
        )
    known = Fingerprint.from_plain(stored, checkpoint)
    now = compare(known, found)
    if now.added:
        rows = sum(file.rows for file in now.added)
        return ResumedFiles(
            known.count if batches else None,
            f"training files were added since {checkpoint} was saved: {len(now.added):,} with "
            f"{rows:,} rows; they begin {'with the next epoch' if batches else 'now'}",
        )
    if not now.difference:
        return ResumedFiles()
    changed = f"the training files have changed since {checkpoint} was saved"
    if not batches:
        return ResumedFiles(
            note=f"{changed}: {now.difference}; the next epoch reads them as they are"
        )
    changed = f"{changed}, after {batches:,} batches of an epoch: {now.difference}"
    if resume_data == "ignore":
        return ResumedFiles(
            note=f"resume_data=ignore: {changed}; the epoch goes on after as many batches of what "
            "is there now"
        )
    raise CheckpointError(
        f"{changed}; rows would be trained twice or never: bring the files back, go on from a "
        "checkpoint of an epoch's end, or set resume_data=ignore"
    )


def check_resume_data(value: str) -> None:
    """Check a value of `resume_data`.

    Raises:
        ConfigError: The value is unknown.
    """
    if value not in get_args(ResumeData):
        raise ConfigError(f"resume_data={value}: {' or '.join(get_args(ResumeData))} is allowed")
