"""What a checkpoint says of itself: `manifest.json`, for people and programs of any language.

    {"format": "recapp", "version": 1, "files": {...},
    "config": {...}, "plan": {...}, "metrics": {...}, ...                       what the writer gave, a line each
    "blocks": [{"table": "C1", "tensor": "weight", "rows": [0, 600], ...}, ...]  a line per stored rectangle
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from recapp.checkpoints.plain import plain
from recapp.checkpoints.rectangles import Stored
from recapp.errors import CheckpointError

VERSION = 1         # of the format; a reader refuses a later one


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Args:
        folder: where its files are.
        info: what the writer gave: config, plan, schema, metrics, position, ...
        blocks: every stored rectangle.
        files: size and, for all but the blocks' files, checksum of each file.
    """

    folder: Path
    info: dict[str, Any]
    blocks: tuple[Stored, ...]
    files: dict[str, dict[str, Any]]

    @property
    def tensors(self) -> dict[tuple[str, str], list[Stored]]:
        """The stored rectangles of each (table, tensor)."""
        found: dict[tuple[str, str], list[Stored]] = {}
        for s in self.blocks:
            found.setdefault((s.table, s.tensor), []).append(s)
        return found

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run that wrote it.

        Raises:
            CheckpointError: it was written by a script that stored none.
        """
        if "config" not in self.info:
            raise CheckpointError(f"{self.folder} holds no settings: it was not written by recapp.train, so give model and data by hand")
        return dict(self.info["config"])

    @property
    def metrics(self) -> dict[str, float]:
        """The validation metrics it was saved with."""
        return dict(self.info.get("metrics", {}))


def to_json(manifest: Manifest) -> str:
    """The text of a manifest, a line per entry and per block, so that people can read it and `diff` can compare it.

    Raises:
        CheckpointError: something that is neither plain nor a single number.
    """
    own: dict[str, Any] = {"format": "recapp", "version": VERSION, "files": manifest.files}
    assert not {*own, "blocks"} & set(manifest.info), f"{sorted(manifest.info)}: a name of the format itself"
    entries = {**own, **manifest.info}
    try:
        lines = [f"{json.dumps(str(k))}: {json.dumps(plain(v, f'manifest.{k}'), default=_number)}" for k, v in entries.items()]
    except TypeError as error:
        raise CheckpointError(f"manifest: {error}") from error
    blocks = ",\n ".join(json.dumps(s.to_dict()) for s in manifest.blocks)
    return "{\n" + ",\n".join([*lines, f'"blocks": [\n {blocks}]']) + "\n}\n"


def _number(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no number, text, list or dict")


def from_json(text: str, folder: Path) -> Manifest:
    """The inverse of `to_json`.

    Raises:
        CheckpointError: no manifest, a damaged one, one of a later version.
    """
    try:
        info: dict[str, Any] = json.loads(text)
        name, version = info.pop("format"), info.pop("version")
        if name != "recapp" or version > VERSION:
            raise CheckpointError(f"checkpoint {folder} has format {name} {version}, "
                                  f"but this recapp reads format recapp {VERSION}: use a later recapp")
        files = {str(file): {**said, "bytes": int(said["bytes"])} for file, said in info.pop("files").items()}
        blocks = tuple(Stored.from_dict(b) for b in info.pop("blocks"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of checkpoint {folder} is damaged: {type(error).__name__} {error}") from error
    return Manifest(folder, info, blocks, files)
