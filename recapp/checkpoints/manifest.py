"""What a checkpoint says of itself: `manifest.json`, for people and programs of any language.

    {"format": "recapp", "version": 2, "files": {...},
    "config": {...}, "plan": {...}, "metrics": {...}, ...      what the writer gave, a line each
    "blocks": [{"table": "C1", "tensor": "weight",             a line per rectangle
                "rows": [0, 600], ...}, ...]
    "checksum": "0b1c2d3e"}                                    CRC-32 of all bytes above its line

Version 1 had no checksum; it is read with a note. Nothing here is trusted: every value is checked
where it is read, and whatever does not hold ends in one CheckpointError.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from recapp import console
from recapp.checkpoints.plain_types import plain
from recapp.checkpoints.rectangles import Stored
from recapp.errors import CheckpointError, PlanError
from recapp.processes.rank_environment import outside_rank
from recapp.processes.rank_process import PARENT_PID
from recapp.settings.renamed import with_names_of_today
from recapp.sharding.sharding_plan import ShardingPlan

VERSION = 2  # of the format; a reader refuses a later one
LAST_WITHOUT_CHECKSUM = 1
META = "meta.pt"
_FOOT = b',\n"checksum": "%08x"\n}\n'
_WRONG = (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        folder: where its files are.
        info: what the writer gave: config, plan, schema, metrics, position, ...
        blocks: every stored rectangle.
        files: size and, for all but the blocks' files, checksum of each file.
        identity: tells versions of a checkpoint apart: CRC-32 of the manifest's bytes.
    """

    folder: Path
    info: dict[str, Any]
    blocks: tuple[Stored, ...]
    files: dict[str, dict[str, Any]]
    identity: int = 0

    @cached_property
    def tensors(self) -> dict[tuple[str, str], list[Stored]]:
        """The stored rectangles of each (table, tensor)."""
        found: dict[tuple[str, str], list[Stored]] = {}
        for s in self.blocks:
            found.setdefault((s.table, s.tensor), []).append(s)
        return found

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run that wrote it, under the names of today: plain data, in which
        nothing may be called unjudged.

        `recapp.app.compose.compose_over` and `recapp.checkpoints.trust.refuse_untrusted` judge
        them.

        Raises:
            CheckpointError: it was written by a script that stored none, or they are no settings.
        """
        if "config" not in self.info:
            raise CheckpointError(
                f"{self.folder} holds no settings: it was not written by recapp.train, "
                "so give model and data by hand"
            )
        if not isinstance(self.info["config"], dict):
            raise self._wrong("config")
        try:
            return with_names_of_today(self.info["config"])
        except RecursionError:
            raise self._wrong("config") from None

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics it was saved with; NaN where the rows left one open, as one class
        does with AUC.

        Raises:
            CheckpointError: something that is no number.
        """
        found = self.info.get("metrics", {})
        kinds = (int, float, type(None))
        if not isinstance(found, dict) or not all(type(v) in kinds for v in found.values()):
            raise self._wrong("metrics")
        return {name: math.nan if value is None else value for name, value in found.items()}

    @property
    def step(self) -> int:
        """The training steps behind it.

        Raises:
            CheckpointError: no whole number of at least 0.
        """
        return self._count(self.info.get("step"), "step")

    @property
    def position(self) -> dict[str, int]:
        """How far training had come: `epoch`, `batches` trained in it, `batch_size`.

        Raises:
            CheckpointError: it was saved without recapp's data module, or these are no whole
                numbers.
        """
        found = self.info.get("position")
        if not isinstance(found, dict):
            raise self._wrong("position")
        names = ("epoch", "batches", "batch_size")
        return {name: self._count(found.get(name), f"position.{name}") for name in names}

    @property
    def updates(self) -> list[int]:
        """How often the tables of each collection were updated; empty where nobody said.

        Raises:
            CheckpointError: no list of whole numbers.
        """
        found = self.info.get("updates", [])
        if not isinstance(found, list):
            raise self._wrong("updates")
        return [self._count(count, "updates") for count in found]

    @property
    def plan(self) -> ShardingPlan:
        """The plan it was trained under.

        Raises:
            CheckpointError: no plan, or no such thing as a plan.
        """
        try:
            return ShardingPlan.from_dict(self.info["plan"])
        except (*_WRONG, PlanError):
            raise self._wrong("plan") from None

    def _count(self, value: Any, name: str) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            raise self._wrong(name)
        return value

    def _wrong(self, name: str) -> CheckpointError:
        held: Any = self.info
        for key in name.split("."):
            held = held.get(key) if isinstance(held, dict) else None
        said = "is missing" if held is None else f"is {_short(held)}, which it cannot be"
        return CheckpointError(
            f"the manifest of checkpoint {self.folder} is damaged: {name} {said}"
        )


def to_json(manifest: Manifest) -> str:
    """Write a manifest as text, a line per entry and per block, so that people can read and compare
    it.

    Raises:
        CheckpointError: something that is neither plain nor a single number.
    """
    own: dict[str, Any] = {"format": "recapp", "version": VERSION, "files": manifest.files}
    taken = {*own, "blocks", "checksum"} & set(manifest.info)
    assert not taken, f"{sorted(taken)}: a name of the format itself"
    entries = {**own, **manifest.info}
    if isinstance(entries.get("metrics"), dict):  # JSON knows no NaN
        entries["metrics"] = {k: _finite(v) for k, v in entries["metrics"].items()}
    try:
        lines = [
            f"{json.dumps(str(k))}: {json.dumps(plain(v, f'manifest.{k}'), default=_number)}"
            for k, v in entries.items()
        ]
    except TypeError as error:
        raise CheckpointError(f"manifest: {error}") from error
    blocks = ",\n ".join(json.dumps(s.to_dict()) for s in manifest.blocks)
    body = "{\n" + ",\n".join([*lines, f'"blocks": [\n {blocks}]'])
    return body + (_FOOT % zlib.crc32(body.encode())).decode()


def _finite(value: Any) -> Any:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return None if isinstance(number, float) and not math.isfinite(number) else value


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no number, text, list or dict")


@lru_cache(maxsize=1)  # a run asks for one manifest a dozen times; a large one takes a second
def from_json(raw: bytes, folder: Path) -> Manifest:
    """Read what `to_json` wrote.

    Args:
        raw: the bytes of the file.
        folder: where it lies, for messages and for the manifest itself.

    Raises:
        CheckpointError: no manifest, a damaged one, one of a later version.
    """
    try:
        info: dict[str, Any] = json.loads(raw.decode())
        name = info.pop("format")
        version = info.pop("version")
        if name != "recapp" or type(version) is not int or version < 1:
            raise ValueError(f"format {_short(name)} {_short(version)}")
        if version > VERSION:
            raise CheckpointError(
                f"checkpoint {folder} has format {name} {version}, but this recapp reads "
                f"format recapp {VERSION}: use a later recapp"
            )
        sealed = info.pop("checksum", None) is not None or version > LAST_WITHOUT_CHECKSUM
        if sealed and not _is_sealed(raw):
            raise ValueError("its bytes are not those that were saved")
        files = {str(f): {**d, "bytes": int(d["bytes"])} for f, d in info.pop("files").items()}
        blocks = tuple(Stored.from_dict(b) for b in info.pop("blocks"))
        _check_files(files, blocks)
    except _WRONG as error:
        told = f"{type(error).__name__} {_short(str(error), quoted=False)}"
        raise CheckpointError(
            f"the manifest of checkpoint {folder} is damaged: {told}; use another checkpoint"
        ) from error
    if not sealed and not outside_rank() and PARENT_PID not in os.environ:  # a launcher has said it
        console.note(f"{folder} was written by an earlier recapp: its manifest has no checksum")
    return Manifest(folder, info, blocks, files, zlib.crc32(raw))


def _is_sealed(raw: bytes) -> bool:
    body = raw[: -len(_FOOT % 0)]
    return raw == body + _FOOT % zlib.crc32(body)


def _check_files(files: Mapping[str, Mapping[str, Any]], blocks: tuple[Stored, ...]) -> None:
    """Bound what the blocks hold by the sizes of their files."""
    held = dict.fromkeys(files, 0)
    for s in blocks:
        held[s.file] += s.end - s.begin
        if s.end > files[s.file]["bytes"]:
            raise ValueError(f"block {s.key!r} ends behind {s.file}")
    for file, count in held.items():
        if (
            Path(file).name != file
            or not file.isprintable()
            or not 0 <= count <= files[file]["bytes"]
        ):
            raise ValueError(f"the blocks of {file} hold {count:,} bytes")
    if META not in files:
        raise ValueError(f"{META} is not listed")


def _short(value: Any, *, quoted: bool = True) -> str:
    """Show a value in at most 80 characters of one line."""
    try:
        text = json.dumps(value) if quoted else value
    except _WRONG:
        text = f"a {type(value).__name__}"
    text = re.sub(r"[^ -~]+", " ", text)
    return text if len(text) <= 80 else text[:77] + "..."
