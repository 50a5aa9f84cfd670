"""HugeCTR's model. A whole training program runs after a change of its import:

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
`fit` converts the program to settings and runs `python -m recapp.train` with them
(`recapp/compat/hugectr/program.py`).
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from recapp.compat.hugectr.arguments import UnknownNameError
from recapp.compat.hugectr.collection import EmbeddingCollection, EmbeddingCollectionConfig
from recapp.compat.hugectr.graph import DenseLayer, connected, parameter_counts
from recapp.compat.hugectr.layers import Shape, shape_text
from recapp.compat.hugectr.program import Fit, Program, train
from recapp.compat.hugectr.reader import DataReaderParams, Input
from recapp.compat.hugectr.solver import CreateSolver, OptParams
from recapp.errors import ConfigError, suggest

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
        layers = [added.layer for added in self._layers]
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
            made = lookup.table.num_embeddings * lookup.table.embedding_dim
            rows += _rows("Embedding", [lookup.feature], [lookup.output], shapes, made)
        for added, parameters in zip(self._layers, self._parameters, strict=True):
            layer = added.layer
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
        wanted = Fit(num_epochs, max_iter, display, eval_interval, snapshot, snapshot_prefix)
        wanted.check(repeats=self._solver.repeat_dataset)
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
            [added.layer for added in self._layers],
        )
        train(program, wanted)
        self._trained = True


def _rows(
    kind: str, inputs: Sequence[str], outputs: Sequence[str], shapes: Mapping[str, Shape], size: int
) -> list[tuple[str, ...]]:
    """Return the lines of a layer in the summary: one for each input or output, side by side."""
    return [
        (
            "" if k else kind,
            read,
            made,
            shape_text(shapes[made]) if made else "",
            "" if k or not size else f"{size:,}",
        )
        for k, (read, made) in enumerate(zip_longest(inputs, outputs, fillvalue=""))
    ]
