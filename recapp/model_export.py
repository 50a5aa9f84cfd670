"""Export a checkpoint as an artefact: table by table, in bounded memory, with measurements.

    checkpoint --TrainedTables--> rows --RowWriter--> rows/*.bin
               --meta.pt--------> dense.safetensors
    validation rows --Probe--> loss of each width (report), widths of tables (quantize=auto)
    the finished files --load--> outputs of the example -> manifest.json, written last

All files are written into a directory with another name. One rename gives the artefact its name.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recapp import console
from recapp.cli.stored_recipe import recipe_of_stored
from recapp.dataset.decode_bags import padding_id
from recapp.dataset.schema import DERIVED
from recapp.dataset.sequential_rows import example_rows, plain_rows, table_of
from recapp.dataset.source import Source
from recapp.engine.sharded_collection import (
    embedding_collections,
    sharded_collections,
    without_tables,
)
from recapp.errors import CheckpointError, ConfigError
from recapp.inference.compiled import (
    COMPILED,
    NotCompiled,
    check_compiled,
    compile_dense,
    load_compiled,
)
from recapp.inference.export_settings import AUTO, Export
from recapp.inference.held_tables import (
    QUANTIZE,
    RowWriter,
    TrainedTables,
    mapped_tables,
    one_rank,
    storage_of,
)
from recapp.inference.probe import (
    MeasuredChoice,
    Probe,
    least_storage,
    measurements,
    storage_by_hand,
)
from recapp.planner.rank_memory import row_bytes
from recapp.run.model import build_model, load_dense, meta_model, raw_rows_of
from recapp.run.recipe import Train
from recapp.run.run_rows import (
    made_up_rows,
    validation_batches,
    validation_source,
)
from recapp.run.trained_model import with_columns_of
from recapp.settings.records import to_plain
from recapp.settings.uris import path_to
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.manifest import DENSE, ArtefactManifest, to_json
from recapp.stored.operations import MANIFEST
from recapp.stored.plain_parts import (
    DERIVED_FILE,
    dense_bytes,
    state_must_fit,
    unfinished,
    written_values,
)
from recapp.stored.store import files_at, write_file
from recapp.stored.stored_model import Artefact, Checkpoint
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.config import DataType, EmbeddingConfig
from recapp.tables.initial import start_values
from recapp.tables.positions import keys_of
from recapp.tasks.task import Task

BUDGET_NE = 1e-4
EXAMPLE_ROWS = 16
EXPORTED = "exported"
# The names of the changes of metrics in a report; the others are `<metric>_change`.
CHANGES = {"normalized_entropy": "ne_change"}
OF_THE_MODEL = ("dataset", "tables", "model", "task")  # settings


def export_model(
    path: str | Path,
    output: str | Path,
    options: Export | None = None,
    recipe: Train | None = None,
    trust: Sequence[str] = (),
) -> dict[str, Any]:
    """Export a checkpoint as an artefact.

    Args:
        path: The checkpoint.
        output: The directory of the artefact.
        options: The settings of storage and measurements; None stores tables as trained.
        recipe: The recipe of the model and its data, checked for trust; None takes the checkpoint's
            own.
        trust: Your packages whose classes the settings may name.

    Returns:
        The report: `tables`, a row of results for each; `widths`, the metrics of each width on
            `validation_rows`; `bytes` of the artefact; its `name` and `version`.

    Raises:
        ConfigError: An option is wrong, or `output` exists or lies in the checkpoint.
        CheckpointError: The checkpoint does not exist, or is damaged.
        ArtefactError: The artefact cannot be written.
    """
    options = options or Export()
    output = path_to(output)
    if path_to(path).resolve() in output.resolve().parents:
        raise ConfigError(
            f"output={output}: lies in the directory of the checkpoint, and would be deleted with "
            "it: choose a directory beside the checkpoint"
        )
    with Checkpoint.at(path, selector=lambda manifest: manifest.files) as snapshot:
        if recipe is None:
            recipe = recipe_of_stored(snapshot.manifest, trust)
        recipe = with_columns_of(recipe, snapshot)
        with unfinished(output, options.overwrite) as folder:
            name = options.name or output.absolute().name
            return _Exporter(snapshot, recipe, options, folder, name).run()


class _Exporter:
    """The steps of an export, and the objects that they share."""

    def __init__(
        self,
        snapshot: Checkpoint,
        recipe: Train,
        options: Export,
        folder: Path,
        name: str,
    ) -> None:
        self.recipe = recipe
        self.options = options
        self.folder = folder
        self.name = name
        self.snapshot = snapshot
        self.trained = TrainedTables(snapshot, folder)
        model = build_model(self.recipe)
        self.tables: list[EmbeddingConfig] = embedding_tables(model)
        self.seeds = {t.name: c.seed for _, c in embedding_collections(model) for t in c.tables()}
        self.dense = snapshot.dense()
        self.positions = {
            t.name: positions
            for t in self.tables
            if (positions := self.trained.positions(t)) is not None
        }
        self.rows = {
            t.name: len(self.positions.get(t.name, range(t.num_embeddings))) for t in self.tables
        }
        self.source = validation_source(recipe)

    def run(self) -> dict[str, Any]:
        """Write all files, and return the report."""
        data_types = self._storage_by_hand()
        report: dict[str, Any] = {"widths": [], "validation_rows": 0}
        if self.source is not None and self.options.report_rows:
            probe = self._probe(self.source)
            if self.options.quantize == AUTO:
                data_types = self._least(probe)
            report["validation_rows"] = sum(batch.rows for batch in probe.batches)
            report["widths"] = _width_rows(self.tables, self.rows, data_types, probe)
        elif self.options.quantize == AUTO:
            raise ConfigError(
                "quantize=auto: there are no validation rows to measure tables on: set "
                "dataset.val_path, or choose quantize=int8"
            )
        report["tables"] = _table_rows(self.tables, self.rows, data_types)
        with RowWriter(self.folder) as writer:
            self._write_tables(writer, data_types)
            files = writer.finish()
        artefact = self._finish(writer, files, report)
        return {"name": self.name, "bytes": artefact.bytes, **report}

    def _storage_by_hand(self) -> dict[str, DataType]:
        quantize = "none" if self.options.quantize == AUTO else self.options.quantize
        by_hand = storage_by_hand(self.tables, self.options.quantize_tables or {})
        return {t.name: by_hand.get(t.name, storage_of(t, quantize)) for t in self.tables}

    def _probe(self, source: Source) -> Probe:
        batches = validation_batches(source, self.recipe, self.options.report_rows)
        console.note("measuring the loss of each width on validation rows ...")
        return Probe(
            partial(build_model, self.recipe),
            self._load_dense,
            batches,
            self._rows_of,
            self.recipe.built_task,
        )

    def _least(self, probe: Probe) -> dict[str, DataType]:
        """Return the storage of tables that needs the fewest bytes within the budget."""
        budget = BUDGET_NE if self.options.budget_ne is None else self.options.budget_ne
        fixed = storage_by_hand(self.tables, self.options.quantize_tables or {})
        with console.progress("trying tables", measurements(self.tables, fixed)) as advance:
            return least_storage(self.tables, self.rows, probe, budget, fixed, advance)

    def _rows_of(self, table: EmbeddingConfig, numbers: Tensor) -> Tensor:
        """Return rows of a table: by number, or by key for a dynamic table. A key without a row
        gets its start value.
        """
        with self.trained.rows(table) as rows:
            if table.dynamic is None:
                return rows[numbers]
            positions = self.positions[table.name]
            cols = range(table.embedding_dim)
            dtype = table.data_type.dtype
            values = start_values(keys_of(numbers), table, self.seeds[table.name], cols, dtype)
            values = values.to(dtype)
            at = torch.searchsorted(positions, numbers).clamp(max=max(len(positions) - 1, 0))
            if len(positions):
                known = positions[at] == numbers
                values[known] = rows[at[known]]
            return values

    def _load_dense(self, model: nn.Module) -> None:
        with state_must_fit("the dense part", "model"), without_tables(sharded_collections(model)):
            model.load_state_dict(self.dense)

    def _write_tables(self, writer: RowWriter, data_types: Mapping[str, DataType]) -> None:
        sizes = {
            t.name: self.rows[t.name] * t.embedding_dim * t.data_type.dtype.itemsize
            for t in self.tables
        }
        with console.progress("exporting tables, MB", sum(sizes.values()) >> 20) as advance:
            for table in self.tables:
                seed = self.seeds[table.name]
                positions = self.positions.get(table.name)
                with self.trained.rows(table) as rows:
                    writer.add(table, rows, data_types[table.name], positions, seed)
                advance(sizes[table.name] >> 20)

    def _finish(
        self, writer: RowWriter, files: dict[str, Mapping[str, Any]], report: dict[str, Any]
    ) -> ArtefactManifest:
        """Write the small files and the manifest."""
        manifest = self.snapshot.manifest
        files[DENSE] = write_file(self.folder / DENSE, dense_bytes(self.dense))
        example = self._example()
        schema = self.recipe.schema
        info: dict[str, Any] = {
            "name": self.name,
            "made": _made(self.snapshot),
            "metrics": manifest.metrics,
            "features": {
                "dense": list(schema.dense),
                "sparse": list(schema.sparse),
                "text": {name: str(schema.text_ids(name)) for name in schema.sparse},
                "transform": self.recipe.dataset.dense_transform,
                **({} if schema.lists is None else {"lists": sorted(schema.lists)}),
                **_lists_of("times", "unit", schema.times),
                **_lists_of("vectors", "width", schema.vectors),
                **_lists_of("padding", "id", {n: padding_id(schema, n) for n in schema.sparse}),
                **_lists_of("separator", "text", schema.separator),
                **_lists_of("id_weights", "column", schema.id_weights),
                **self._derived(files),
            },
            "lookups": _lookups(build_model(self.recipe)),
            "ids": schema.id_encoding(),
            "example": example,
            **({"conversions": made} if (made := manifest.info.get("conversions")) else {}),
            # a command line may have changed the model
            "config": {
                **manifest.config,
                **{key: to_plain(getattr(self.recipe, key)) for key in OF_THE_MODEL},
            },
            "report": report,
        }
        described = ArtefactManifest(self.folder, info, files, tuple(writer.tables))
        artefact = Artefact.of(described)
        model = meta_model(described, self.recipe)
        one_rank(model, torch.device("cpu"), mapped_tables(artefact).make_store)
        load_dense(artefact, model)
        batch = raw_rows_of(self.recipe).batch(table_of(example, schema))
        outputs = self._outputs(model, batch)
        info["columns"] = [
            {"name": one.column, "output": one.name, "activation": one.activation}
            for one in self.recipe.built_task.outputs
        ]
        info["outputs"] = {
            name: [float(x) for x in values.double()] for name, values in outputs.items()
        }
        info["compiled"] = self._compiled(described, model, files, batch, outputs)
        write_file(self.folder / MANIFEST, to_json(described).encode())
        return described

    def _derived(self, files: dict[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Write the fitted values of derived columns, and return their entry of the manifest."""
        if not self.recipe.schema.derived:
            return {}
        raw, lines = written_values(self.recipe.schema.derived)
        files[DERIVED_FILE] = write_file(self.folder / DERIVED_FILE, raw)
        return {DERIVED: lines}

    def _example(self) -> list[dict[str, Any]]:
        schema = self.recipe.schema
        if self.source is None:
            return plain_rows(made_up_rows(schema, embedding_lookups(build_model(self.recipe))))
        return plain_rows(example_rows(self.source, schema, EXAMPLE_ROWS))

    def _compiled(
        self,
        described: ArtefactManifest,
        model: nn.Module,
        files: dict[str, Mapping[str, Any]],
        batch: Batch,
        outputs: Mapping[str, Tensor],
    ) -> dict[str, Any] | None:
        """Write the compiled dense part, and return its entry in the manifest. If compiling fails,
        print why and return None.
        """
        if not self.options.compile:
            return None
        console.note(
            "compiling the dense part (half a minute or more; compile=false leaves it out) ..."
        )
        try:
            dense = len(self.recipe.schema.numbers)
            raw, entry = compile_dense(model, self.recipe.built_task, dense)
            files[COMPILED] = write_file(self.folder / COMPILED, raw)
            compiled = load_compiled(Artefact.of(described), entry, model)
            entry["largest_difference"] = check_compiled(compiled, outputs, batch)
        except NotCompiled as error:
            files_at(self.folder).remove(self.folder / "compiled")
            files.pop(COMPILED, None)
            console.note(f"the artefact has no compiled dense part: {error}")
            return None
        return entry

    def _outputs(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of the example by name, computed from the written files."""
        with torch.no_grad():
            result = model(batch)
        outputs = self.recipe.built_task.named(result, batch.rows, type(model).__name__)
        if not all(bool(torch.isfinite(values).all()) for values in outputs.values()):
            raise CheckpointError(
                f"checkpoint {self.snapshot.path} gives scores that are not finite for the rows of "
                "the example: export another checkpoint"
            )
        return outputs


def _made(snapshot: Checkpoint) -> dict[str, Any]:
    """Return the origin of an artefact: checkpoint and versions."""
    manifest = snapshot.manifest
    return {
        "recapp": version("recapp"),
        "torch": torch.__version__,
        "checkpoint": snapshot.path.name,
        "identity": f"{manifest.identity:08x}",
        "step": manifest.step,
    }


def _lists_of(entry: str, key: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of the features for columns with a value each, if there are any."""
    values = {name: value for name, value in columns.items() if value is not None}
    lines = [{"name": name, key: value} for name, value in values.items()]
    return {entry: lines} if lines else {}


def _lookups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the lookups of the tables, as plain data for programs in any language."""
    return [
        {
            "table": x.table.name,
            "feature": x.feature,
            "output": x.output,
            "pooling": str(x.pooling),
            "hotness": x.hotness,
            "truncates": x.truncates,
        }
        for x in embedding_lookups(model)
    ]


# ---- the report


def _table_rows(
    tables: Sequence[EmbeddingConfig], rows: Mapping[str, int], data_types: Mapping[str, DataType]
) -> list[dict[str, Any]]:
    """Return a row of results for each table.

    Args:
        tables: The tables, as they were trained.
        rows: The number of rows of each table.
        data_types: The storage type of each table.
    """
    results = []
    for t in tables:
        before = rows[t.name] * row_bytes(t.data_type, t.embedding_dim)
        after = rows[t.name] * row_bytes(data_types[t.name], t.embedding_dim)
        results.append(
            {
                "table": t.name,
                "rows": rows[t.name],
                "dim": t.embedding_dim,
                "trained": str(t.data_type),
                "bytes_before": before,
                "stored": str(data_types[t.name]),
                "bytes_after": after,
            }
        )
    return results


def _width_rows(
    tables: Sequence[EmbeddingConfig],
    rows: Mapping[str, int],
    exported_types: Mapping[str, DataType],
    probe: Probe,
) -> list[dict[str, Any]]:
    """Measure each width and the chosen storage, and return a row of results for each."""
    ways = {width: {t.name: storage_of(t, width) for t in tables} for width in QUANTIZE}
    ways[EXPORTED] = dict(exported_types)
    before = probe.measure({})
    results = []
    for name, data_types in ways.items():
        size = sum(rows[t.name] * row_bytes(data_types[t.name], t.embedding_dim) for t in tables)
        try:
            after = probe.measure(data_types)
        except ValueError as error:
            console.note(f"quantize={name} is not measured: {error}")
            continue
        results.append({"quantize": name, "bytes": size, **_changes(after, before, probe.task)})
    return results


def _changes(after: MeasuredChoice, before: MeasuredChoice, task: Task) -> dict[str, Any]:
    """Return metrics and changes; numbers that JSON cannot hold become None."""
    last = task.storage_measures[-1].name
    apart = (after.scores - before.scores).abs()
    numbers = {
        **after.metrics,
        change_of(last): after.metrics[last] - before.metrics[last],
        "largest_change": float(apart.max()) if apart.numel() else 0.0,
    }
    return {name: x if math.isfinite(x) else None for name, x in numbers.items()}


def change_of(metric: str) -> str:
    """Return the name of the change of a metric in a report."""
    return CHANGES.get(metric, f"{metric}_change")
