"""Every setting there is: a dataclass for each group of `conf/`; those of the commands stand in
`recapp/settings/primaries.py`.

A field is a setting: its annotation says what it may be (`recapp/settings/values.py`), its default
is that of the group's first option, and its meaning stands as a comment in `conf/`, where users
look. Keys that no dataclass has are refused, so that no setting is accepted that nothing reads.
`Made` marks a mapping with a `_target_`: its keys are the arguments of that constructor, whatever
it is. `ABSENT` marks a setting that some options of a group have and others do not.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from recapp.settings.values import Refused, Within

Positive = Annotated[int, Within(1)]
Natural = Annotated[int, Within(0)]
Width = Annotated[int, Within(1, 2**31 - 1)]  # numbers in a vector
Rows = Annotated[int, Within(1, 2**48)]  # rows of a table: more would fit nowhere
Timeout = Annotated[float, Within(above=0, most=31_536_000)]  # seconds, at most a year
Share = Annotated[float, Within(above=0, most=1)]
Paths = str | list[str]
Mode = Literal["auto", "unique", "pooled"]
RowOrder = Literal["natural", "mixed"]
Storage = Literal["fp32", "fp64", "fp16", "bf16"]
Precision = Annotated[
    Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "32", "64", "bf16", 32, 64],
    Refused(
        "16-mixed",
        "tables are updated in backward, where the scaled loss would reach them; use bf16-mixed",
    ),
]
IdRule = Literal["error", "hash", "clamp", "drop"]


class _Absent:
    """The default of a setting that does not exist unless an option or the command line adds it."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Any = _Absent()


@dataclass(frozen=True)
class Made:
    """A mapping whose `_target_` names a constructor; its other keys are the constructor's
    arguments.

    Args:
        given: Arguments that recapp passes by name, and what each of them is.
        positional: How many arguments recapp passes by position.
        tried: Whether the constructor is called once before ranks start, to see whether it accepts
            the values; for constructors that do nothing but make an object. Arguments by position
            are then a parameter of one number.
        makes: The class of what it makes, dotted.
        such_as: Examples of such constructors, for errors.
        beside: A key that is no argument but holds settings of the same kind by name.
        checked_by: The function that checks what stands there, dotted: it takes the whole mapping
            and its setting.
        own: Keys that recapp reads itself, each with the class, dotted, of which alone it does.
    """

    given: tuple[tuple[str, str], ...] = ()
    positional: int = 0
    tried: bool = False
    makes: str = ""
    such_as: str = ""
    beside: str = ""
    checked_by: str = ""
    own: tuple[tuple[str, str], ...] = ()


Model = Annotated[
    dict[str, Any],
    Made(
        (
            ("embedding_bag_collection", "the tables, tables=..."),
            ("dense_in_features", "the number of dense columns, dataset=..."),
        ),
        makes="torch.nn.Module",
        such_as="recapp.models.published_dlrm.DLRM",
    ),
]
Task = Annotated[
    dict[str, Any],
    Made(
        (("names", "the metrics that are measured, metrics.names"),),
        makes="recapp.tasks.task.Task",
        such_as="recapp.tasks.click.ClickTask",
    ),
]
DenseOptimizer = Annotated[
    dict[str, Any],
    Made(positional=1, tried=True, makes="torch.optim.Optimizer", such_as="torch.optim.Adam"),
]
RowRule = Annotated[
    dict[str, Any],
    Made(
        tried=True,
        makes="recapp.optim.rules.RowRule",
        such_as="rowwise_adagrad, adam and the others of recapp.optim.rules",
        beside="tables",
        checked_by="recapp.optim.named_rules.check_tables",
    ),
]
Schedule = Annotated[
    dict[str, Any],
    Made(
        positional=1,
        makes="torch.optim.lr_scheduler.LRScheduler",
        such_as="recapp.optim.schedule.warmup_poly",
        own=(("monitor", "torch.optim.lr_scheduler.ReduceLROnPlateau"),),
    ),
]
Callback = Annotated[
    dict[str, Any],
    Made(
        makes="lightning.pytorch.Callback",
        such_as="lightning.pytorch.callbacks.ModelCheckpoint",
    ),
]
Logger = Annotated[
    dict[str, Any],
    Made(
        (("save_dir", "the run's directory, hydra.run.dir=DIR"),),
        makes="lightning.pytorch.loggers.Logger",
        such_as="recapp.trainer.curves.CSVCurves",
    ),
]

OwnShardingType = Annotated[
    dict[str, Any],
    Made(
        tried=True,
        makes="recapp.sharding.sharding_types.ShardingTypeRecord",
        such_as="a function that returns one",
    ),
]


@dataclass
class Generate:
    """The group `dataset.generate`: data that recapp writes itself."""

    kind: Literal["criteo", "sample"] = "criteo"
    rows: Positive = 200_000
    seed: Natural = 1
    separability: Annotated[float, Within(0)] = 1.0
    positives: Annotated[float, Within(above=0, most=1)] = 0.257


@dataclass
class Dataset:
    """The group `dataset`: files, columns, order."""

    path: Paths
    val_path: Paths | None = None
    test_path: Paths | None = None
    val_share: Annotated[float, Within(0)] | str = "1/7"
    naming: Literal["exact", "criteo"] = "exact"
    label: str | list[str] | None = "label"
    weight: str | dict[str, str] | None = None
    dense: list[str] = field(default_factory=list)
    sparse: list[str] = field(default_factory=list)
    hex: list[str] = field(default_factory=list)
    dense_transform: Literal["log1p", "log3", "none"] = "log1p"
    id_rule: IdRule = "hash"
    cardinality: list[Rows] | None = None
    table_rows: list[Rows] | None = None
    table_dims: dict[str, Width] | None = None
    batch_size: Positive = 1024
    val_batch_size: Positive | None = 4096
    lanes: Positive = 16
    shuffle_rows: Natural = 4096
    num_workers: Natural = 0
    scale: float | str = 1
    generate: Generate | None = None


@dataclass
class DynamicRows:
    """What is said of the rows of dynamic tables, as `recapp.tables.dynamic.DynamicRows` takes
    it.
    """

    expected_rows: Rows | None = ABSENT
    max_rows: Annotated[int, Within(64, 2**48)] | None = ABSENT
    seen: Positive = ABSENT
    counter: Literal["exact", "sketch"] = ABSENT
    sketch_width: Annotated[int, Within(64, 2**40)] = ABSENT
    eviction: Literal["lru", "lfu", "ttl"] = ABSENT
    ttl_steps: Positive | None = ABSENT


@dataclass
class TablesOfDataset:
    """The group `tables` under `tables=from_dataset` and `tables=dynamic`: a table for each sparse
    column.
    """

    source: Literal["from_dataset"] = "from_dataset"
    num_embeddings: Literal["dynamic"] | None = None
    dynamic: DynamicRows | None = None
    dim: Width = 16
    max_rows: Rows | None = 200_000
    data_type: Storage = "fp32"
    pooling: Literal["sum", "mean"] = "sum"
    id_rule: IdRule | None = None
    init_range: Annotated[float, Within(0)] | None = None


@dataclass
class ListedTable:
    """One table of `tables=sample`, as `recapp.tables.config.EmbeddingBagConfig` takes it."""

    name: str = ABSENT
    num_embeddings: Rows | Literal["dynamic"] = ABSENT
    dynamic: DynamicRows | None = ABSENT
    embedding_dim: Width = ABSENT
    feature_names: list[str] = ABSENT
    pooling: Literal["sum", "mean"] = ABSENT
    data_type: Storage = ABSENT
    id_rule: IdRule = ABSENT
    init_range: Annotated[float, Within(0)] | None = ABSENT
    weight_init_max: float | None = ABSENT
    weight_init_min: float | None = ABSENT
    min_key: int = ABSENT
    max_key: int | None = ABSENT


@dataclass
class ListedLookup:
    """One lookup of `tables=sample`: a feature that reads a table, and how the rows of its ids
    become one vector.
    """

    table: str = ABSENT
    feature: str = ABSENT
    output: str | None = ABSENT
    combiner: Literal["sum", "mean", "concat"] | None = ABSENT
    hotness: Positive | None = ABSENT
    truncates: bool = ABSENT


@dataclass
class ListedTables:
    """The group `tables` under `tables=sample`: tables that the file lists, and what reads them."""

    source: Literal["list"]
    tables: list[ListedTable]
    lookups: list[ListedLookup] | None = None


@dataclass
class Optimizer:
    """The group `optimizer`: the optimiser of the dense part, the row rule of the tables, a
    schedule.
    """

    dense: DenseOptimizer
    sparse: RowRule
    schedule: Schedule | None = None


@dataclass
class Metrics:
    """The group `metrics`: the metrics that are measured, which the task knows."""

    names: list[str] | None = None


@dataclass
class Trainer:
    """The group `trainer`: settings of Lightning's Trainer; those that are not listed can be added
    with a plus.

    `others` is the constructor whose other arguments are accepted, `refused` why some of them are
    not.
    """

    others: ClassVar[str] = "lightning.pytorch.Trainer"
    refused: ClassVar[dict[str, str]] = {
        "strategy": "recapp's own shards the tables; +plan=... says how, topology=... on what",
        "logger": "choose loggers by logger=..., or add one by +logger.NAME._target_=...",
        "callbacks": (
            "choose callbacks by callbacks=..., or add one by +callbacks.NAME._target_=..."
        ),
        "enable_checkpointing": "the last checkpoint is always kept; callbacks=none keeps no other",
        "enable_model_summary": "layers, plan and ranks are always printed before the first step",
        "num_sanity_val_steps": "there is no validation before the first step; "
        "trainer.val_check_interval=1 trainer.max_steps=1 tries one",
        "num_nodes": "torchrun or srun say how many hosts there are",
        "default_root_dir": "hydra.run.dir=DIR says where a run writes",
        "use_distributed_sampler": "every rank reads its own lanes of the data (dataset.lanes)",
        "inference_mode": "validation needs no gradients as it is",
        "accumulate_grad_batches": (
            "tables are updated in every backward; use a larger dataset.batch_size"
        ),
    }

    devices: Positive | Literal["auto"] = "auto"
    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    precision: Precision = "32-true"
    max_epochs: Positive | Literal[-1] | None = None
    max_steps: Positive | Literal[-1] | None = None
    val_check_interval: Positive | Share | None = None
    check_val_every_n_epoch: Positive = 1
    limit_train_batches: Positive | Share | None = None
    limit_val_batches: Natural | Annotated[float, Within(0, 1)] | None = None
    gradient_clip_val: Annotated[float, Within(0)] | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    log_every_n_steps: Positive = 20
    enable_progress_bar: bool = True


@dataclass
class Engine:
    """The group `engine`: how tables are looked up and updated, and how ranks exchange what that
    takes.
    """

    backend: Literal["auto", "numba", "triton", "torch"] = "auto"
    transport: Literal["auto", "gloo", "shared_memory"] = "auto"
    payload: Literal["full", "bf16", "fp16"] = "full"
    look_ahead: Natural = 1
    clip_tables: bool = False
    compile: bool = False
    keep_freed_memory: bool = True


@dataclass
class Launch:
    """The group `launch`: how ranks are started."""

    start_method: Literal["auto", "forkserver", "spawn"] = "auto"
    port: Annotated[int, Within(0, 65535)] = 0
    grace: Annotated[float, Within(0, 31_536_000)] = 60
    timeout: Timeout = 1800


@dataclass
class Planner:
    """The group `planner`: what the planner may decide."""

    mode: Mode = "auto"
    constraints: dict[str, dict[str, Any]] | None = None


@dataclass
class Plan:
    """The group `plan`: rules written by hand, types of single tables, or a file."""

    name: str = ABSENT
    rules: list[dict[str, Any]] = ABSENT
    mode: Mode = ABSENT
    column_width: Positive = ABSENT
    tables: dict[str, str] = ABSENT
    sharding_types: dict[str, OwnShardingType] = ABSENT
    row_order: RowOrder = ABSENT
    deal: Literal["balanced", "round_robin"] = ABSENT
    dp_max_rows: Natural = ABSENT
    path: str = ABSENT


@dataclass
class Topology:
    """The group `topology`: the machines."""

    hosts: Positive | None = None
    memory_bytes: Natural | None = None
    reserve_bytes: Natural | None = None
    ranks: Positive | None = None
    hardware: str | dict[str, Any] | None = None
