"""Measure the effect of quantised tables on a model's scores without storing the tables. The probe
holds only the table rows that its samples read.

    batches --RecordingStore--> rows that they read --checkpoint--> fp32 rows --stored, read-->
    values as they would be served --model--> outputs --task--> metrics, scores
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recapp.engine.read_only_store import KeyedStore, ReadOnlyStore
from recapp.engine.row_store import RowStore, StoredGroup
from recapp.inference.placed_model import one_rank
from recapp.inference.storage import stored, values
from recapp.kernels.links import Links
from recapp.sparse.batch import Batch
from recapp.sparse.transfer import to_host
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tasks.task import Task

RowsOf = Callable[[EmbeddingConfig, Tensor], Tensor]
"""Returns rows [U, D] of a static table by their numbers, or of a dynamic table by sorted
positions.
"""


class _RecordingStore(ReadOnlyStore):
    """A store without rows that records the rows a model would read. Its results are undefined."""

    finds_rows = True

    def __init__(self, group: StoredGroup) -> None:
        dtype = group.layout.groups[group.number].dtype
        super().__init__(group, torch.zeros(0, group.width, dtype=dtype))
        self._seen: dict[int, list[Tensor]] = {}

    def locate(self, row_N: Tensor, strip_N: Tensor | None = None, trains: bool = False) -> Tensor:
        """Record the rows."""
        for strip in [0] if strip_N is None else _distinct(strip_N).tolist():
            own = row_N if strip_N is None else row_N[strip_N == strip]
            self._seen.setdefault(strip, []).append(_distinct(to_host(own.long())))
        return row_N

    def pool(
        self, links: Links, target: Tensor, scale: float = 1.0, in_lines: bool = False
    ) -> None:
        """Leave the target as it is."""

    def seen(self, strip: int) -> Tensor:
        """Return the recorded rows, ascending; for a static group, those of all strips together."""
        parts = self._seen.get(strip, [])
        return _distinct(torch.cat(parts)) if parts else torch.empty(0, dtype=torch.int64)


class Measured(NamedTuple):
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

    def largest_change(self, other: "Measured") -> float:
        """Return the largest difference between two scores of the same sample."""
        if not self.scores.numel():
            return 0.0
        return float((self.scores - other.scores).abs().max())


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
        self._held: dict[str, Tensor] = {}
        seen: dict[int, _RecordingStore] = {}
        cpu = torch.device("cpu")

        def record(group: StoredGroup) -> RowStore:
            found = seen[len(seen)] = _RecordingStore(group)
            return found

        recording = one_rank(build(), cpu, record)
        load_dense(recording)
        for batch in self.batches:
            with torch.no_grad():
                recording(batch)
        stores = iter(seen.values())

        def hold(group: StoredGroup) -> RowStore:
            return self._store(group, next(stores), rows_of)

        self.model = one_rank(build(), cpu, hold)
        load_dense(self.model)

    @torch.no_grad()
    def measure(self, data_types: Mapping[str, DataType]) -> Measured:
        """Score the samples with some tables in the given data types and the others as trained.

        Raises:
            ValueError: A table has values that its data type cannot hold.
        """
        changed = {name: data_types[name] for name in self._held if name in data_types}
        try:
            for name, data_type in changed.items():
                self._held[name].copy_(_as_served(name, self._trained[name], data_type))
            outputs = [self._outputs(batch) for batch in self.batches]
        finally:
            for name in changed:
                self._held[name].copy_(self._trained[name])
        measures = self.task.storage_measures
        metrics = {one.name: self.task.make_metric(one.name, False) for one in measures}
        for of_batch, batch in zip(outputs, self.batches, strict=True):
            self.task.update(metrics, of_batch, batch)
        found = {name: float(metric.compute()) for name, metric in metrics.items()}
        last = measures[-1]
        cost = -found[last.name] if last.better == "max" else found[last.name]
        scores = [
            output.score(torch.cat([of_batch[output.name] for of_batch in outputs]).double())
            for output in self.task.outputs
        ]
        return Measured(found, cost, torch.stack(scores))

    def _outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of a batch by name, each float32 [B]."""
        named = self.task.named(self.model(batch), batch.rows, type(self.model).__name__)
        return {name: values_B.float() for name, values_B in named.items()}

    def _store(self, group: StoredGroup, recorded: _RecordingStore, rows_of: RowsOf) -> RowStore:
        """Return a store of the rows that were read."""
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
            self._held[name] = rows_UD[end - len(part) : end]
        number_R = torch.cat(numbers)
        return KeyedStore(group, rows_UD, number_R, [0, *ends] if dynamic else [0, len(number_R)])


def _as_served(name: str, trained: Tensor, data_type: DataType) -> Tensor:
    """Store the values of a table, and return the values as read back.

    Raises:
        ValueError: The table has values that the data type cannot hold.
    """
    try:
        made = values(stored(trained, data_type), trained.dtype)
    except ValueError as error:
        raise ValueError(f"table {name}: {error}") from error
    if bool((trained.isfinite() & ~made.isfinite()).any()):
        raise ValueError(f"table {name}: there are values that {data_type} cannot hold")
    return made


def _distinct(numbers: Tensor) -> Tensor:
    found: Tensor = numbers.unique()  # type: ignore[no-untyped-call]
    return found
