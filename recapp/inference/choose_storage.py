"""Choose the stored data type of each table: by settings, or by a budget of the task's
`storage_metric`, for clicks the normalised entropy.

quantize=int8 quantize_tables={C3: int4}   by settings
quantize=auto budget_ne=0.0001             measure each table alone in 16, 8 and 4 bits, sort by
                                           saved bytes per loss, and take as many as all
                                           together stay within the budget
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from recapp.console import note
from recapp.errors import CheckpointError, ConfigError, suggest
from recapp.inference.storage import row_bytes
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.named_collections import of_all_members

if TYPE_CHECKING:
    from recapp.inference.probe import Probe

_NO_LOSS = 1e-9  # smallest loss: by chance a table may even seem to gain


class _Move(NamedTuple):
    """Storing one table in fewer bits.

    Args:
        table: Its name.
        storage: The data type to store it in.
        saved: The bytes saved.
        loss: The loss of the metric.
    """

    table: str
    storage: DataType
    saved: int
    loss: float


def storage_of(table: EmbeddingConfig, quantize: str) -> DataType:
    """Return the stored data type of a table under a `quantize` setting; narrower floats stay."""
    if quantize == "none":
        return table.data_type
    wanted = DataType(quantize)
    half = (DataType.FP16, DataType.BF16)
    return table.data_type if wanted in half and table.data_type in half else wanted


def storage_by_hand(
    tables: Sequence[EmbeddingConfig], of_tables: Mapping[str, Any]
) -> dict[str, DataType]:
    """Return the stored data types that `quantize_tables` sets, by table.

    Args:
        tables: The tables.
        of_tables: none, fp16, int8 or int4, by name or glob; a name wins over a glob, and the last
            glob over earlier ones.

    Raises:
        ConfigError: A table is unknown.
    """
    names = [t.name for t in tables]
    for pattern in of_tables:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"quantize_tables.{pattern}: the model has no such table; {suggest(pattern, names)}"
            )
    of_tables = of_all_members(of_tables, tables)
    storages = {}
    for table in tables:
        values = [v for pattern, v in of_tables.items() if fnmatchcase(table.name, pattern)]
        if values:
            storages[table.name] = storage_of(table, of_tables.get(table.name, values[-1]))
    return storages


def least_storage(
    tables: Sequence[EmbeddingConfig],
    rows: Mapping[str, int],
    probe: "Probe",
    budget_ne: float,
    fixed: Mapping[str, DataType],
    advance: Callable[[int], None],
) -> dict[str, DataType]:
    """Return the data types that store the tables in the fewest bytes within a budget, by table.

    Args:
        tables: The tables.
        rows: The number of rows of each table.
        probe: Measures the cost of a choice.
        budget_ne: The allowed rise of the cost, all tables together.
        fixed: The data types of tables that are chosen already; their rise counts.
        advance: A callback; called with 1 after each measurement.

    Raises:
        ConfigError: The rows do not determine the metric, or a fixed table cannot be
            stored in its data type.
        CheckpointError: A score is not finite.
    """
    trained = probe.measure({})
    if not bool(trained.scores.isfinite().all()):
        raise CheckpointError(
            "quantize=auto: the checkpoint gives validation rows scores that are not finite: "
            "export another checkpoint"
        )
    before = trained.cost
    title = probe.task.storage_measures[-1].title
    if math.isnan(before):
        raise ConfigError(
            f"quantize=auto: the {title} of the validation rows is not defined (they may have one "
            "class only), so the loss of fewer bits cannot be measured: choose quantize=int8, or "
            "other validation rows"
        )
    try:
        cost = probe.measure(fixed).cost - before
    except ValueError as error:
        raise ConfigError(f"quantize_tables: {error}") from error
    moves = []
    for table in tables:
        for storage in _narrower(table) if table.name not in fixed else ():
            if (move := _tried(table, storage, rows[table.name], probe, before)) is not None:
                moves.append(move)
            advance(1)
    ordered = sorted(moves, key=lambda move: move.saved / max(move.loss, _NO_LOSS), reverse=True)
    if cost > budget_ne:
        note(
            f"the tables of quantize_tables alone cost {cost:.2g} of the {title}, more than "
            f"budget_ne={budget_ne:g}: the other tables get fewer bits only if the sum is within it"
        )
    low = 0
    high = len(ordered)
    while low < high:  # bisect for the most moves that fit the budget: each further move costs more
        middle = (low + high + 1) // 2
        tried = probe.measure({**_taken(ordered[:middle]), **fixed})
        if tried.cost - before <= budget_ne:
            low = middle
        else:
            high = middle - 1
    chosen = {t.name: t.data_type for t in tables}
    return {**chosen, **_taken(ordered[:low]), **fixed}


def measurements(tables: Sequence[EmbeddingConfig], fixed: Mapping[str, DataType]) -> int:
    """Return the number of measurements that `least_storage` reports to `advance`."""
    return sum(len(_narrower(t)) for t in tables if t.name not in fixed)


def _narrower(table: EmbeddingConfig) -> list[DataType]:
    """Return the data types that store a table in fewer bytes than now."""
    dim = table.embedding_dim
    now = row_bytes(table.data_type, dim)
    kinds = (DataType.FP16, DataType.INT8, DataType.INT4)
    return [kind for kind in kinds if row_bytes(kind, dim) < now]


def _tried(
    table: EmbeddingConfig, storage: DataType, rows: int, probe: "Probe", before: float
) -> _Move | None:
    """Measure a table in fewer bits; return None if its values cannot be stored in them."""
    try:
        loss = probe.measure({table.name: storage}).cost - before
    except ValueError as error:
        note(f"quantize=auto: {error}")
        return None
    dim = table.embedding_dim
    saved = rows * (row_bytes(table.data_type, dim) - row_bytes(storage, dim))
    return _Move(table.name, storage, saved, loss)


def _taken(moves: Sequence[_Move]) -> dict[str, DataType]:
    """Return the data type of each table after some moves: its move that saves the most bytes."""
    taken: dict[str, _Move] = {}
    for move in moves:
        if move.table not in taken or move.saved > taken[move.table].saved:
            taken[move.table] = move
    return {name: move.storage for name, move in taken.items()}
