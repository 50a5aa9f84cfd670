"""The manifest of an artefact, which holds all that scoring needs. Only its compiled part can run
code, and that part needs trust.

    manifest.json             the files below, with sizes and checksums; written last
    rows/int8_16.bin          the rows of all int8 tables of 16 columns, table by table
    rows/int8_16_dynamic.bin  rows of dynamic tables, and the sorted positions of their keys
    rows/int8_16_dynamic.keys
    derived.bin               the fitted values of derived columns, if there are some
    dense.safetensors         the other parameters and buffers of the model
    example.arrow             a few raw rows; the manifest has their outputs
    compiled/                 the dense part as machine code, read only with trust_compiled

Files hold rows in the layout of the kernels, so readers map a file, and several processes share its
pages. The model is built from the settings in the manifest, after the same check as for a
checkpoint (`recapp/stored/trust.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from recapp.stored.derived_values import DERIVED_FILE
from recapp.stored.kinds import ARTEFACT
from recapp.stored.manifest import Files, Manifest, TableShape
from recapp.tables.config import DataType, EmbeddingConfig

DENSE = "dense.safetensors"
EXAMPLE = "example.arrow"
WITHOUT_DERIVED = 2
COMPILED = "compiled/"  # the directory of files that are code


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """A table in an artefact.

    Args:
        name: Its name.
        rows: The number of stored rows.
        dim: The number of columns.
        storage: The data type of the stored rows, a `DataType`.
        file: The file of its rows.
        first_row: Its first row in the file.
        keys: The file of the positions of its keys, which also begin at `first_row`; None for a
            static table.
        id_rule: The rule by which an id becomes a row.
        min_key: The id of row 0.
        start_hash: The hash from which start values of keys without a row are computed.
        start_range: The largest distance of those values from 0.
    """

    name: str
    rows: int
    dim: int
    storage: str
    file: str
    first_row: int
    keys: str | None = None
    id_rule: str = "error"
    min_key: int = 0
    start_hash: int = 0
    start_range: float = 0.0

    def __post_init__(self) -> None:
        DataType(self.storage)
        for f in fields(self):
            kind: Any = f.type
            value = getattr(self, f.name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"{f.name}={value!r}")
        if min(self.rows, self.first_row, self.dim - 1) < 0:
            raise ValueError(f"table {self.name} of {self.rows} rows from {self.first_row}")
        if not (0 <= self.start_hash < 2**32 and 0 <= self.start_range < math.inf):
            raise ValueError(f"start values of table {self.name}")

    @property
    def data_type(self) -> DataType:
        """The data type of the stored rows."""
        return DataType(self.storage)


@dataclass(frozen=True)
class ArtefactManifest(Manifest):
    """The manifest of an artefact: its files, its tables, and further entries.

    Args:
        tables: Its tables, in the order of the model.
    """

    kind = ARTEFACT
    parts = "tables"
    dense_file = DENSE
    tables: tuple[StoredTable, ...]

    @classmethod
    def of_entries(cls, folder: Path, info: dict[str, Any], files: Files, identity: int) -> Self:
        """Make a manifest of its entries, and check that all files of tables have a checksum."""
        tables = tuple(StoredTable(**t) for t in info.pop("tables"))
        for t in tables:
            _ = files[t.file], files[t.keys or t.file]
        for entry in files.values():
            _ = entry["crc32"]
        return cls(folder, info, files, tables, identity=identity)

    @property
    def version(self) -> int:
        """The version of the format: 3 with derived columns, padding or separators of ids, which
        version 2 lacks, else 2.
        """
        features = self.info.get("features")
        lists = isinstance(features, Mapping) and {"padding", "separator"} & features.keys()
        return self.kind.version if lists or DERIVED_FILE in self.files else WITHOUT_DERIVED

    @property
    def in_use(self) -> Files:
        """All files."""
        return self.files

    @property
    def data_types(self) -> dict[str, DataType]:
        """The data type of the stored rows of each table."""
        return {t.name: t.data_type for t in self.tables}

    def check_tables(self, tables: Sequence[EmbeddingConfig]) -> None:
        """Check that the tables of the settings are the stored tables.

        Raises:
            ArtefactError: A table differs.
        """
        made = {t.name: t for t in tables}
        stored = {t.name: t for t in self.tables}
        if made.keys() != stored.keys():
            odd = ", ".join(sorted(made.keys() ^ stored.keys())[:5])
            raise self.damaged(f"settings and tables differ: {odd}")
        for name, table in made.items():
            own = stored[name]
            dynamic = table.dynamic is not None
            rows = own.rows if dynamic else table.num_embeddings
            said = (rows, table.embedding_dim, str(table.id_rule), table.min_key, dynamic)
            if said != (own.rows, own.dim, own.id_rule, own.min_key, own.keys is not None):
                raise self.damaged(f"table {name} differs from its settings")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The tables as plain values."""
        return [asdict(t) for t in self.tables]

    def example_outputs(self, names: Sequence[str]) -> dict[str, list[float]]:
        """Return the outputs of the example at the time of the export, by name.

        Args:
            names: The outputs of the task. Version 1 stored the only output, without its name.

        Raises:
            ArtefactError: The outputs are not numbers.
        """
        key = "outputs" if self.info.get("logits") is None else "logits"
        stored = self.entry(key, dict if key == "outputs" else list)
        outputs = stored if isinstance(stored, dict) else {names[0]: stored}
        if outputs.keys() != {*names}:
            raise self.damaged(f"{key} has {', '.join(outputs)}, and the task {', '.join(names)}")
        try:
            return {name: [_number(x) for x in values] for name, values in outputs.items()}
        except (TypeError, OverflowError) as error:
            raise self.damaged(f"{key} are no numbers") from error

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    @property
    def shapes(self) -> dict[str, TableShape]:
        """The shape of each stored table, by name."""
        return {t.name: TableShape(t.rows, t.dim, t.keys is not None) for t in self.tables}


def _number(value: object) -> float:
    """Return a number of JSON."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
    return float(value)
