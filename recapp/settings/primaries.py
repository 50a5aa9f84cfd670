"""The settings of each command: those of its own file in `conf/`, and its groups."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from recapp.settings.groups import (
    ABSENT,
    Callback,
    Dataset,
    Engine,
    Launch,
    ListedTables,
    Logger,
    Metrics,
    Model,
    Natural,
    Optimizer,
    Plan,
    Planner,
    Positive,
    TablesOfDataset,
    Task,
    Timeout,
    Topology,
    Trainer,
)
from recapp.settings.values import Within


@dataclass
class Command:
    """The settings of every command."""

    format: Literal["text", "json"] = "text"


@dataclass
class Run(Command):
    """The settings that a run is planned from; a plan on paper needs all of them, too."""

    seed: Annotated[int, Within(0, 2**63 - 1)] = 1
    dataset: Dataset = ABSENT
    model: Model = ABSENT
    tables: TablesOfDataset | ListedTables = ABSENT
    optimizer: Optimizer = ABSENT
    trainer: Trainer = ABSENT
    engine: Engine = ABSENT
    launch: Launch = ABSENT
    planner: Planner = ABSENT
    topology: Topology = ABSENT
    plan: Plan = ABSENT


@dataclass
class Train(Run):
    """The settings of `python -m recapp.train`."""

    ckpt_path: str | None = None
    resume_data: Literal["check", "ignore"] = "check"
    trust: list[str] = field(default_factory=list)
    task: Task = ABSENT
    metrics: Metrics = ABSENT
    logger: dict[str, Logger] = ABSENT
    callbacks: dict[str, Callback] = ABSENT


@dataclass
class Eval(Train):
    """The settings of `python -m recapp.eval`."""

    split: Literal["val", "test"] = "val"


@dataclass
class Predict(Train):
    """The settings of `python -m recapp.predict`."""

    input: str | list[str] | None = None
    output: str | None = None
    columns: list[str] = field(default_factory=list)
    overwrite: bool = False
    rows_per_batch: Positive = 4096
    rows_per_part: Positive | None = None


@dataclass
class Export(Train):
    """The settings of `python -m recapp.export`."""

    output: str | None = None
    quantize: Literal["none", "fp16", "int8", "int4", "auto"] = "none"
    quantize_tables: dict[str, Literal["none", "fp16", "int8", "int4"]] | None = None
    budget_ne: Annotated[float, Within(0)] | None = None
    report_rows: Natural = 100_000
    compile: bool = True
    name: str | None = None
    overwrite: bool = False


@dataclass
class OnPaper(Run):
    """The settings of `python -m recapp.plan`."""

    statistics: Literal["auto", "assumed"] = "auto"
    out: str | None = None
    a: str | None = None
    b: str | None = None
    as_: Literal["plan", "hugectr"] = "plan"
    indent: Natural | None = None
    path: str | None = None
    ranks: list[Positive] = field(default_factory=list)
    plans: str | list[str] = field(default_factory=list)
    weak_batch: Positive = 512


@dataclass
class Benchmark:
    """The group `bench`: what is measured, and what it is compared with."""

    plan: str | list[str] | None = None
    model: str | list[str] | None = None
    torchrec_python: str | None = None
    baseline: str | None = None
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Bench(Command):
    """The settings of `python -m recapp.bench`."""

    workload: str | list[str] | None = None
    threads: Positive | list[Positive] | None = None
    transport: str | list[str] = "auto"
    backend: Literal["auto", "numba", "triton", "torch"] = "auto"
    keep_freed_memory: bool = True
    ranks: Positive = 2
    rounds: Positive = 7
    round_seconds: Annotated[float, Within(above=0)] = 0.5
    batch_size: Positive | list[Positive] | None = None
    ids: Literal["uniform", "zipf"] | list[Literal["uniform", "zipf"]] = "uniform"
    compile: bool | None = None
    quantize: (
        Literal["none", "fp16", "int8", "int4"]
        | list[Literal["none", "fp16", "int8", "int4"]]
        | None
    ) = None
    bag: Positive = 10
    keys: Positive = 10_000_000
    artefact: str | None = None
    protocol: str | list[str] | None = None
    load: list[Annotated[float, Within(above=0, most=10)]] = field(
        default_factory=lambda: [0.25, 0.5, 0.75, 1.25]
    )
    cache: Literal["warm", "cold"] | list[Literal["warm", "cold"]] = "warm"
    bench: Benchmark = ABSENT
    tables: TablesOfDataset | ListedTables = ABSENT
    dataset: Dataset = ABSENT
    launch: Launch = ABSENT


@dataclass
class Report(Command):
    """The settings of `python -m recapp.report`."""

    path: str = ABSENT


@dataclass
class Serve(Command):
    """The settings of `python -m recapp.serve`."""

    artefact: str = ABSENT
    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 8080
    name: str | None = None
    trust: list[str] = field(default_factory=list)
    trust_compiled: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: Positive = 1
    threads: Positive = 1
    max_batch: Positive = 1024
    max_wait_ms: Annotated[float, Within(0, 10_000)] = 0
    max_body_bytes: Positive = 4_194_304
    max_rows: Positive = 4096
    max_ids: Positive = 262_144
    max_queue: Positive = 256
    max_pending_bytes: Positive = 268_435_456
    max_connections: Positive = 1024
    timeout_s: Timeout = 10


COMMANDS: dict[str, type] = {
    "train": Train,
    "eval": Eval,
    "predict": Predict,
    "export": Export,
    "plan": OnPaper,
    "bench": Bench,
    "report": Report,
    "serve": Serve,
}
"""The settings of each command, by its name."""

EXPERIMENTS = ("train", "eval", "predict", "export")
"""The commands that have the group `experiment`, whose options list settings of other groups."""

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
}
"""The verbs of the commands that have some: the first word behind the command."""
