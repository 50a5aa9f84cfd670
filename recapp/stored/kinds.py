"""The two kinds of stored models, with the names and limits in which they differ."""

from dataclasses import dataclass

from recapp.errors import ArtefactError, CheckpointError, RecappError

MANIFEST = "manifest.json"  # of every stored model; written last


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of stored model.

    Args:
        name: The name of the kind, for people.
        article: The article of the name.
        format: The name of the format in its manifest.
        version: The latest version of the format; a reader refuses a later one.
        manifest_bytes: The most bytes of a manifest, so that reading a large file does not fill the
            memory.
        error: The class of its errors.
        written: The verb for the making of its files, for errors.
        fix: The advice for a damaged model.
        newer: The advice for a model of a later version.
        mistaken: The advice for a path to a model of the other kind.
        has_nan: Whether numbers in its manifest may be NaN.
        resumes: Whether training can resume from it.
    """

    name: str
    article: str
    format: str
    version: int
    manifest_bytes: int
    error: type[RecappError]
    written: str
    fix: str
    newer: str
    mistaken: str
    has_nan: bool
    resumes: bool


CHECKPOINT = Kind(
    name="checkpoint",
    article="a",
    format="recapp",
    version=4,
    manifest_bytes=2**30,  # enough for more than a million blocks
    error=CheckpointError,
    written="saved",
    fix="use another checkpoint",
    newer="use a later recapp",
    mistaken=(
        "{folder} is an artefact that recapp.export has written, and no checkpoint: name the "
        "checkpoint that it was made of"
    ),
    has_nan=True,
    resumes=True,
)
ARTEFACT = Kind(
    name="artefact",
    article="an",
    format="recapp-artefact",
    version=4,
    manifest_bytes=2**28,
    error=ArtefactError,
    written="written",
    fix="export it again",
    newer="use a later recapp, or export the checkpoint with this one",
    mistaken=(
        "{folder} is a checkpoint: `python -m recapp.export {ckpt_path} output=DIR` makes "
        "an artefact of it"
    ),
    has_nan=False,
    resumes=False,
)
FORMATS = (CHECKPOINT.format, ARTEFACT.format)
