"""The record of each command: the settings of its file in `conf/` and of the groups it composes.

plain settings, from Hydra or from a file -> record
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from recapp.dataset.data_settings import DataSettings, ScoringSettings
from recapp.errors import ConfigError
from recapp.inference.export_settings import Export, Quantize
from recapp.processes.launch import LaunchSettings
from recapp.run.constructors import register_own_types
from recapp.run.recipe import Command, Recipe, Train
from recapp.serving.limits import Limits
from recapp.settings.records import composed, record
from recapp.settings.values import Natural, Positive, Transport, Within
from recapp.tables.table_settings import ListedTables, TablesOfDataset


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
    "report": Report,
    "serve": Serve,
}
"""The settings of each command, by its name; those of a verb of `bench` by both names."""

EXPERIMENTS = ("train", "eval", "predict", "export")
"""The commands that have the group `experiment`. Its options set values of other groups."""

VERBS = {
    "plan": ("explain", "types", "export", "calibrate", "devices", "scale"),
    "bench": ("step", "train", "strategies", "data", "inference"),
}
"""The verbs of commands: a verb is the first word after the command."""


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
