"""The schema: columns of labels, weights, dense numbers and ids, under any naming of a file.

Click logs of the same shape exist with a dozen namings. Models and tables use only recapp's own
(canonical) names. A schema knows the other namings of each part, and finds the matching naming of
each file:

    canonical   label   I1     ..  I13     C1     ..  C26
    torchrec    label   int_0  ..  int_12  cat_0  ..  cat_25
    Spark       _c0     _c1    ..  _c13    _c14   ..  _c39

The label, the dense part and the sparse part are looked up separately, each by one whole naming. A
naming that starts at zero and a naming that starts at one share most names, so a mixture of both
would silently shift every column by one.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeGuard

from recapp.dataset.data_settings import (
    SETTINGS,
    DataSettings,
    Derivation,
    DerivedColumn,
    FileRules,
    columns_of,
    derived_from,
)
from recapp.errors import CheckpointError, ConfigError, DataError, alike, meant, suggest
from recapp.tables.table_settings import (
    TableSettings,
    TablesOfDataset,
    features_by_table,
    row_features,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

Naming = tuple[str, ...]


class TextIds(StrEnum):
    """The rule that makes ids of the text of a column (`recapp/dataset/decode.py`).

    hex         the value of at most 16 hexadecimal digits
    hashed      the integer of a canonical decimal; for other text, the XXH64 hash of its bytes
    integers    the integer of a canonical decimal; other text is an error
    """

    HEX = "hex"
    HASHED = "hashed"
    INTEGERS = "integers"


NO_LABEL = (
    "dataset.label=null: training and evaluation need the column that says 0 or 1; "
    "rows without it can only be predicted"
)
TEXT_HASH = "xxh64"  # the name in checkpoints of the hash that makes ids of text
# The entry of the rules for ids, in checkpoints, that lists the features with bags of ids.
LISTS = "lists"
# The entry of the rules for ids, in checkpoints, with the ids that fill lists up to a length.
PADDING = "padding"
# The entry of the rules for ids, in checkpoints, with the separators of ids in text.
SEPARATOR = "separator"
# The entry of the rules for ids, in checkpoints, with the columns of the weights of ids.
ID_WEIGHTS = "id_weights"
# The entry of the rules for ids, in checkpoints, that lists the derived columns.
DERIVED = "derived"
# The fitted values of derived columns, by key.
Values = Mapping[str, "npt.NDArray[np.generic]"]


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a model, by canonical name.

    Args:
        label: The name of the label, or a list of names; None for rows without labels.
        dense: Canonical names in the order of `Batch.dense_BI`.
        sparse: Canonical names in the order of `Batch.sparse`.
        label_names: Other names of the label, in order of preference; the canonical name is always
            tried first.
        dense_namings: Other namings of the dense columns, also in order of preference.
        sparse_namings: Other namings of the sparse columns, also in order of preference.
        positional: Whether to read a file by position if no naming finds a feature. The file must
            have exactly the label, dense and sparse columns, in this order (labels of a known name
            must come first); where no label is read, it may have one or none.
        hex: The sparse features whose text is hexadecimal.
        integers: The sparse features whose text must spell integers, because a table takes their
            ids for rows. The text of a feature in both lists is hexadecimal.
        real_labels: The labels that may be any finite number; other labels are 0 or 1.
        soft_labels: The labels that may be any number from 0 to 1.
        weight: The column of the weights of the rows, for all labels; or the column for each of
            some labels; None without weights.
        derived: The columns that are computed from these, in order.
        times: The unit of the whole numbers of each column of timestamps.
        vectors: The length of the lists of each column of vectors.
        padding: The id that fills lists up to a length and is left out, of all features with bags
            or by feature.
        separator: What stands between the ids of a text, by feature.
        id_weights: The column of the weights of the ids, by feature; a weight for each id.
        lists: The sparse features that had a bag of ids in each row of training, so that a null is
            an empty bag in them and one missing id in others; None where only the columns say it.
        files: How files are read.
        label_from: The least number that counts as a label of 1; None where labels are 0 and 1.

    Raises:
        ConfigError: A name occurs twice, there is no sparse feature, a name in `hex` is not a
            sparse feature, or a weight is not for a label.
    """

    label: str | Sequence[str] | None
    dense: Naming
    sparse: Naming
    label_names: Naming = ()
    dense_namings: tuple[Naming, ...] = ()
    sparse_namings: tuple[Naming, ...] = ()
    positional: bool = False
    hex: Naming = ()
    integers: Naming = ()
    real_labels: Naming = ()
    soft_labels: Naming = ()
    weight: str | Mapping[str, str] | None = None
    derived: tuple[DerivedColumn, ...] = ()
    times: Mapping[str, str] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)
    padding: int | str | Mapping[str, int | str] | None = None
    separator: Mapping[str, str] = field(default_factory=dict)
    id_weights: Mapping[str, str] = field(default_factory=dict)
    lists: Set[str] | None = None
    files: FileRules = field(default_factory=FileRules)
    label_from: float | None = None

    def __post_init__(self) -> None:
        for name in self.weights:
            if self.labels and name not in self.labels:
                raise ConfigError(
                    f"dataset.weight names {name}, which is no label; {suggest(name, self.labels)}"
                )
        names = [*self.targets, *self.inputs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            uses = {
                "label": self.labels,
                "weight": self.weight_columns,
                "dense": self.dense,
                "sparse": self.sparse,
                "times": self.times,
                "vectors": self.vectors,
                "id_weights": self.id_weight_columns,
            }
            where = ", ".join(f"dataset.{use}" for use, names in uses.items() if twice[0] in names)
            raise ConfigError(
                f"dataset columns: {', '.join(twice)} named more than once ({where}); "
                "every column has one use"
            )
        if not self.sparse:
            raise ConfigError(
                "dataset columns: no sparse column named; name at least one feature with ids"
            )
        padded = self.padding if isinstance(self.padding, Mapping) else {}
        for key, among in (
            ("hex", self.hex),
            ("padding", padded),
            ("separator", self.separator),
            ("id_weights", self.id_weights),
        ):
            for name in among:
                if name not in self.sparse:
                    raise ConfigError(
                        f"dataset.{key} names {name}, which is no sparse column; "
                        f"{suggest(name, self.sparse)}"
                    )
        for name, sign in self.separator.items():
            if not sign:
                raise ConfigError(
                    f"dataset.separator={{{name}: ''}}: must be at least one sign, such as ','"
                )
        if self.weight is not None and not self.labels:
            raise ConfigError(
                f"dataset.weight={self.weight}: there is no label whose loss it weighs"
            )

    @property
    def inputs(self) -> Naming:
        """The columns that a row to score has: numbers, ids, times, vectors, weights of ids."""
        return (*self.dense, *self.sparse, *self.times, *self.vectors, *self.id_weight_columns)

    @property
    def id_weight_columns(self) -> Naming:
        """The columns of the weights of ids, each once."""
        return tuple(dict.fromkeys(self.id_weights.values()))

    @property
    def features(self) -> Naming:
        """The features of a batch that have ids: sparse columns, then derived ones."""
        return self.sparse + tuple(column.name for column in self.derived if column.is_new_id)

    @property
    def numbers(self) -> Naming:
        """The columns of `Batch.dense_BI`: dense columns, then derived ones, then vectors."""
        return (
            *self.dense,
            *(column.name for column in self.derived if column.is_new_number),
            *(f"{name}[{n}]" for name, width in self.vectors.items() for n in range(width)),
        )

    @property
    def fits(self) -> bool:
        """Whether derived columns have no values yet, which the training rows give."""
        return any(column.values is None for column in self.derived)

    def with_values(self, values: "Values") -> "Schema":
        """Return this schema with fitted values of its derived columns, by key."""
        return replace(
            self,
            derived=tuple(replace(column, values=values[column.key]) for column in self.derived),
        )

    @property
    def values(self) -> "Values":
        """The fitted values of the derived columns, by key."""
        return {column.key: column.values for column in self.derived if column.values is not None}

    @property
    def vocabularies(self) -> "Mapping[str, npt.NDArray[np.generic] | None]":
        """The ids of each feature that has a vocabulary, ascending; None before the fit."""
        return {one.name: one.values for one in self.derived if one.kind is Derivation.VOCABULARY}

    def id_column(self, feature: str) -> DerivedColumn | None:
        """Return the derived column that gives a feature its ids; None for the ids of the logs."""
        return next((one for one in reversed(self.derived) if one.name == feature), None)

    def bags(self, list_features: Set[str]) -> frozenset[str]:
        """Return the sparse features that have a bag of ids in each row: those whose columns are
        lists or texts with a separator, whose ids have weights, and those that had bags in
        training, where a column of single ids has at most one id in a bag.

        Args:
            list_features: The sparse features whose columns are lists.
        """
        lists = {*self.separator, *self.id_weights, *(self.lists or ())}
        return frozenset(list_features) | lists.intersection(self.sparse)

    def null_is_id(self, feature: str) -> bool:
        """Return whether a null list is one missing id, because each row had one id in training;
        else it is an empty bag.
        """
        return self.lists is not None and feature not in self.lists

    def check_bags(self, bags: Set[str]) -> None:
        """Check that crosses read single-valued features, and that padding is named for bags.

        Args:
            bags: The sparse features whose columns are lists.

        Raises:
            DataError: A cross reads a column of lists, or a column of single ids has padding.
        """
        for name in self.padding if isinstance(self.padding, Mapping) else ():
            if name not in bags:
                raise DataError(
                    f"dataset.padding: column {name} holds one id a row, and padding fills lists "
                    "up to a length; leave it out"
                )
        for column in self.derived:
            for name in column.reads if column.kind is Derivation.CROSS else ():
                if name in bags:
                    raise DataError(
                        f"dataset.crosses: column {name} holds a list a row, and a cross takes one "
                        "id of each column; leave it out"
                    )

    @property
    def labels(self) -> Naming:
        """The names of the labels, in the order of `Batch.labels`."""
        return (self.label,) if isinstance(self.label, str) else tuple(self.label or ())

    @property
    def weights(self) -> Mapping[str, str]:
        """The column of weights by label, for labels that have one."""
        if isinstance(self.weight, str):
            return dict.fromkeys(self.labels, self.weight)
        return self.weight or {}

    @property
    def weight_columns(self) -> Naming:
        """The columns of weights, each once."""
        return tuple(dict.fromkeys(self.weights.values()))

    @property
    def targets(self) -> Naming:
        """The columns of labels, then the columns of weights."""
        return self.labels + self.weight_columns

    def unlabelled(self) -> "Schema":
        """Return the schema of the same features without labels and weights."""
        return replace(self, label=None, real_labels=(), soft_labels=(), weight=None)

    def only_raw(self, dense: Sequence[str], sparse: Sequence[str]) -> "Schema":
        """Return the schema of some dense and sparse columns alone, without derived ones."""
        return replace(
            self,
            dense=tuple(dense),
            sparse=tuple(sparse),
            hex=tuple(name for name in self.hex if name in sparse),
            padding={k: v for k, v in self.padding.items() if k in sparse}
            if isinstance(self.padding, Mapping)
            else self.padding,
            separator={name: sign for name, sign in self.separator.items() if name in sparse},
            id_weights={},
            derived=(),
            times={},
            vectors={},
        )

    def use(self, name: str) -> str:
        """Return the use of a column, by canonical name: `sparse feature`, `dense feature`, `label`
        (0 or 1), `real label` (any number, or any from 0 to 1), `weight`, `time`, `vector` or
        `id weight`.
        """
        for use, names in (
            ("sparse feature", self.sparse),
            ("time", self.times),
            ("vector", self.vectors),
            ("id weight", self.id_weight_columns),
        ):
            if name in names:
                return use
        if name in self.labels:
            rated = self.label_from is not None or name in self.real_labels + self.soft_labels
            return "real label" if rated else "label"
        return "weight" if name in self.weight_columns else "dense feature"

    def text_ids(self, feature: str) -> TextIds:
        """Return the rule for ids of text of a sparse feature."""
        if feature in self.hex:
            return TextIds.HEX
        return TextIds.INTEGERS if feature in self.integers else TextIds.HASHED

    def id_encoding(self) -> dict[str, Any]:
        """Return the rules for ids of text, in the form of a checkpoint.

        The entries are the hash of text, the columns whose text is hexadecimal, and the features
        with bags, if they are known.
        """
        padding = dict(self.padding) if isinstance(self.padding, Mapping) else self.padding
        return {
            "text": TEXT_HASH,
            "hex": [name for name in self.sparse if name in self.hex],
            **({} if self.lists is None else {LISTS: sorted(self.lists)}),
            **({} if padding is None else {PADDING: padding}),
            **({SEPARATOR: dict(self.separator)} if self.separator else {}),
            **({ID_WEIGHTS: dict(self.id_weights)} if self.id_weights else {}),
            **({DERIVED: [column.plain() for column in self.derived]} if self.derived else {}),
        }

    def with_stored_lists(self, ids: object) -> "Schema":
        """Return this schema with the features that had bags when a model was trained.

        Args:
            ids: The result of `id_encoding` at the time of training; None changes nothing.
        """
        lists = ids.get(LISTS) if isinstance(ids, Mapping) else None
        return replace(self, lists=frozenset(lists)) if _are_names(lists) else self

    def check_id_encoding(
        self, encoding: object, checkpoint: str, kind: str = "checkpoint"
    ) -> None:
        """Check that a model was trained with the rules for ids of text of this schema.

        Args:
            encoding: The result of `id_encoding` at the time of training.
            checkpoint: The stored model's name, for error messages.
            kind: Its kind, `checkpoint` or `artefact`, for error messages.

        Raises:
            CheckpointError: The rules differ, or the stored record is damaged.
        """
        stored = encoding if isinstance(encoding, Mapping) else {}
        hex = stored.get("hex")
        try:
            trained_on = [derived_from(plain) for plain in stored.get(DERIVED, [])]
        except (TypeError, KeyError, ValueError):
            hex = None
        if (
            not isinstance(hex, list)
            or not isinstance(stored.get("text"), str)
            or not _are_names(stored.get(LISTS, []))
        ):
            raise CheckpointError(
                f"the manifest of {kind} {checkpoint} is damaged: ids={encoding!r}"
            )
        if stored["text"] != TEXT_HASH:
            raise CheckpointError(
                f"{kind} {checkpoint}: text ids are hashed by {stored['text']}, "
                f"this recapp hashes by {TEXT_HASH}"
            )
        others = [name for name in self.sparse if (name in hex) != (name in self.hex)]
        if others:
            trained = "as hexadecimal" if others[0] in hex else "as plain text"
            raise CheckpointError(
                f"{kind} {checkpoint} was trained on ids of {others[0]} that were read "
                f"{trained}: set dataset.naming and dataset.hex as it was trained, "
                f"dataset.hex=[{','.join(str(name) for name in hex)}]"
            )
        if unknown := sorted(set(stored.get(LISTS, [])).difference(self.sparse)):
            raise CheckpointError(
                f"{kind} {checkpoint} was trained on lists of {unknown[0]}, which is no sparse "
                "feature here: set dataset.sparse as it was trained, or its manifest is damaged"
            )
        for key in (PADDING, SEPARATOR, ID_WEIGHTS):
            if (there := stored.get(key)) != self.id_encoding().get(key):
                raise CheckpointError(
                    f"{kind} {checkpoint} was trained with dataset.{key}="
                    f"{'null' if there is None else there}: set it as it was trained"
                )
        if trained_on != list(self.derived):
            odd = [f"with {one.in_words()}" for one in trained_on if one not in self.derived]
            odd += [f"without {one.in_words()}" for one in self.derived if one not in trained_on]
            raise CheckpointError(
                f"{kind} {checkpoint} was trained {odd[0] if odd else 'with another order'}: set "
                f"{SETTINGS} as it was trained"
            )

    def resolve(
        self, arrow_schema: "pa.Schema", file: str, partitions: Sequence[str] = ()
    ) -> dict[str, str]:
        """Find the file's own name of each column.

        Args:
            arrow_schema: The columns of the file.
            file: The file's name, for error messages.
            partitions: The last ones of the columns, which are names of its directories or parts of
                nested columns: they count by name, and not by position.

        Returns:
            Canonical name -> the file's own name.

        Raises:
            DataError: A column is missing, occurs more than once, or has a type that does not fit
                its use. The text names the namings tried and the close matches.
        """
        from recapp.dataset.arrow_types import check_types  # needs pyarrow, only for files

        present = arrow_schema.names
        others = {name: self.label_names for name in self.labels if len(self.labels) == 1}
        parts: list[tuple[Naming, tuple[Naming, ...]]] = [
            *(
                ((name,), tuple((each,) for each in dict.fromkeys((name, *others.get(name, ())))))
                for name in self.targets
            ),
            (self.dense, (self.dense, *self.dense_namings)),
            (self.sparse, (self.sparse, *self.sparse_namings)),
            *(
                ((name,), ((name,),))
                for name in (*self.times, *self.vectors, *self.id_weight_columns)
            ),
        ]
        columns = self._by_position(present[: len(present) - len(partitions)])
        if not columns:
            for names, namings in parts:
                columns.update(_find(names, namings, present, file))
        for name, column in columns.items():
            if (times := present.count(column)) > 1:
                raise DataError(
                    f"{file}: column {column} ({name}) is there {times} times; "
                    "leave one of them in the file"
                )
        check_types(arrow_schema, columns, file, {name: self.use(name) for name in columns})
        return columns

    def _by_position(self, present: Sequence[str]) -> dict[str, str]:
        """Return the columns by position; empty if the schema or the file does not allow this."""
        features = self.dense + self.sparse
        first = present[: -len(features)]  # of rows to score, a label that is not read
        known = {
            name
            for naming in (features, *self.dense_namings, *self.sparse_namings)
            for name in naming
        }
        labels = {*self.labels, *(self.label_names if self.labels else ())}
        if (
            not self.positional
            or self.weights
            or self.times
            or self.vectors
            or self.id_weights
            or len(present) < len(features)
            or len(first) not in ([len(self.labels)] if self.labels else [0, 1])
            or known & set(present)
            or labels & set(present[len(self.labels) :])
        ):
            return {}
        columns = zip(features, present[-len(features) :], strict=True)
        return {**dict(zip(self.labels, first, strict=False)), **dict(columns)}


def _are_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def schema_of(dataset: DataSettings, tables: TableSettings) -> Schema:
    """Return the schema of the settings of a data set and its tables.

    Columns whose table takes ids for rows (any id rule but `hash`) must hold integers.

    Args:
        dataset: The group `dataset`.
        tables: The group `tables`.

    Raises:
        ConfigError: The columns cannot form a schema.
    """
    if dataset.naming == "criteo":
        schema = criteo_schema(dataset.label)
    elif dataset.sparse:
        schema = Schema(dataset.label, dataset.dense, dataset.sparse)
    else:
        raise ConfigError(
            "dataset.sparse is empty: name the columns that hold ids, "
            'e.g. "dataset.sparse=[user,item]"'
        )
    if isinstance(tables, TablesOfDataset):
        hashed = (tables.id_rule or dataset.id_rule) == "hash"
        rows = set() if hashed else set(schema.sparse)
        shared = [[column, owner] for column, owner in (tables.shared or {}).items()]
    else:
        rows = row_features(tables)
        shared = features_by_table(tables)
    return replace(
        schema,
        hex=schema.hex + dataset.hex,
        integers=tuple(name for name in schema.sparse if name in rows),
        weight=dataset.weight,
        derived=columns_of(dataset, schema.dense, schema.sparse, shared),
        times=dataset.times or {},
        vectors=dataset.vectors or {},
        padding=dataset.padding,
        separator=dataset.separator or {},
        id_weights=dataset.id_weights or {},
        files=dataset.files,
        label_from=dataset.label_from,
    )


def check_sizes(dataset: DataSettings, schema: Schema) -> None:
    """Check that the sizes of tables in the settings fit the sparse columns, or all features.

    Raises:
        ConfigError: A list has fewer or more numbers than columns (an empty or absent list is
            ignored), or a dimension is not for a sparse column.
    """
    for key, values in (("table_rows", dataset.table_rows), ("cardinality", dataset.cardinality)):
        if values and len(values) not in (len(schema.sparse), len(schema.features)):
            raise ConfigError(
                f"dataset.{key} has {len(values)} of the {len(schema.sparse)} numbers needed, "
                "one for each sparse column"
            )
    for name in dataset.table_dims or ():
        if name not in schema.features:
            raise ConfigError(
                f"dataset.table_dims names {name}, which is no sparse column; "
                f"{suggest(name, schema.features)}"
            )


def criteo_schema(label: str | Sequence[str] | None = "label") -> Schema:
    """Return the schema of Criteo's logs, with all their known namings.

    The logs have 13 dense columns and 26 sparse columns of hexadecimal ids. The namings are those
    of torchrec, TorchEasyRec, Merlin/HugeCTR, reczoo, Spark, pandas and NVIDIA's DLRM.

    Args:
        label: The name of the label, or several; a name other than the default has no alternatives.
    """
    return Schema(
        label=label,
        dense=_numbered("I", 1, 13),
        sparse=_numbered("C", 1, 26),
        label_names=("label", "Label", "_c0", "0", "click") if label == "label" else (),
        dense_namings=tuple(
            _numbered(prefix, first, 13)
            for prefix, first in (
                ("int_", 0),
                ("int_", 1),
                ("num_", 0),
                ("num_", 1),
                ("_c", 1),
                ("", 1),
                ("i", 1),
                ("I", 0),
            )
        ),
        sparse_namings=tuple(
            _numbered(prefix, first, 26)
            for prefix, first in (
                ("cat_", 0),
                ("cat_", 1),
                ("_c", 14),
                ("", 14),
                ("c", 1),
                ("C", 0),
            )
        ),
        positional=True,
        hex=_numbered("C", 1, 26),
    )


def _numbered(prefix: str, first: int, count: int) -> Naming:
    return tuple(f"{prefix}{index}" for index in range(first, first + count))


def _find(
    names: Naming, namings: tuple[Naming, ...], present: Sequence[str], file: str
) -> dict[str, str]:
    """Find the columns of one part: canonical name -> own name.

    The naming with the most columns in the file counts.

    Raises:
        DataError: A column is missing.
    """
    if not names:
        return {}
    here = set(present)
    best = max(namings, key=lambda naming: len(here.intersection(naming)))
    missing = [
        (name, column) for name, column in zip(names, best, strict=True) if column not in here
    ]
    if not missing:
        return dict(zip(names, best, strict=True))
    name, column = missing[0]
    candidates = dict.fromkeys(naming[names.index(name)] for naming in namings)
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    if close := alike(column, present):
        hint = meant(close)
    else:
        hint = f"the file has {', '.join(present[:8])}{', ...' if len(present) > 8 else ''}"
    raise DataError(f"{file}: no column for {name}{more}; tried {', '.join(candidates)}; {hint}")
