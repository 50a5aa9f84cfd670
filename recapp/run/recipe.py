"""The recipe of a run, its settings as one frozen record, and the objects that follow from them;
and the record of each command: the settings of its file in `conf/` and of the groups it composes.

    argv -> compose (Hydra) -> Recipe                                 train, plan
    path -> stored settings, changed by a command line -> Recipe      eval, predict, export
    Recipe -> rows, model, strategy, plan        one object is passed down

Each group of `conf/` is the record of one package, so mypy knows every attribute of a recipe. A
recipe never changes: facts that are found in data, such as the sizes of tables, make a new recipe
(`sized`). Ranks, manifests and `resolved.yaml` get the plain values of `to_plain`; their keys are
the names of the settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from recapp.dataset.data_settings import (
    DataSettings,
    FileRules,
    ScoringSettings,
    TextSettings,
    file_rules,
)
from recapp.engine.engine_settings import EngineSettings
from recapp.errors import ConfigError
from recapp.inference.export_settings import Export, Quantize
from recapp.optim.named_rules import Rules, with_frozen
from recapp.optim.optimizer_settings import OptimizerSettings
from recapp.planner.planner_settings import Machines, PlannerSettings, PlanSettings
from recapp.processes.launch import LaunchSettings
from recapp.run.constructors import build_task, register_own_types, row_rules
from recapp.serving.limits import Limits
from recapp.settings.records import (
    Constructor,
    absent,
    composed,
    in_hand,
    not_a_setting,
    record,
    to_plain,
)
from recapp.settings.uris import path_to
from recapp.settings.values import Natural, Paths, Positive, Transport, Within, shown
from recapp.stored.operations import CHECKPOINTS
from recapp.tables.config import EmbeddingConfig
from recapp.tables.table_settings import (
    MOST_MEMBERS,
    ListedTables,
    ModelTables,
    TablesOfDataset,
    member_tables,
    named_tables,
    of_all_members,
)
from recapp.tasks.measures import MetricSettings
from recapp.tasks.task import Task
from recapp.trainer.trainer_settings import TrainerSettings

if TYPE_CHECKING:
    from recapp.dataset.schema import Schema, Values


@dataclass(frozen=True, kw_only=True)
class Command:
    """The settings of every command.

    Args:
        format: The format of the printed result.
        choices: The option chosen of each group: `{"model": "dlrm", "plan": "mixed"}`.
    """

    format: Literal["text", "json"] = "text"
    choices: dict[str, str] = not_a_setting()


@dataclass(frozen=True, kw_only=True)
class Recipe(Command):
    """The settings that planning a run needs. A plan on paper has all of them, too.

    Args:
        seed: The seed of start values; of the order of rows, too, unless `dataset.seed` is given.
        ensemble: The number of models that train side by side, each from start values of its own.
        derived_values: The fitted values of derived columns, which are no settings; None before
            they are fitted on training rows or read from a stored model.
        stored_ids: The rules for ids of a stored model (`Schema.id_encoding`), which say which
            features have bags; None without one.

    Raises:
        ConfigError: Settings of two groups conflict.
    """

    seed: Annotated[int, Within(0, 2**63 - 1)] = 1
    ensemble: Annotated[int, Within(1, MOST_MEMBERS)] = 1
    dataset: DataSettings = composed()
    model: Constructor = composed()
    tables: TablesOfDataset | ListedTables = composed()
    optimizer: OptimizerSettings = composed()
    trainer: TrainerSettings = composed()
    engine: EngineSettings = composed()
    launch: LaunchSettings = composed()
    planner: PlannerSettings = composed()
    topology: Machines = composed()
    plan: PlanSettings | None = absent()
    derived_values: Mapping[str, Any] | None = in_hand()
    stored_ids: Mapping[str, Any] | None = in_hand()

    def __post_init__(self) -> None:
        clip = self.trainer.gradient_clip_val
        if self.engine.clip_tables and clip in (None, 0):
            raise ConfigError(
                f"engine.clip_tables=true: trainer.gradient_clip_val={shown(clip)} clips nothing: "
                "set it to the largest norm, or leave engine.clip_tables=false"
            )
        average = self.trainer.average
        if average.kind != "none" and average.every is None and self.optimizer.restart_tables:
            raise ConfigError(
                "trainer.average.every=null: optimizer.restart_tables gives tables start values at "
                "each epoch, and an average over epochs would mix unlike rows: set "
                "trainer.average.every to a number of steps, such as 10"
            )

    @property
    def order_seed(self) -> int:
        """Return the seed of the order of rows."""
        return self.seed if self.dataset.seed is None else self.dataset.seed

    def sized(self, table_rows: list[int] | None, values: "Values | None" = None) -> Self:
        """Return this recipe with the facts that were found in the data.

        Args:
            table_rows: The number of rows of the table of each feature; None changes nothing.
            values: The fitted values of derived columns, by key; None changes nothing.
        """
        recipe = self if values is None else replace(self, derived_values=values)
        if table_rows is None:
            return recipe
        return replace(recipe, dataset=replace(self.dataset, table_rows=tuple(table_rows)))

    @property
    def counts_ids(self) -> bool:
        """Return whether tables get their sizes from the distinct ids of the training rows.

        Hashed and dynamic tables do if neither `cardinality` nor `table_rows` sets a size. For a
        dynamic table the count becomes its expected rows. Generated data are not counted, because
        their `table_rows` define the ids.
        """
        if not isinstance(self.tables, TablesOfDataset):
            return False
        hashed = self.tables.grow or (self.tables.id_rule or self.dataset.id_rule) == "hash"
        data = self.dataset
        return hashed and not (data.table_rows or data.cardinality or data.generate)

    @property
    def most_rows(self) -> int | None:
        """Return the largest size of a table that is sized by its ids; None if tables are dynamic
        or listed.
        """
        tables = self.tables
        return tables.max_rows if isinstance(tables, TablesOfDataset) and not tables.grow else None

    @property
    def without_validation(self) -> str | None:
        """Return the setting that turns validation off, such as `dataset.val_share=0`; None if it
        is on.
        """
        limit = self.trainer.limit_val_batches
        if limit == 0:
            return f"trainer.limit_val_batches={limit}"
        if self.dataset.val_path is None and self.dataset.follow:
            return "dataset.follow=true"
        if self.dataset.val_path is None and self.dataset.share_that_validates == 0:
            return f"dataset.val_share={self.dataset.val_share}"
        return None

    @property
    def length(self) -> tuple[int, int]:
        """Return the number of epochs and the number of steps after which training ends, -1 for no
        limit. Each file that is followed is an epoch, and there is no last one.
        """
        epochs, steps = self.trainer.length
        return -1 if self.dataset.follow else epochs, steps

    @cached_property
    def schema(self) -> "Schema":
        """Return the columns of the data set."""
        from recapp.dataset.schema import schema_of

        schema = schema_of(self.dataset, self.tables).with_stored_lists(self.stored_ids)
        return schema if self.derived_values is None else schema.with_values(self.derived_values)

    @cached_property
    def rules(self) -> Rules:
        """Return the row rule of the tables, or rules by table name or glob.

        Raises:
            ConfigError: The settings make no row rule, or `tables.frozen` names no table.
        """
        rules = row_rules(self.optimizer.sparse)
        rules = of_all_members(rules, self.all_tables) if isinstance(rules, Mapping) else rules
        frozen = self.tables.frozen
        return with_frozen(
            rules, named_tables("tables.frozen", frozen, self.all_tables) if frozen else ()
        )

    @cached_property
    def model_tables(self) -> ModelTables:
        """Return the tables of the model, by collection; of an ensemble those of its first
        member.
        """
        from recapp.run.model_tables import tables_of_model

        return tables_of_model(self.tables, self.dataset, self.schema, self.model)

    @property
    def members(self) -> list[ModelTables]:
        """Return the tables of each member of the ensemble; a single model is its only member."""
        return [member_tables(self.model_tables, number) for number in range(self.ensemble)]

    @property
    def all_tables(self) -> list[EmbeddingConfig]:
        """Return the tables of all members."""
        return [table for member in self.members for table in member.tables]


@dataclass(frozen=True, kw_only=True)
class Train(Recipe):
    """The settings of `python -m recapp.train`. Commands that read a stored model have them, too.

    Args:
        snapshots: The number of last epochs whose models are kept; the mean of their outputs
            predicts.
        checkpoints: The directory of the run's checkpoints; None: one in the run's directory.
        ckpt_path: The stored model; None trains a model from the start.
        resume_data: Whether to refuse (`check`) or to allow (`ignore`) to resume on other data.
        trust: The user's packages whose classes a stored model may name.
        task: The task.
        metrics: The metrics.
        logger: Loggers by name.
        callbacks: Callbacks by name.
    """

    snapshots: Annotated[int, Within(1, MOST_MEMBERS)] = 1
    checkpoints: str | None = None
    ckpt_path: str | None = None
    resume_data: Literal["check", "ignore"] = "check"
    trust: tuple[str, ...] = ()
    task: Constructor = composed()
    metrics: MetricSettings = composed()
    logger: dict[str, Constructor] = field(default_factory=dict)
    callbacks: dict[str, Constructor] = field(default_factory=dict)

    def checkpoints_in(self, job_dir: Path) -> Path:
        """Return the directory of the checkpoints of a run that writes in a directory."""
        return path_to(self.checkpoints) if self.checkpoints else job_dir / CHECKPOINTS

    @cached_property
    def built_task(self) -> Task:
        """Return the task, with the metrics that the group `metrics` chooses and adds.

        Raises:
            ConfigError: The task does not exist, does not know a metric, or a metric does not fit.
        """
        return build_task(self.task, self.metrics.names, self.metrics)

    @cached_property
    def labelled_schema(self) -> "Schema":
        """Return the columns of training and validation rows, with the labels that the task reads.

        Raises:
            ConfigError: The data do not have the labels of the task.
        """
        real, soft = self.built_task.check_labels(self.schema.labels)
        return replace(self.schema, real_labels=real, soft_labels=soft)


@dataclass(frozen=True, kw_only=True)
class Eval(Train):
    """The settings of `python -m recapp.eval`."""

    split: Literal["val", "test"] = "val"


@dataclass(frozen=True, kw_only=True)
class Predict(ScoringSettings, Train):
    """The settings of `python -m recapp.predict`."""

    output: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        ScoringSettings.__post_init__(self)
        Train.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class ExportCommand(Export, Train):
    """The settings of `python -m recapp.export`."""

    output: str | None = None

    def __post_init__(self) -> None:
        Export.__post_init__(self)
        Train.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class OnPaper(Recipe):
    """The settings of `python -m recapp.plan`."""

    statistics: Literal["auto", "assumed"] = "auto"
    out: str | None = None
    as_: Literal["plan", "hugectr"] = "plan"
    indent: Natural | None = None
    path: str | None = None
    ranks: tuple[Positive, ...] = ()
    plans: str | tuple[str, ...] = ()
    weak_batch: Positive = 512


Workloads = Literal["W1", "W1d", "W2", "W2m", "W3", "W4", "W1s", "W2s", "W2c"]
Dlrms = Literal["hugectr_d128", "hugectr_d64", "small"]
Ids = Literal["uniform", "zipf"]


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """The settings of every verb of `python -m recapp.bench`.

    Raises:
        ConfigError: A setting is an empty list.
    """

    rounds: Positive = 7
    round_seconds: Annotated[float, Within(above=0)] = 0.5
    keep_freed_memory: bool = True
    launch: LaunchSettings = composed()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value == ():
                raise ConfigError(f"{name}=[]: give at least one value")


@dataclass(frozen=True, kw_only=True)
class BenchOnRanks(Bench):
    """The settings of the verbs that measure ranks under plans."""

    ranks: Positive = 2
    threads: Positive | None = None
    transport: Transport = "auto"
    backend: Literal["auto", "numba", "triton", "torch"] = "auto"
    plans: str | tuple[str, ...] = "table_wise"


@dataclass(frozen=True, kw_only=True)
class BenchStep(BenchOnRanks):
    """The settings of `bench step`."""

    device: Literal["cpu", "cuda"] = "cpu"
    workload: Workloads | tuple[Workloads, ...] = "W1"
    plans: str | tuple[str, ...] = (
        "table_wise",
        "row_wise",
        "column_wise",
        "data_parallel",
        "mixed",
    )


@dataclass(frozen=True, kw_only=True)
class BenchTrain(BenchOnRanks):
    """The settings of `bench train`."""

    device: Literal["cpu", "cuda"] = "cpu"
    models: Dlrms | tuple[Dlrms, ...] = "small"
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchStrategies(BenchOnRanks):
    """The settings of `bench strategies`.

    Raises:
        ConfigError: The tables are not listed.
    """

    tables: TablesOfDataset | ListedTables = composed()
    plans: str | tuple[str, ...] = BenchStep.plans
    batch_size: Positive | tuple[Positive, ...] = (32, 4096)
    ids: Ids | tuple[Ids, ...] = "uniform"
    bag: Positive = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tables, ListedTables):
            raise ConfigError("tables: strategies needs listed tables: set tables=sample")


@dataclass(frozen=True, kw_only=True)
class BenchData(BenchOnRanks):
    """The settings of `bench data`.

    Raises:
        ConfigError: The logs have other columns than Criteo's.
    """

    models: Dlrms | tuple[Dlrms, ...] = "small"
    dataset: DataSettings = composed()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset.naming != "criteo":
            raise ConfigError(
                f"dataset.naming={self.dataset.naming}: data trains DLRMs over Criteo's columns; "
                "use dataset=generated or dataset=criteo_kaggle dataset.path=DIR"
            )


@dataclass(frozen=True, kw_only=True)
class BenchInference(Bench):
    """The settings of `bench inference`."""

    artefact: str = composed()
    quantize: Quantize | tuple[Quantize, ...] = ("none", "int8")
    batch_size: Positive | tuple[Positive, ...] = (1, 64, 4096)
    threads: Positive | tuple[Positive, ...] = (1, 2)
    compile: bool = True


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """The settings of `python -m recapp.report`."""

    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Data(Command):
    """The settings of every verb of `python -m recapp.data`.

    Args:
        path: The logs.
        file_format: As `dataset.format`, by name.
        text: As `dataset.text`.
        bad_rows: As `dataset.bad_rows`.
    """

    path: Paths | None = None
    file_format: str | None = None
    text: TextSettings = field(default_factory=TextSettings)
    bad_rows: str = "error"

    @property
    def rules(self) -> FileRules:
        """Return how files are read."""
        return file_rules(self.file_format, self.text, self.bad_rows, "bad_rows")

    @property
    def file_settings(self) -> dict[str, Any]:
        """Return those of these settings that are not the default, as they stand in `dataset`."""
        usual = to_plain(TextSettings())
        text = {key: one for key, one in to_plain(self.text).items() if one != usual[key]}
        given = {"format": self.file_format, "text": text, "bad_rows": self.bad_rows}
        return {name: one for name, one in given.items() if one and one != Data.bad_rows}


@dataclass(frozen=True, kw_only=True)
class Inspect(Data):
    """The settings of `data inspect`.

    Raises:
        ConfigError: The name is no name of a file of settings.
    """

    rows: Positive | None = None
    out: str = "inspected"
    name: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.name is not None and not self.name.replace("-", "_").isidentifier():
            raise ConfigError(
                f"name={self.name}: must be letters, digits, _ and -, which dataset=NAME then reads"
            )


@dataclass(frozen=True, kw_only=True)
class Convert(Data):
    """The settings of `data convert`.

    Raises:
        ConfigError: A split lacks its column, or no rows train.
    """

    out: str | None = None
    overwrite: bool = False
    columns: tuple[str, ...] | None = None
    types: dict[str, Literal["int64", "float64", "text", "hex"]] | None = None
    separator: dict[str, str] | None = None
    vocabularies: dict[str, Positive] | None = None
    order: Literal["files", "time", "user"] = "files"
    split: Literal["order", "time", "user"] = "order"
    val_share: Annotated[float, Within(0, below=1)] = 0.0
    test_share: Annotated[float, Within(0, below=1)] = 0.0
    time: str | None = None
    user: str | None = None
    item: str | None = None
    history: Positive | None = None
    negatives: Positive | None = None
    liked: dict[str, float] | None = None
    seed: Natural = 1
    num_threads: Positive | None = None

    def __post_init__(self) -> None:
        if self.history and not (self.user and self.item and self.time and self.split != "order"):
            raise ConfigError(
                f"history={self.history}: name the columns user=, item= and time=, and set "
                "split=time or user, by which no later event is in the history of a training row"
            )
        if self.negatives and not (self.user and self.item):
            raise ConfigError(f"negatives={self.negatives}: name the columns user= and item=")
        if self.order != "files" and not (self.time and (self.user or self.order == "time")):
            raise ConfigError(
                f"order={self.order}: name the column of times, time=COLUMN, and for order=user "
                "that of users, user=COLUMN"
            )
        if self.order != "files" and self.split == "order" and self.val_share + self.test_share:
            raise ConfigError(
                f"order={self.order}: split=order cuts rows in the order of the files: set "
                "split=time or user"
            )
        if (self.split == "time" and not self.time) or (self.split == "user" and not self.user):
            raise ConfigError(f"split={self.split}: name its column, {self.split}=COLUMN")
        if self.val_share + self.test_share >= 1:
            raise ConfigError(
                f"val_share={self.val_share}, test_share={self.test_share}: no rows are left to "
                "train on; choose smaller shares"
            )


@dataclass(frozen=True, kw_only=True)
class Serve(Limits, Command):
    """The settings of `python -m recapp.serve`."""

    artefact: str = composed()
    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 8080
    name: str | None = None
    trust: tuple[str, ...] = ()
    trust_compiled: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: Positive = 1
    threads: Positive = 1
    max_batch: Positive = 1024
    max_wait_ms: Annotated[float, Within(0, 10_000)] = 0


# The settings of each command, by its name; those of a verb of `bench` or `data` by both names.
COMMANDS: dict[str, type[Command]] = {
    "train": Train,
    "eval": Eval,
    "predict": Predict,
    "export": ExportCommand,
    "plan": OnPaper,
    "bench": Bench,
    "bench_step": BenchStep,
    "bench_train": BenchTrain,
    "bench_strategies": BenchStrategies,
    "bench_data": BenchData,
    "bench_inference": BenchInference,
    "data": Data,
    "data_inspect": Inspect,
    "data_convert": Convert,
    "report": Report,
    "serve": Serve,
}

# The commands that have the group `experiment`. Its options set values of other groups.
EXPERIMENTS = ("train", "eval", "predict", "export")

# The verbs of commands: a verb is the first word after the command.
VERBS = {
    "plan": ("explain", "types", "export", "calibrate", "devices", "scale"),
    "bench": ("step", "train", "strategies", "data", "inference"),
    "data": ("inspect", "convert"),
}


def read_settings(plain: Mapping[str, Any], command: str) -> Any:
    """Return the record of a command's settings.

    A `_target_` is checked where it is called, by a process that has imported torch and Lightning
    already (`recapp/run/constructors.py`).

    Args:
        plain: Plain settings, resolved, and the key `choices`.
        command: The name of the command.

    Raises:
        ConfigError: A setting is wrong, or two settings conflict; the error names the setting, the
            value, the allowed values and a close one.
        PlanError: A sharding type of the user has the name of a built-in one.
    """
    settings = dict(plain)
    choices = settings.pop("choices", {})
    checked = record(COMMANDS[command], settings, check=True)
    return _with_own_types(replace(checked, choices=choices))


def recipe_of(plain: Mapping[str, Any], command: str) -> Any:
    """Return the record of settings that are already checked, such as those that a command gives to
    its ranks.

    Raises:
        ConfigError: Two settings conflict.
        PlanError: A sharding type of the user has the name of a built-in one.
    """
    return _with_own_types(record(COMMANDS[command], plain))


def _with_own_types(settings: Command) -> Command:
    """Return the settings; from now on this process knows the user's own sharding types."""
    if isinstance(settings, Recipe) and settings.plan is not None:
        register_own_types(settings.plan)
    return settings
