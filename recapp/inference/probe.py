"""Choose the stored data type of each table, by settings or by measurements on a probe, which holds
only the table rows that its samples read.

    quantize=int8 quantize_tables={C3: int4}   by settings
    quantize=auto budget_ne=0.0001             measure each table alone in 16, 8 and 4 bits, sort by
                                               saved bytes per loss, and take as many as all
                                               together stay within the budget of the task's
                                               `storage_metric`, for clicks the normalised entropy

    batches --RecordingStore--> rows that they read --checkpoint--> fp32 rows --stored, read-->
    values as they would be served --model--> outputs --task--> metrics, scores
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recapp.console import note
from recapp.engine.read_only_store import KeyedStore, ReadOnlyStore
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.errors import CheckpointError, ConfigError, suggest
from recapp.inference.held_tables import one_rank, storage_of, stored, values
from recapp.kernels.links import Links
from recapp.planner.rank_memory import row_bytes
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.sparse.transfer import to_host
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.table_settings import of_all_members
from recapp.tasks.task import Task

# Returns rows [U, D] of a static table by their numbers, or of a dynamic table by sorted positions.
RowsOf = Callable[[EmbeddingConfig, Tensor], Tensor]


class _RecordingStore(ReadOnlyStore):
    """A store without rows that records the rows a model would read. Its results are undefined."""

    finds_rows = True

    def __init__(self, group: StoredGroup) -> None:
        dtype = group.layout.groups[group.number].dtype
        super().__init__(group, torch.zeros(0, group.width, dtype=dtype))
        self._seen: dict[int, list[Tensor]] = {}

    def locate(self, row_N: Tensor, strip_N: Tensor | None = None, trains: bool = False) -> Tensor:
        for strip in [0] if strip_N is None else _distinct(strip_N).tolist():
            rows = row_N if strip_N is None else row_N[strip_N == strip]
            self._seen.setdefault(strip, []).append(_distinct(to_host(rows.long())))
        return row_N

    def pool(self, links: Links, target: Tensor, in_lines: bool = False) -> None:
        """Leave the target as it is."""

    def seen(self, strip: int) -> Tensor:
        """Return the recorded rows, ascending; for a static group, those of all strips together."""
        parts = self._seen.get(strip, [])
        return _distinct(torch.cat(parts)) if parts else torch.empty(0, dtype=torch.int64)


class MeasuredChoice(NamedTuple):
    """The metrics and scores under one choice of stored data types.

    Args:
        metrics: The metrics of the task that an export measures; NaN for a metric that the rows do
            not determine.
        cost: The metric that quantisation makes worse, with the sign that makes a rise a loss.
        scores: The scores of each sample, [columns, N].
    """

    metrics: dict[str, float]
    cost: float
    scores: Tensor


class Probe:
    """A model that holds only the table rows that some batches read.

    Args:
        build: Makes the model, with tables on the meta device; each call makes an equal model.
        load_dense: Loads the weights of the dense part.
        batches: The samples, with labels.
        rows_of: Reads rows of a table.
        task: Measures the outputs.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        load_dense: Callable[[nn.Module], None],
        batches: Sequence[Batch],
        rows_of: RowsOf,
        task: Task,
    ) -> None:
        self.batches = list(batches)
        self.task = task
        self._trained: dict[str, Tensor] = {}
        self._rows: dict[str, Tensor] = {}
        seen: dict[int, _RecordingStore] = {}
        cpu = torch.device("cpu")

        def record(group: StoredGroup) -> RowStore:
            store = seen[len(seen)] = _RecordingStore(group)
            return store

        recording = one_rank(build(), cpu, record)
        load_dense(recording)
        for batch in self.batches:
            with torch.no_grad():
                recording(batch)
        stores = iter(seen.values())

        self.model = one_rank(build(), cpu, lambda group: self._store(group, next(stores), rows_of))
        load_dense(self.model)

    @torch.no_grad()
    def measure(self, data_types: Mapping[str, DataType]) -> MeasuredChoice:
        """Score the samples with some tables in the given data types and the others as trained.

        Raises:
            ValueError: A table has values that its data type cannot hold.
        """
        changed = {name: data_types[name] for name in self._rows if name in data_types}
        try:
            for name, data_type in changed.items():
                self._rows[name].copy_(_as_served(name, self._trained[name], data_type))
            outputs = [self._outputs(batch) for batch in self.batches]
        finally:
            for name in changed:
                self._rows[name].copy_(self._trained[name])
        measures = self.task.storage_measures
        metrics = {one.name: self.task.make_metric(one.name, False) for one in measures}
        for of_batch, batch in zip(outputs, self.batches, strict=True):
            self.task.update(metrics, of_batch, batch)
        results = {name: float(metric.compute()) for name, metric in metrics.items()}
        last = measures[-1]
        cost = -results[last.name] if last.better == "max" else results[last.name]
        scores = [
            output.score(torch.cat([of_batch[output.name] for of_batch in outputs]).double())
            for output in self.task.outputs
        ]
        return MeasuredChoice(results, cost, torch.stack(scores))

    def _outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of a batch by name, each float32 [B]."""
        named = self.task.named(self.model(batch), batch.rows, type(self.model).__name__)
        return {name: values_B.float() for name, values_B in named.items()}

    def _store(self, group: StoredGroup, recorded: _RecordingStore, rows_of: RowsOf) -> RowStore:
        layout = group.layout
        dtype = layout.groups[group.number].dtype
        dynamic = layout.groups[group.number].dynamic
        strips = [i for i, s in enumerate(layout.strips) if s.group == group.number]
        pieces = {p.strip: p for p in group.pieces}
        numbers: list[Tensor] = []
        parts: list[Tensor] = []
        for number, strip in enumerate(strips):
            table = layout.tables[layout.strips[strip].table]
            piece = pieces[strip]
            number_U = recorded.seen(number if dynamic else 0)
            if not dynamic:
                inside = (number_U >= piece.base) & (number_U < piece.base + len(piece.rows))
                number_U = number_U[inside]
            numbers.append(number_U)
            self._trained[table.name] = rows_of(table, number_U - (0 if dynamic else piece.base))
            parts.append(self._trained[table.name])
        rows_UD = torch.cat(parts).to(dtype)
        ends = torch.tensor([len(p) for p in parts]).cumsum(0).tolist()
        for strip, end, part in zip(strips, ends, parts, strict=True):
            name = layout.tables[layout.strips[strip].table].name
            self._rows[name] = rows_UD[end - len(part) : end]
        number_R = torch.cat(numbers)
        return KeyedStore(group, rows_UD, number_R, [0, *ends] if dynamic else [0, len(number_R)])


def _as_served(name: str, trained: Tensor, data_type: DataType) -> Tensor:
    """Store the values of a table, and return the values as read back.

    Raises:
        ValueError: The table has values that the data type cannot hold.
    """
    try:
        result = values(stored(trained, data_type), trained.dtype)
    except ValueError as error:
        raise ValueError(f"table {name}: {error}") from error
    if bool((trained.isfinite() & ~result.isfinite()).any()):
        raise ValueError(f"table {name}: there are values that {data_type} cannot hold")
    return result


def _distinct(numbers: Tensor) -> Tensor:
    return numbers.unique()  # type: ignore[no-any-return, no-untyped-call]


# ---- the choice

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
    probe: Probe,
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
    trained_types = {t.name: t.data_type for t in tables}
    return {**trained_types, **_taken(ordered[:low]), **fixed}


def measurements(tables: Sequence[EmbeddingConfig], fixed: Mapping[str, DataType]) -> int:
    """Return the number of measurements that `least_storage` reports to `advance`."""
    return sum(len(_narrower(t)) for t in tables if t.name not in fixed)


def _narrower(table: EmbeddingConfig) -> list[DataType]:
    dim = table.embedding_dim
    now = row_bytes(table.data_type, dim)
    kinds = (DataType.FP16, DataType.INT8, DataType.INT4)
    return [kind for kind in kinds if row_bytes(kind, dim) < now]


def _tried(
    table: EmbeddingConfig, storage: DataType, rows: int, probe: Probe, before: float
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
    best: dict[str, _Move] = {}
    for move in moves:
        if move.table not in best or move.saved > best[move.table].saved:
            best[move.table] = move
    return {name: move.storage for name, move in best.items()}
