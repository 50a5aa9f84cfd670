"""The record of each command: the settings of its file in `conf/` and of the groups it composes."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from recapp.dataset.data_settings import DataSettings, ScoringSettings
from recapp.inference.export_settings import Export, Quantize
from recapp.processes.launch import LaunchSettings
from recapp.run.recipe import Command, Recipe, Train
from recapp.serving.limits import Limits
from recapp.settings.records import composed
from recapp.settings.values import Natural, Positive, Within
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
    a: str | None = None
    b: str | None = None
    as_: Literal["plan", "hugectr"] = "plan"
    indent: Natural | None = None
    path: str | None = None
    ranks: tuple[Positive, ...] = ()
    plans: str | tuple[str, ...] = ()
    weak_batch: Positive = 512


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The group `bench`: the plans and models to measure, and the systems to compare them with."""

    plan: str | tuple[str, ...] | None = None
    model: str | tuple[str, ...] | None = None
    torchrec_python: str | None = None
    baseline: str | None = None
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """The settings of `python -m recapp.bench`."""

    workload: str | tuple[str, ...] | None = None
    threads: Positive | tuple[Positive, ...] | None = None
    transport: str | tuple[str, ...] = "auto"
    backend: Literal["auto", "numba", "triton", "torch"] = "auto"
    keep_freed_memory: bool = True
    ranks: Positive = 2
    rounds: Positive = 7
    round_seconds: Annotated[float, Within(above=0)] = 0.5
    batch_size: Positive | tuple[Positive, ...] | None = None
    ids: Literal["uniform", "zipf"] | tuple[Literal["uniform", "zipf"], ...] = "uniform"
    compile: bool | None = None
    quantize: Quantize | tuple[Quantize, ...] | None = None
    bag: Positive = 10
    keys: Positive = 10_000_000
    artefact: str | None = None
    protocol: str | tuple[str, ...] | None = None
    load: tuple[Annotated[float, Within(above=0, most=10)], ...] = (0.25, 0.5, 0.75, 1.25)
    cache: Literal["warm", "cold"] | tuple[Literal["warm", "cold"], ...] = "warm"
    bench: Benchmark = composed()
    tables: TablesOfDataset | ListedTables = composed()
    dataset: DataSettings = composed()
    launch: LaunchSettings = composed()


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """The settings of `python -m recapp.report`."""

    path: str | None = None
    a: str | None = None
    b: str | None = None


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
    "report": Report,
    "serve": Serve,
}
"""The settings of each command, by its name."""

EXPERIMENTS = ("train", "eval", "predict", "export")
"""The commands that have the group `experiment`. Its options set values of other groups."""

VERBS = {
    "plan": ("explain", "types", "compare", "export", "check", "calibrate", "devices", "scale"),
    "bench": (
        "kernels",
        "quantised",
        "memory",
        "step",
        "train",
        "strategies",
        "data",
        "dynamic",
        "inference",
        "serve",
        "start",
    ),
    "report": ("compare",),
}
"""The verbs of commands: a verb is the first word after the command. `report` needs none."""
