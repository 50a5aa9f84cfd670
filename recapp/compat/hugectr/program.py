"""Convert a HugeCTR program to settings of `recapp.train`, and run the training.

    RUN/program/experiment/program.yaml    data, length, metrics
    RUN/program/model/program.yaml         layers, and likewise tables, optimizer, callbacks
    RUN/program/plan.yaml                  the sharding plan, if the program has one
        -> python -m recapp.train --config-dir RUN/program experiment=program

Ranks read these settings and do not run the program, so a program needs no
`if __name__ == "__main__"`. A user who types the line above trains the same model again.

HugeCTR's model. A whole training program runs after a change of its import:

    import recapp.hugectr as hugectr

    solver = hugectr.CreateSolver(batchsize=65536, lr=0.5, vvgpu=[[0, 1]], ...)
    model = hugectr.Model(solver, reader, optimizer)
    model.add(hugectr.Input(...))
    model.add(embedding_collection)
    model.add(hugectr.DenseLayer(hugectr.Layer_t.ReLU, ["fc1"], ["relu1"]))
    model.compile()
    model.summary()
    model.fit(max_iter=1000, display=100, eval_interval=100)

`compile` connects the layers and checks their shapes; it reads no data and allocates no memory.
`fit` converts the program to settings and runs `python -m recapp.train` with them.
"""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from enum import Enum
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import yaml  # type: ignore[import-untyped]

from recapp.compat.hugectr.collection import EmbeddingCollection, EmbeddingCollectionConfig
from recapp.compat.hugectr.graph import (
    DenseLayer,
    GraphLayer,
    Shape,
    connected,
    parameter_counts,
    shape_text,
    to_plain,
)
from recapp.compat.hugectr.program_settings import (
    Columns,
    CreateSolver,
    DataReaderParams,
    Input,
    OptParams,
    columns_of,
    first_key,
)
from recapp.compat.hugectr.words import UnknownNameError, check_fields
from recapp.console import note
from recapp.errors import ConfigError, suggest
from recapp.processes.rank_environment import external_rank, new_directory, shared_run_directory
from recapp.processes.stopping import SIGNALS, die_with_parent
from recapp.settings.values import Natural, in_quotes, literal
from recapp.settings.whole_file import write_whole
from recapp.sharding.plan_file import write_plan
from recapp.sharding.sharding_plan import PlannedFor
from recapp.tables.config import EmbeddingBagConfig, TableLookup
from recapp.tables.positions import DYNAMIC

NAME = "program"  # the name of every option that this file writes
ODD = "'\"{}$\\"  # have a special meaning to Hydra or in names of checkpoints


@dataclass(frozen=True)
class FitCall:
    """The arguments of `Model.fit`: the length of training, and the files to write."""

    num_epochs: Natural
    max_iter: Natural
    display: Natural
    eval_interval: Natural
    snapshot: Natural
    snapshot_prefix: Annotated[str, ""]  # may be empty

    def check(self, *, repeats: bool) -> None:
        """Check the numbers.

        Args:
            repeats: Whether the run repeats the data until `max_iter`.

        Raises:
            ConfigError: A number is wrong.
        """
        check_fields("Model.fit", self)
        prefix = self.snapshot_prefix  # becomes a part of names of files and settings of Hydra
        odd = sorted({letter for letter in prefix if letter in ODD or not letter.isprintable()})
        if odd:
            raise ConfigError(
                f"Model.fit: snapshot_prefix={prefix}: has {' '.join(map(repr, odd))}: must be a "
                "path without quotes, braces, $ and \\"
            )
        if repeats and not self.max_iter:
            raise ConfigError("Model.fit: max_iter=0: must be at least 1 with repeat_dataset=True")
        if repeats and self.num_epochs:
            raise ConfigError(
                f"Model.fit: num_epochs={self.num_epochs}: with repeat_dataset=True max_iter "
                "sets the length: give max_iter alone, or repeat_dataset=False"
            )
        if not repeats and not self.num_epochs:
            raise ConfigError(
                "Model.fit: num_epochs=0: must be at least 1 with repeat_dataset=False"
            )


@dataclass(frozen=True)
class Program:
    """The parts of a compiled program."""

    solver: CreateSolver
    reader: DataReaderParams
    opt_params: OptParams
    read: Input
    tables: EmbeddingCollection
    layers: Sequence[GraphLayer]


def train(program: Program, fit_arguments: FitCall) -> None:
    """Train in another process, and return after its end.

    Args:
        program: The parts of the program.
        fit_arguments: The arguments of `Model.fit`.

    Raises:
        ConfigError: The program does not fit its data.
        DataError: The data are missing.
        SystemExit: The run failed or was stopped.
    """
    columns = columns_of(program.reader, program.read)
    options = settings_of(program, fit_arguments, columns)
    directory = _run_directory(fit_arguments.snapshot_prefix)
    folder = directory / NAME
    for group, values in options.items():
        file = folder / group / f"{NAME}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        top = "# @package _global_\n" if group == "experiment" else ""
        text = yaml.safe_dump(literal(values), sort_keys=False, allow_unicode=True)
        write_whole(file, top + text)  # the ranks of a launcher all write it at once
    command = [sys.executable, "-m", "recapp.train", "--config-dir", str(folder)]
    command += [f"experiment={NAME}", f"hydra.run.dir={in_quotes(directory)}"]
    if program.tables.plan is not None:
        configs, _ = _as_the_files_have_them(program, columns)
        write_plan(
            replace(program.tables.plan, made_for=PlannedFor(tuple(configs))), folder / "plan.yaml"
        )
        command += ["+plan=file", f"plan.path={in_quotes(folder / 'plan.yaml')}"]
    if not external_rank():
        note(f"the program is {folder}, and runs as: python {shlex.join(command[1:])}")
    code = _run(command, program.solver.visible_gpus())
    if code:
        raise SystemExit(code)


def settings_of(
    program: Program, fit_arguments: FitCall, columns: Columns
) -> dict[str, dict[str, Any]]:
    """Return the settings of a program by group, as plain values.

    Args:
        program: The parts of the program.
        fit_arguments: The arguments of `Model.fit`.
        columns: The columns of the data.

    Raises:
        ConfigError: The keys of a table do not fit those of the data.
    """
    solver = program.solver
    configs, lookups = _as_the_files_have_them(program, columns)
    repeats = solver.repeat_dataset
    groups = ("model", "tables", "optimizer", "callbacks")
    experiment = {
        "defaults": [
            {"override /dataset": "custom"},
            *({f"override /{group}": NAME} for group in groups),
        ],
        "seed": solver.seed,
        "dataset": {
            "path": str(Path(program.reader.source).absolute()),
            "val_path": str(Path(program.reader.eval_source).absolute()),
            "label": columns.label,
            "dense": columns.dense,
            "sparse": columns.keys,
            "dense_transform": "none",
            "id_rule": "error",
            "batch_size": solver.batchsize,
            "val_batch_size": solver.batchsize_eval,
            "lanes": solver.lanes,
            "shuffle_rows": 0,
        },
        "metrics": {"names": solver.metric_names()},
        "trainer": {
            "devices": solver.ranks,
            "max_steps": fit_arguments.max_iter if repeats else None,
            "max_epochs": None if repeats else fit_arguments.num_epochs,
            "val_check_interval": fit_arguments.eval_interval or None,
            "limit_val_batches": solver.max_eval_batches if fit_arguments.eval_interval else 0,
            "log_every_n_steps": fit_arguments.display or 20,
        },
    }
    model = {
        "_target_": "recapp.compat.hugectr.graph.LayerGraph",
        "dense": program.read.dense_name,
        "label": program.read.label_name,
        "layers": [to_plain(layer) for layer in program.layers],
    }
    return {
        "experiment": experiment,
        "model": model,
        "tables": {
            "source": "list",
            "tables": [_table(table) for table in configs],
            "lookups": [_lookup(lookup) for lookup in lookups],
        },
        "optimizer": solver.optimizer(program.opt_params, program.tables.opt_params),
        "callbacks": _callbacks(solver, fit_arguments),
    }


def _as_the_files_have_them(
    program: Program, columns: Columns
) -> tuple[list[EmbeddingBagConfig], list[TableLookup]]:
    """Return the tables and lookups with the columns and first keys of the files."""
    names = program.read.sparse_names
    column_of = dict(zip(names, columns.keys, strict=True))
    configs = {}
    for table in program.tables.tables:
        slots = [names.index(feature) for feature in table.feature_names]
        configs[table.name] = replace(
            table,
            feature_names=[column_of[feature] for feature in table.feature_names],
            min_key=first_key(table, slots, names, program.reader.slot_size_array),
        )
    lookups = [
        replace(x, table=configs[x.table.name], feature=column_of[x.feature])
        for x in program.tables.lookups
    ]
    return list(configs.values()), lookups


def _table(table: EmbeddingBagConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "feature_names": list(table.feature_names),
        "data_type": table.data_type.value,
        "id_rule": table.id_rule.value,
        "init_range": table.init_range,
    }
    if table.dynamic is not None:
        dynamic = asdict(table.dynamic)
        dynamic |= {name: value.value for name, value in dynamic.items() if isinstance(value, Enum)}
        return values | {"num_embeddings": DYNAMIC, "dynamic": dynamic}
    return values | ({"min_key": table.min_key} if table.min_key else {})


def _lookup(lookup: TableLookup) -> dict[str, Any]:
    values: dict[str, Any] = {
        "table": lookup.table.name,
        "feature": lookup.feature,
        "output": lookup.output,
        "combiner": lookup.pooling.value,
    }
    if lookup.hotness is not None:
        values |= {"hotness": lookup.hotness, "truncates": lookup.truncates}
    return values


def _callbacks(solver: CreateSolver, fit_arguments: FitCall) -> dict[str, Any]:
    callbacks: dict[str, Any] = {
        "lines": {
            "_target_": "recapp.compat.hugectr.iteration_lines.IterationLines",
            "every": fit_arguments.display,
        },
        **solver.stops(),
    }
    last = fit_arguments.max_iter if solver.repeat_dataset else None
    if fit_arguments.snapshot and (last is None or fit_arguments.snapshot <= last):
        prefix = Path(fit_arguments.snapshot_prefix).name
        callbacks["snapshot"] = {
            "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
            "every_n_train_steps": fit_arguments.snapshot,
            "save_top_k": -1,
            "filename": f"{prefix or 'snapshot'}_{{step}}",
            "auto_insert_metric_name": False,
        }
    return callbacks


def _run_directory(prefix: str) -> Path:
    if len(Path(prefix).parts) > 1:
        directory = Path(prefix).parent
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Model.fit: snapshot_prefix={prefix}: {directory} cannot be made "
                f"({error.strerror}): name a directory that you may write to"
            ) from error
    elif external_rank() is not None:
        directory = Path(shared_run_directory())
    else:
        now = datetime.now()
        directory = Path(new_directory(f"outputs/{now:%Y-%m-%d}/{now:%H-%M-%S}"))
    return directory.absolute()


def _run(command: Sequence[str], gpus: str | None) -> int:
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    sys.stdout.flush()
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,  # else a terminal's Ctrl-C would reach the process twice
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    with _passing_signals_on(process):
        code = process.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _passing_signals_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    handlers = {
        number: signal.signal(number, lambda number, _: process.send_signal(number))
        for number in SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN  # nohup
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


CHECKPOINTS = "checkpoints are recapp's: python -m recapp.train ckpt_path=DIR goes on from one"
WHOLE_RUNS = "a program trains by fit, which evaluates as it goes"
NOT_THERE: Mapping[str, str] = {
    "construct_from_json": "add layers to the model",
    "dump_incremental_model_2kafka": "models are not sent to Kafka",
    "embedding_dump": CHECKPOINTS,
    "embedding_load": CHECKPOINTS,
    "eval": f"{WHOLE_RUNS}; python -m recapp.eval measures a checkpoint",
    "export_predictions": "python -m recapp.predict scores rows with a checkpoint",
    "freeze_dense": WHOLE_RUNS,
    "freeze_embedding": WHOLE_RUNS,
    "get_current_loss": WHOLE_RUNS,
    "get_data_reader_eval": WHOLE_RUNS,
    "get_data_reader_train": WHOLE_RUNS,
    "get_embedding_training_cache": "tables lie in the memory of ranks",
    "get_eval_metrics": WHOLE_RUNS,
    "get_incremental_model": CHECKPOINTS,
    "get_learning_rate_scheduler": WHOLE_RUNS,
    "graph_to_json": "the settings of a run, resolved.yaml, have its layers",
    "load_dense_optimizer_states": CHECKPOINTS,
    "load_dense_weights": CHECKPOINTS,
    "load_sparse_optimizer_states": CHECKPOINTS,
    "load_sparse_weights": CHECKPOINTS,
    "reset_learning_rate_scheduler": "CreateSolver says the schedule",
    "save_params_to_files": "fit(snapshot=N) keeps a checkpoint every N iterations",
    "set_learning_rate": "CreateSolver says the schedule",
    "set_source": "python -m recapp.train ckpt_path=DIR dataset.path=... goes on with other data",
    "start_data_reading": WHOLE_RUNS,
    "train": WHOLE_RUNS,
    "unfreeze_dense": WHOLE_RUNS,
    "unfreeze_embedding": WHOLE_RUNS,
}
"""HugeCTR's methods that recapp does not have, and the replacement or reason for each."""


class Model:
    """The model of a program.

    Args:
        solver: The length of training, the learning rate and the GPUs.
        reader_params: The data.
        opt_params: The optimiser of the layers, and of tables that name none.

    Raises:
        ConfigError: An argument has the wrong type.
    """

    def __init__(
        self, solver: CreateSolver, reader_params: DataReaderParams, opt_params: OptParams
    ) -> None:
        for name, value, kind, maker in (
            ("solver", solver, CreateSolver, "CreateSolver"),
            ("reader_params", reader_params, DataReaderParams, "DataReaderParams"),
            ("opt_params", opt_params, OptParams, "CreateOptimizer"),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"Model: {name}: must be a result of {maker}")
        self._solver = solver
        self._reader = reader_params
        self._opt_params = opt_params
        self._input: Input | None = None
        self._tables: EmbeddingCollection | None = None
        self._layers: list[DenseLayer] = []
        self._shapes: dict[str, Shape] | None = None
        self._parameters: list[int] = []
        self._trained = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in NOT_THERE:
            text = f"Model.{name}: recapp does not have this method of HugeCTR: {NOT_THERE[name]}"
            raise UnknownNameError(text)
        known = ("add", "compile", "fit", "summary")
        raise UnknownNameError(f"Model.{name}: unknown; {suggest(name, known)}")

    def add(self, part: Input | EmbeddingCollection | EmbeddingCollectionConfig | Any) -> None:
        """Add the input, the embedding collection, or a layer.

        Args:
            part: An `Input`, an embedding collection or a `DenseLayer`.

        Raises:
            ConfigError: The part has another type, or the model already has an input or collection.
        """
        if isinstance(part, EmbeddingCollectionConfig):
            part = part.collection
        if isinstance(part, DenseLayer):
            self._layers.append(part)
        elif isinstance(part, Input) and self._input is None:
            self._input = part
        elif isinstance(part, EmbeddingCollection) and self._tables is None:
            self._tables = part
        elif isinstance(part, Input | EmbeddingCollection):
            raise ConfigError(
                f"Model.add: the model already has an {type(part).__name__}: add only one"
            )
        else:
            raise ConfigError(
                f"Model.add: {part}: must be an Input, an embedding collection or a DenseLayer"
            )
        self._shapes = None

    def compile(
        self, loss_names: Sequence[str] | None = None, loss_weights: Sequence[float] | None = None
    ) -> None:
        """Connect the layers, and check all shapes and the plan.

        Args:
            loss_names: Must be None, because recapp has one loss.
            loss_weights: Must be None, because one loss needs no weights.

        Raises:
            ConfigError: The input or the collection is missing, layers do not connect, shapes do
                not fit, or the plan is for another number of GPUs.
        """
        if loss_names is not None or loss_weights is not None:
            raise ConfigError(
                "Model.compile: loss_names: a model of recapp has one loss: leave it out"
            )
        read, tables = self._parts()
        for lookup in tables.lookups:
            if lookup.feature not in read.sparse_names:
                raise ConfigError(
                    f"lookup {lookup.output}: reads {lookup.feature}, which Input does not declare;"
                    f" {suggest(lookup.feature, read.sparse_names)}"
                )
        plan = tables.plan
        if plan is not None and plan.world_size != self._solver.ranks:
            raise ConfigError(
                f"CreateSolver: vvgpu lists {self._solver.ranks} GPUs and the plan of the "
                f"embedding collection is for {plan.world_size}: list as many, or make a plan for "
                f"{self._solver.ranks}"
            )
        self._solver.visible_gpus()
        self._solver.optimizer(self._opt_params, tables.opt_params)
        layers = [dense_layer.layer for dense_layer in self._layers]
        shapes, makers = connected(self._inputs(), layers)
        self._parameters = parameter_counts(layers, makers)
        self._shapes = shapes

    def _parts(self) -> tuple[Input, EmbeddingCollection]:
        if self._input is None or self._tables is None:
            missing = "an Input" if self._input is None else "an embedding collection"
            raise ConfigError(f"Model: {missing} is missing: model.add it first")
        return self._input, self._tables.sized(self._input.most_keys)

    def _inputs(self) -> dict[str, Shape]:
        read, tables = self._parts()
        vectors = {x.output: (1, x.columns) for x in tables.lookups}
        for name in (read.label_name, read.dense_name):
            if name in vectors:
                raise ConfigError(
                    f"Input: {name}: a lookup has an output of the same name: rename one of them"
                )
        return {read.label_name: (1,), read.dense_name: (read.dense_dim,), **vectors}

    def summary(self) -> None:
        """Print every layer with its inputs, outputs, output shapes and number of parameters.

        Raises:
            ConfigError: The model is not compiled.
        """
        shapes = self._compiled("summary")
        read, tables = self._parts()
        rows: list[tuple[str, ...]] = [
            ("Layer Type", "Input Name", "Output Name", "Output Shape", "Parameters")
        ]
        rows += _rows("Input", [], [read.label_name, read.dense_name], shapes, 0)
        for lookup in tables.lookups:
            size = lookup.table.num_embeddings * lookup.table.embedding_dim
            rows += _rows("Embedding", [lookup.feature], [lookup.output], shapes, size)
        for dense_layer, parameters in zip(self._layers, self._parameters, strict=True):
            layer = dense_layer.layer
            rows += _rows(layer.type, list(layer.bottoms), list(layer.tops), shapes, parameters)
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        rule = "-" * max(map(len, lines))
        print(" Model Summary ".center(len(rule), "="))
        print(f"{lines[0].rstrip()}\n{rule}")
        print("\n".join(line.rstrip() for line in lines[1:]))
        print(rule)

    def _compiled(self, method: str) -> dict[str, Shape]:
        if self._shapes is None:
            raise ConfigError(f"Model.{method}: the model is not compiled: call compile() first")
        return self._shapes

    def fit(
        self,
        num_epochs: int = 0,
        max_iter: int = 2000,
        display: int = 200,
        eval_interval: int = 1000,
        snapshot: int = 10000,
        snapshot_prefix: str = "",
    ) -> None:
        """Train on one rank for each GPU that the solver lists.

        The run's directory is the parent of `snapshot_prefix` if that is a path, or a new one in
        `outputs`. The directory holds checkpoints, curves, metrics and the settings of the program.

        Args:
            num_epochs: The number of epochs, if the solver does not repeat the data.
            max_iter: The number of iterations, if the solver repeats the data.
            display: The iterations between two lines of progress; 0 prints none.
            eval_interval: The iterations between two evaluations; 0 evaluates never.
            snapshot: The iterations between two kept checkpoints; 0 keeps only the last one, which
                a run always keeps.
            snapshot_prefix: The beginning of the names of checkpoints.

        Raises:
            ConfigError: The model is not compiled, or an argument is wrong.
            DataError: The data are missing, or differ from the program's description.
            SystemExit: The run failed, after one line about the error, or was stopped.
        """
        self._compiled("fit")
        read, tables = self._parts()
        fit_arguments = FitCall(
            num_epochs, max_iter, display, eval_interval, snapshot, snapshot_prefix
        )
        fit_arguments.check(repeats=self._solver.repeat_dataset)
        if self._trained:
            raise ConfigError(
                "Model.fit: the model was trained already: python -m recapp.train ckpt_path=DIR "
                "resumes from a checkpoint"
            )
        program = Program(
            self._solver,
            self._reader,
            self._opt_params,
            read,
            tables,
            [dense_layer.layer for dense_layer in self._layers],
        )
        train(program, fit_arguments)
        self._trained = True


def _rows(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], shapes: Mapping[str, Shape], size: int
) -> list[tuple[str, ...]]:
    return [
        (
            "" if k else kind,
            read,
            output,
            shape_text(shapes[output]) if output else "",
            "" if k or not size else f"{size:,}",
        )
        for k, (read, output) in enumerate(zip_longest(inputs, outputs, fillvalue=""))
    ]
