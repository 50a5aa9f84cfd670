"""The description of a checkpoint: `manifest.json`, for people and programs of any language.

    {"format": "recapp", "version": 2, "files": {...},
    "config": {...}, "plan": {...}, "metrics": {...}, ...      what the writer gave, a line each
    "blocks": [{"table": "C1", "tensor": "weight",             a line per rectangle
                "rows": [0, 600], ...}, ...]
    "checksum": "0b1c2d3e"}                                    CRC-32 of all bytes above its line

Where the rows of tables are mixed, `"row_orders": {"C1": {"order": "mixed", "multiplier": m,
"shift": s}}` says so: row r of C1 is stored as row (m r + s) mod R of its R.

Version 1 had no checksum; it is read with a note. A reader of version 2 knows no row orders, so
version 3 is written where there are some. Nothing here is trusted: every value is checked
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
from recapp.errors import CheckpointError, PlanError
from recapp.processes.fork_server import PARENT_PID
from recapp.processes.rank_environment import external_rank
from recapp.settings.renamed import with_names_of_today
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.stored.plain_types import plain
from recapp.stored.rectangles import StoredBlock
from recapp.tables.dynamic import RUNS
from recapp.tables.row_order import RowOrder

VERSION = 3  # of the format; a reader refuses a later one
WITHOUT_ROW_ORDERS = 2
LAST_WITHOUT_CHECKSUM = 1
META = "meta.pt"
MOST_EXAMPLE_ROWS = 4096
ROW_ORDERS = "row_orders"
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
    """The description of a checkpoint: its files, stored rectangles, and what the writer added.

    Args:
        folder: The directory of its files.
        info: What the writer gave: config, plan, schema, metrics, position, ...
        blocks: Every stored rectangle.
        files: The size of each file and, for all but the blocks' files, its checksum.
        identity: The CRC-32 of the manifest's bytes, in which versions of a checkpoint differ.
    """

    folder: Path
    info: dict[str, Any]
    blocks: tuple[StoredBlock, ...]
    files: dict[str, dict[str, Any]]
    identity: int = 0

    @cached_property
    def tensors(self) -> dict[tuple[str, str], list[StoredBlock]]:
        """The stored rectangles of each (table, tensor)."""
        found: dict[tuple[str, str], list[StoredBlock]] = {}
        for s in self.blocks:
            found.setdefault((s.table, s.tensor), []).append(s)
        return found

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run that wrote it, under the names of today.

        They are plain data: nothing that they name may be called before it is checked.

        `recapp.app.compose.compose_over` and `recapp.stored.trust.refuse_untrusted` check
        them.

        Raises:
            CheckpointError: A script wrote it that stored none, or they are no settings.
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
        """The validation metrics it was saved with; NaN where the rows did not determine one, as
        rows of one class do not determine AUC.

        Raises:
            CheckpointError: A metric is no number.
        """
        found = self.info.get("metrics", {})
        kinds = (int, float, type(None))
        if not isinstance(found, dict) or not all(type(v) in kinds for v in found.values()):
            raise self._wrong("metrics")
        return {name: math.nan if value is None else value for name, value in found.items()}

    @property
    def step(self) -> int:
        """The number of training steps before it was saved.

        Raises:
            CheckpointError: It is no whole number of at least 0.
        """
        return self._count(self.info.get("step"), "step")

    @property
    def position(self) -> dict[str, int]:
        """How far training had come: `epoch`, `batches` trained in it, `batch_size`.

        Raises:
            CheckpointError: It was saved without recapp's data module, or these are no whole
                numbers.
        """
        found = self.info.get("position")
        if not isinstance(found, dict):
            raise self._wrong("position")
        names = ("epoch", "batches", "batch_size")
        return {name: self._count(found.get(name), f"position.{name}") for name in names}

    @property
    def example(self) -> list[dict[str, Any]]:
        """Some rows of the data as plain values, to try the model with; empty where none were kept.

        Raises:
            CheckpointError: They are no rows, or more than `MOST_EXAMPLE_ROWS`.
        """
        found = self.info.get("example") or []
        is_some = isinstance(found, list) and len(found) <= MOST_EXAMPLE_ROWS
        if not is_some or not all(isinstance(row, dict) for row in found):
            raise self._wrong("example")
        return found

    @property
    def updates(self) -> list[int]:
        """How often the tables of each collection were updated; empty where that was not stored.

        Raises:
            CheckpointError: It is no list of whole numbers.
        """
        found = self.info.get("updates", [])
        if not isinstance(found, list):
            raise self._wrong("updates")
        return [self._count(count, "updates") for count in found]

    @property
    def rules(self) -> dict[str, str]:
        """The name of the row rule that trained each table; empty where that was not stored.

        Earlier versions stored one name, `rule`, for all tables.

        Raises:
            CheckpointError: They are no names.
        """
        found = self.info.get("rules")
        if found is None:
            one = self.info.get("rule")
            found = {} if one is None else dict.fromkeys((s.table for s in self.blocks), one)
        if not isinstance(found, dict) or not all(type(name) is str for name in found.values()):
            raise self._wrong("rules" if "rules" in self.info else "rule")
        return found

    @property
    def weights(self) -> dict[str, str]:
        """The table of each weight that was sharded, by its name in the module's state; empty where
        that was not stored. A table that two parts of a module share has two names.

        Raises:
            CheckpointError: They are not the tables that are stored.
        """
        found = self.info.get("weights") or {}
        if not isinstance(found, dict) or not all(type(name) is str for name in found.values()):
            raise self._wrong("weights")
        if found and set(found.values()) != {table for table, _ in self.tensors}:
            raise self._wrong("weights")
        return found

    @cached_property
    def row_orders(self) -> dict[str, RowOrder]:
        """The order in which rows are stored, by table; of others they are stored by number.

        Raises:
            CheckpointError: One is none, or of a table that is not stored.
        """
        rows = {s.table: s.shape[0] for s in self.blocks}
        try:
            return {
                table: RowOrder.from_dict(plain, rows[table])
                for table, plain in self.info.get(ROW_ORDERS, {}).items()
            }
        except _WRONG:
            raise self._wrong(ROW_ORDERS) from None

    @property
    def dynamic(self) -> dict[str, dict[str, list[int]]]:
        """How many rows each of the 64 runs of every dynamic table has, and how many keys are
        counted that have no row yet: `{table: {"rows": [...], "waiting": [...]}}`.

        Raises:
            CheckpointError: They are no such numbers.
        """
        found = self.info.get("dynamic", {})
        if not isinstance(found, dict):
            raise self._wrong("dynamic")
        for counts in found.values():
            if not isinstance(counts, dict) or sorted(counts) != ["rows", "waiting"]:
                raise self._wrong("dynamic")
            for count_R in counts.values():
                if not isinstance(count_R, list) or len(count_R) != RUNS:
                    raise self._wrong("dynamic")
                for count in count_R:
                    self._count(count, "dynamic")
        return found

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan it was trained under.

        Raises:
            CheckpointError: There is no plan, or what is there is none.
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
    """Return a manifest as JSON text, a line per entry and per block, for people to read and
    compare.

    Raises:
        CheckpointError: An entry is neither plain nor a single number.
    """
    version = VERSION if ROW_ORDERS in manifest.info else WITHOUT_ROW_ORDERS
    own: dict[str, Any] = {"format": "recapp", "version": version, "files": manifest.files}
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
    return sealed(body)


def sealed(body: str) -> str:
    """Return a JSON object, of which the last brace is missing, with the checksum of its bytes as
    its last entry.
    """
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
    """Return the manifest of a text that `to_json` has made.

    Args:
        raw: The bytes of the file.
        folder: The directory of the checkpoint, for messages and for the manifest itself.

    Raises:
        CheckpointError: It is no manifest, a damaged one, or one of a later version.
    """
    try:
        info: dict[str, Any] = json.loads(raw.decode())
        name = info.pop("format")
        version = info.pop("version")
        if name == "recapp-artefact":
            raise CheckpointError(
                f"{folder} is an artefact that recapp.export has written, and no checkpoint: name "
                "the checkpoint that it was made of"
            )
        if name != "recapp" or type(version) is not int or version < 1:
            raise ValueError(f"format {_short(name)} {_short(version)}")
        if version > VERSION:
            raise CheckpointError(
                f"checkpoint {folder} has format {name} {version}, but this recapp reads "
                f"format recapp {VERSION}: use a later recapp"
            )
        sealed = info.pop("checksum", None) is not None or version > LAST_WITHOUT_CHECKSUM
        if sealed and not is_sealed(raw):
            raise ValueError("its bytes are not those that were saved")
        files = {str(f): {**d, "bytes": int(d["bytes"])} for f, d in info.pop("files").items()}
        blocks = tuple(StoredBlock.from_dict(b) for b in info.pop("blocks"))
        _check_files(files, blocks)
    except _WRONG as error:
        reason = f"{type(error).__name__} {_short(str(error), quoted=False)}"
        raise CheckpointError(
            f"the manifest of checkpoint {folder} is damaged: {reason}; use another checkpoint"
        ) from error
    # under a launcher the note was printed there
    if not sealed and not external_rank() and PARENT_PID not in os.environ:
        console.note(f"{folder} was written by an earlier recapp: its manifest has no checksum")
    return Manifest(folder, info, blocks, files, zlib.crc32(raw))


def is_sealed(raw: bytes) -> bool:
    """Return whether bytes end in the checksum of what stands before it (`sealed`)."""
    body = raw[: -len(_FOOT % 0)]
    return raw == body + _FOOT % zlib.crc32(body)


def _check_files(files: Mapping[str, Mapping[str, Any]], blocks: tuple[StoredBlock, ...]) -> None:
    """Check that the blocks hold no more bytes than their files.

    Raises:
        ValueError: They do, or a file has another directory in its name.
    """
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
    """Return a value as one line of at most 80 characters."""
    try:
        text = json.dumps(value) if quoted else value
    except _WRONG:
        text = f"a {type(value).__name__}"
    text = re.sub(r"[^ -~]+", " ", text)
    return text if len(text) <= 80 else text[:77] + "..."
