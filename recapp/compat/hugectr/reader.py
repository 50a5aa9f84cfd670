"""HugeCTR's arguments about data. They and the files that NVTabular writes beside the data become
the group `dataset` of the settings.

    train/_file_list.txt                    the number of files, and their paths
    train/_metadata.json                    labels, conts and cats: the columns, in order
    DataReaderSparseParam("data3", ...)     the fourth column of cats

`slot_size_array` adds the sizes of the slots before slot i to the keys of slot i, so that no two
slots share a key. The `min_key` of a table may include this sum, or may be 0 as in the notebook,
whose tables use the keys of the files. recapp takes the reading that fits the table's range of
keys, and the one with the sum if both fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from recapp.compat.hugectr.words import (
    Check_t,
    DataReaderType_t,
    NamedEnum,
    Switch,
    check_fields,
    check_others,
    checked,
)
from recapp.dataset.data_file import UnreadableFileError, facts_of, stamp_of
from recapp.dataset.files import file_names
from recapp.dataset.formats import format_of
from recapp.errors import ConfigError, DataError
from recapp.settings.small_files import read_json
from recapp.settings.values import Natural, Positive
from recapp.tables.config import EmbeddingBagConfig

METADATA = "_metadata.json"
SWITCHES = {"cache_eval_data": 0, "num_workers": 12, "float_label_dense": False}
"""Arguments that only change how HugeCTR reads, with their defaults."""
REFUSED: Mapping[str, tuple[Any, str]] = {
    "keyset": ([], "key sets are for the parameter server, which is not there"),
    "num_samples": (0, "Parquet files say how many rows they have"),
    "eval_num_samples": (0, "Parquet files say how many rows they have"),
    "read_file_sequentially": (
        False,
        "row groups are dealt to the lanes of a batch, in one order on any number of GPUs",
    ),
    "data_source_params": (None, "data are read from local and mounted directories"),
    "async_param": (None, "it is of the RawAsync reader; recapp reads Parquet"),
}
"""Arguments that recapp does not have: the default of each, and the text of the error."""


class DataReaderParams:
    """The data of a program.

    Args:
        data_reader_type: The format of the data; must be Parquet.
        source: The list of files for training, `_file_list.txt`.
        eval_source: The list of files for evaluation.
        check_type: Must be `Non`, because Parquet has no checksums of rows.
        slot_size_array: The size of each slot; empty adds nothing to keys.
        others: Arguments that only change how HugeCTR reads, and arguments that must keep their
            defaults.

    Raises:
        ConfigError: An argument does not exist, or recapp does not have a value.
    """

    def __init__(
        self,
        data_reader_type: NamedEnum,
        source: str | Sequence[str],
        *,
        eval_source: str,
        check_type: NamedEnum,
        slot_size_array: Sequence[int] = (),
        **others: Any,
    ) -> None:
        if data_reader_type is not DataReaderType_t.Parquet:
            name = getattr(data_reader_type, "name", data_reader_type)
            raise ConfigError(
                f"DataReaderParams: data_reader_type={name}: recapp reads Parquet: convert the "
                "data, as HugeCTR's NVTabular scripts do"
            )
        if check_type is not Check_t.Non:
            raise ConfigError(
                f"DataReaderParams: check_type={getattr(check_type, 'name', check_type)}: "
                "Parquet has no checksums of rows: set Check_t.Non"
            )
        known = ("data_reader_type", "source", "eval_source", "check_type", "slot_size_array")
        check_others("DataReaderParams", others, SWITCHES, REFUSED, known)
        sources = list(source) if isinstance(source, list | tuple) else [source]
        if len(sources) != 1:
            raise ConfigError(
                f"DataReaderParams: source={sources}: must be one list of files; several lists "
                "need HugeCTR's parameter server, which recapp does not have"
            )
        check = partial(checked, "DataReaderParams")
        self.source = check("source", sources[0], str)
        self.eval_source = check("eval_source", eval_source, str)
        self.slot_size_array = check("slot_size_array", slot_size_array, list[Positive])


@dataclass(frozen=True)
class DataReaderSparseParam:
    """A column of keys.

    Args:
        top_name: The name of the column in lookups.
        nnz_per_slot: The largest number of keys in a sample: the hotness of a concatenation. Other
            lookups ignore it, because Parquet stores the lengths.
        is_fixed_length: Whether all samples have the same number of keys; recapp ignores it.
        slot_num: The number of slots; an embedding collection has 1.

    Raises:
        ConfigError: An argument is wrong, or the column has several slots.
    """

    top_name: str
    nnz_per_slot: Positive | list[Positive]
    is_fixed_length: Switch
    slot_num: int

    def __post_init__(self) -> None:
        check_fields("DataReaderSparseParam", self)
        if not self.nnz_per_slot:
            raise ConfigError(f"DataReaderSparseParam: {self.top_name}: nnz_per_slot=[]: is empty")
        if self.slot_num != 1:
            raise ConfigError(
                f"DataReaderSparseParam: {self.top_name}: slot_num={self.slot_num}: must be 1, "
                "because an embedding collection reads a column by its own name: declare one "
                "DataReaderSparseParam for each column"
            )


@dataclass(frozen=True)
class Input:
    """The inputs of a program by name: label, dense features and columns of keys.

    Args:
        label_dim: The number of labels; must be 1.
        label_name: The name of the label.
        dense_dim: The number of dense features.
        dense_name: The name of the tensor of dense features.
        data_reader_sparse_param_array: The columns of keys, in the order of the files.

    Raises:
        ConfigError: There are several labels, no columns of keys, or two inputs of one name.
    """

    label_dim: int
    label_name: str
    dense_dim: Natural
    dense_name: str
    data_reader_sparse_param_array: Any

    def __post_init__(self) -> None:
        check_fields("Input", self)
        if self.label_dim != 1:
            raise ConfigError(
                f"Input: label_dim={self.label_dim}: must be 1: recapp trains on one label of "
                "each sample, 0 or 1"
            )
        array = self.data_reader_sparse_param_array
        if not isinstance(array, list) or not all(
            isinstance(param, DataReaderSparseParam) for param in array
        ):
            raise ConfigError(
                f"Input: data_reader_sparse_param_array={array}: must be a list of "
                "DataReaderSparseParam"
            )
        names = [self.label_name, self.dense_name, *self.sparse_names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"Input: {twice[0]} is named more than once")
        if not self.sparse_names:
            raise ConfigError("Input: data_reader_sparse_param_array: must name a column of keys")

    @property
    def sparse_names(self) -> list[str]:
        """Return the names of the columns of keys."""
        return [param.top_name for param in self.data_reader_sparse_param_array]

    @property
    def most_keys(self) -> dict[str, int]:
        """Return the largest number of keys in a sample, by the name of the column."""
        counts = {p.top_name: p.nnz_per_slot for p in self.data_reader_sparse_param_array}
        return {name: n if isinstance(n, int) else max(n) for name, n in counts.items()}


@dataclass(frozen=True)
class Columns:
    """The names of the columns in the files.

    Args:
        label: The column of the label.
        dense: The columns of dense features.
        keys: The columns of keys.
    """

    label: str
    dense: list[str]
    keys: list[str]


def columns_of(reader: DataReaderParams, read: Input) -> Columns:
    """Return the columns of a program's data from the `_metadata.json` beside the files.

    Args:
        reader: The data.
        read: The `Input` of the program.

    Raises:
        DataError: A file is missing or differs from the program.
    """
    made = [
        _columns(path, argument)
        for path, argument in ((reader.source, "source"), (reader.eval_source, "eval_source"))
    ]
    columns = made[0]
    if made[1] != columns:
        raise DataError(
            f"DataReaderParams: source={reader.source} and eval_source={reader.eval_source}: their "
            f"{METADATA} name different columns"
        )
    for said, count, found in (
        ("label_dim", 1, [columns.label]),
        ("dense_dim", read.dense_dim, columns.dense),
        ("data_reader_sparse_param_array", len(read.sparse_names), columns.keys),
    ):
        if count != len(found):
            raise DataError(
                f"Input: {said} has {count}, and {METADATA} beside {reader.source} names "
                f"{len(found)}: {', '.join(found) or 'none'}"
            )
    sizes = reader.slot_size_array
    if sizes and len(sizes) != len(columns.keys):
        raise ConfigError(
            f"DataReaderParams: slot_size_array has {len(sizes)} numbers: must be one for each of "
            f"the {len(columns.keys)} cats in {METADATA}"
        )
    return columns


def _columns(path: str, argument: str) -> Columns:
    setting = f"DataReaderParams: {argument}"
    if not Path(path).is_file():
        raise DataError(f"{setting}={path}: no such file: must be a _file_list.txt")
    first = Path(file_names(path, setting=setting)[0])
    file = first.parent / METADATA
    if not file.is_file():
        raise DataError(
            f"{setting}={path}: there is no {METADATA} beside {first}: NVTabular writes one, which "
            "names labels, conts and cats"
        )
    try:
        said = read_json(file)
        entries = [
            (part, entry["col_name"], entry.get("index"))
            for part in ("labels", "conts", "cats")
            for entry in said.get(part, [])
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{file}: cannot be read ({type(error).__name__}: {error}): must have labels, conts "
            "and cats, lists of entries with col_name"
        ) from error
    parts: dict[str, dict[str, int | None]] = {"labels": {}, "conts": {}, "cats": {}}
    for part, name, place in entries:
        if not isinstance(name, str) or not name:
            raise DataError(f"{file}: {part}: col_name={name!r}: must be the name of a column")
        if any(name in places for places in parts.values()):
            raise DataError(f"{file}: {part}: {name} is named more than once")
        parts[part][name] = place
    if len(parts["labels"]) != 1:
        raise DataError(f"{file}: has {len(parts['labels'])} labels: must have one")
    for part, places in parts.items():
        _check_places(part, places, file, first)
    return Columns(next(iter(parts["labels"])), list(parts["conts"]), list(parts["cats"]))


def _check_places(part: str, places: Mapping[str, int | None], file: Path, first: Path) -> None:
    """Check that columns are at the indices of `_metadata.json`, because HugeCTR reads by index.

    Raises:
        DataError: A column has another index in the file.
    """
    try:
        names = facts_of(format_of(str(first)), str(first), stamp_of(str(first))).columns.names
    except (OSError, UnreadableFileError, DataError):
        return  # the training command reports an unreadable file
    for name, place in places.items():
        if place is None or name not in names or place == names.index(name):
            continue
        raise DataError(
            f"{file}: {part}: {name} has index {place}, and is column {names.index(name)} of "
            f"{first}: HugeCTR reads columns by index: correct the index or the order of the "
            "columns"
        )


def first_key(
    table: EmbeddingBagConfig, slots: Sequence[int], names: Sequence[str], sizes: Sequence[int]
) -> int:
    """Return the key in the files that has row 0 of a table: the table's `min_key` minus the number
    that `slot_size_array` adds to the keys of its slots.

    Args:
        table: The table.
        slots: The numbers of the slots that are looked up in the table.
        names: The names of all slots.
        sizes: `slot_size_array`; empty adds nothing.

    Raises:
        ConfigError: The keys of a slot fit the table neither with the sum nor without it, or the
            slots of the table add different numbers.
    """
    if not sizes:
        return table.min_key
    grows = table.dynamic is not None  # such a table takes any key
    last = table.min_key + table.num_embeddings
    befores = list(accumulate(sizes, initial=0))
    added = {}
    for slot in slots:
        before = befores[slot]
        fitting = [
            number
            for number in (before, 0)
            if grows or (table.min_key <= number and number + sizes[slot] <= last)
        ]
        if not fitting:
            raise ConfigError(
                f"DataReaderParams: slot_size_array: keys of {names[slot]} are 0..{sizes[slot] - 1}"
                f", or {before}..{before + sizes[slot] - 1} with the slots before it; table "
                f"{table.name} has the keys {table.min_key}..{last - 1}"
            )
        added[names[slot]] = fitting[0]
    if len(set(added.values())) > 1:
        said = " and ".join(f"{name} {number}" for name, number in added.items())
        raise ConfigError(
            f"DataReaderParams: slot_size_array: adds different numbers to the keys that read "
            f"table {table.name} ({said}): give each a table, or write keys into the files that "
            "differ and leave slot_size_array out"
        )
    return table.min_key if grows else table.min_key - next(iter(added.values()))
