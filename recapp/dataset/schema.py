"""Which column is which: the label, the dense numbers and the ids, under whatever names a file carries them.

Click logs of the same shape travel under a dozen namings. Models and tables see only recapp's own (canonical) names, those of
the schema; a schema knows the other namings of each part and finds, file by file, the one that fits:

    canonical   label   I1     ..  I13     C1     ..  C26
    torchrec    label   int_0  ..  int_12  cat_0  ..  cat_25
    Spark       _c0     _c1    ..  _c13    _c14   ..  _c39

Label, dense and sparse part are looked up separately, a part always by one whole naming: a naming that starts at zero and
one that starts at one share most of their names, and mixing them would shift every column by one without a sound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import pyarrow as pa
import pyarrow.types as pt

from recapp.dataset.shapes import SAMPLE_SIZES
from recapp.errors import ConfigError, DataError, suggest

Naming = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns a model uses, by canonical name.

    label: name of the 0/1 column, or None for rows without labels (a batch then carries NaN labels).
    dense, sparse: canonical names, in the order of `Batch.dense_BI` and of the keys of `Batch.sparse`.
    label_names, dense_namings, sparse_namings: other namings, in order of preference; the canonical one is always tried first.
    positional: a file in which no naming finds a feature and that has exactly label + dense + sparse columns is read by position,
    in that order (a label under a known name must come first).
    Raises ConfigError for names that occur twice or a schema without a sparse feature.
    """

    label: str | None
    dense: Naming
    sparse: Naming
    label_names: Naming = ()
    dense_namings: tuple[Naming, ...] = ()
    sparse_namings: tuple[Naming, ...] = ()
    positional: bool = False

    def __post_init__(self) -> None:
        names = [*self.dense, *self.sparse, *([self.label] if self.label else [])]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"dataset columns: {', '.join(twice)} named more than once; every column has one use")
        if not self.sparse:
            raise ConfigError("dataset columns: no sparse column named; name at least one feature with ids")

    def resolve(self, arrow_schema: pa.Schema, file: str) -> dict[str, str]:
        """Canonical name -> the file's own column name.

        Raises DataError, naming the namings tried and the close matches, when a column is missing or has a type that cannot
        be read as what it is used for.
        """
        present = arrow_schema.names
        parts = [
            (self.dense, (self.dense, *self.dense_namings)),
            (self.sparse, (self.sparse, *self.sparse_namings)),
        ]
        if self.label is not None:
            parts.insert(0, ((self.label,), tuple((name,) for name in dict.fromkeys((self.label, *self.label_names)))))
        columns = self._by_position(present)
        if not columns:
            for names, namings in parts:
                columns.update(_find(names, namings, present, file))
        self._check_types(arrow_schema, columns, file)
        return columns

    def _by_position(self, present: Sequence[str]) -> dict[str, str]:
        features = self.dense + self.sparse
        names = features if self.label is None else (self.label, *features)
        known = {name for naming in (features, *self.dense_namings, *self.sparse_namings) for name in naming}
        labels = {self.label, *self.label_names} if self.label is not None else set()
        if not self.positional or len(present) != len(names) or known & set(present) or labels & set(present[1:]):
            return {}
        return dict(zip(names, present, strict=True))

    def _check_types(self, arrow_schema: pa.Schema, columns: dict[str, str], file: str) -> None:
        for name, column in columns.items():
            arrow_type = value_type(arrow_schema.field(column).type)
            if name in self.sparse:
                wanted = "integers, hexadecimal strings, or lists of those"
                good = _is_id(arrow_type) or (is_list(arrow_type) and _is_id(value_type(arrow_type.value_type)))
            else:
                wanted = "numbers, or strings that spell numbers"
                good = _is_number(arrow_type) or is_text(arrow_type) or pt.is_null(arrow_type)
            if not good:
                use = "label" if name == self.label else "sparse feature" if name in self.sparse else "dense feature"
                raise DataError(f"{file}: column {column} ({use} {name}) has type {arrow_type}; allowed: {wanted}")


def criteo_schema(label: str | None = "label") -> Schema:
    """The schema of Criteo's logs, 13 dense and 26 sparse columns, under every naming they are found with.

    Source of the namings: torchrec, TorchEasyRec, Merlin/HugeCTR, reczoo, Spark, pandas and NVIDIA's DLRM write them so.
    """
    return Schema(
        label=label,
        dense=_numbered("I", 1, 13),
        sparse=_numbered("C", 1, 26),
        label_names=("label", "Label", "_c0", "0", "click"),
        dense_namings=tuple(
            _numbered(prefix, first, 13)
            for prefix, first in (("int_", 0), ("int_", 1), ("num_", 0), ("num_", 1), ("_c", 1), ("", 1), ("i", 1), ("I", 0))
        ),
        sparse_namings=tuple(
            _numbered(prefix, first, 26)
            for prefix, first in (("cat_", 0), ("cat_", 1), ("_c", 14), ("", 14), ("c", 1), ("C", 0))
        ),
        positional=True,
    )


def sample_schema() -> Schema:
    """The schema of generated `sample` data: label, I1..I13 and the bags of the three sample tables."""
    return Schema(label="label", dense=_numbered("I", 1, 13), sparse=tuple(SAMPLE_SIZES))


def is_list(arrow_type: pa.DataType) -> bool:
    """Whether a column holds a list (a bag of ids) per row."""
    return bool(pt.is_list(arrow_type) or pt.is_large_list(arrow_type) or pt.is_fixed_size_list(arrow_type))


def is_text(arrow_type: pa.DataType) -> bool:
    """Whether a column holds text, also where its writer did not mark it as such (Parquet's BYTE_ARRAY without UTF8)."""
    return bool(pt.is_string(arrow_type) or pt.is_large_string(arrow_type) or pt.is_binary(arrow_type) or pt.is_large_binary(arrow_type))


def value_type(arrow_type: pa.DataType) -> pa.DataType:
    """The type of the values themselves, whether dictionary-encoded or not."""
    return arrow_type.value_type if pt.is_dictionary(arrow_type) else arrow_type


def _numbered(prefix: str, first: int, count: int) -> Naming:
    return tuple(f"{prefix}{index}" for index in range(first, first + count))


def _find(names: Naming, namings: tuple[Naming, ...], present: Sequence[str], file: str) -> dict[str, str]:
    if not names:
        return {}
    here = set(present)
    best = max(namings, key=lambda naming: len(here.intersection(naming)))
    missing = [(name, column) for name, column in zip(names, best, strict=True) if column not in here]
    if not missing:
        return dict(zip(names, best, strict=True))
    name, column = missing[0]
    tried = dict.fromkeys(naming[names.index(name)] for naming in namings)
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    if get_close_matches(column, present, n=1, cutoff=0.5):
        hint = suggest(column, present)
    else:
        hint = f"the file has {', '.join(present[:8])}{', ...' if len(present) > 8 else ''}"
    raise DataError(f"{file}: no column for {name}{more}; tried {', '.join(tried)}; {hint}")


def _is_number(arrow_type: pa.DataType) -> bool:
    return bool(pt.is_integer(arrow_type) or pt.is_floating(arrow_type) or pt.is_boolean(arrow_type))


def _is_id(arrow_type: pa.DataType) -> bool:
    whole = pt.is_integer(arrow_type) or pt.is_floating(arrow_type)
    return bool(whole or is_text(arrow_type) or pt.is_null(arrow_type))
