"""The two kinds of stored models, and the words and numbers in which their directories differ."""

from dataclasses import dataclass

from recapp.errors import ArtefactError, CheckpointError, RecappError

MANIFEST = "manifest.json"  # of every stored model; written last


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of stored model.

    Args:
        name: What people call it.
        article: What stands in front of the name.
        format: What its manifest calls it.
        version: The latest version of the format; a reader refuses a later one.
        unsealed: The last version whose manifest has no checksum.
        manifest_bytes: What a manifest has at most: a file of any size must not fill the memory.
        old: What a name ends in for a moment while it is given to another directory.
        error: The class of its errors.
        written: How its files came about.
        fix: What to do about a damaged one.
        newer: What to do about one of a later version.
        mistaken: What to do where a model of the other kind was given.
        has_nan: Whether numbers of its manifest may be NaN.
    """

    name: str
    article: str
    format: str
    version: int
    unsealed: int
    manifest_bytes: int
    old: str
    error: type[RecappError]
    written: str
    fix: str
    newer: str
    mistaken: str
    has_nan: bool


CHECKPOINT = Kind(
    name="checkpoint",
    article="a",
    format="recapp",
    version=3,
    unsealed=1,
    manifest_bytes=2**30,  # more than a million blocks need
    old="old",
    error=CheckpointError,
    written="saved",
    fix="use another checkpoint",
    newer="use a later recapp",
    mistaken=(
        "{folder} is an artefact that recapp.export has written, and no checkpoint: name the "
        "checkpoint that it was made of"
    ),
    has_nan=True,
)
ARTEFACT = Kind(
    name="artefact",
    article="an",
    format="recapp-artefact",
    version=1,
    unsealed=0,
    manifest_bytes=2**28,
    old="recapp-replaced",  # people call their own copies served.old
    error=ArtefactError,
    written="written",
    fix="export it again",
    newer="use a later recapp, or export the checkpoint with this one",
    mistaken=(
        "{folder} is a checkpoint: `python -m recapp.export ckpt_path={folder} output=DIR` makes "
        "an artefact of it"
    ),
    has_nan=False,
)
FORMATS = (CHECKPOINT.format, ARTEFACT.format)
