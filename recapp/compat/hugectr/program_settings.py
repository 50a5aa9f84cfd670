"""What a HugeCTR program sets, which becomes settings of `recapp.train`: the solver, the optimisers
and the row rules of its tables, and the data.

    CreateSolver(batchsize=65536, lr=0.5, warmup_steps=300, vvgpu=[[0, 1]], ...)
        -> dataset.batch_size, optimizer, trainer, metrics
    DataReaderParams(..., source=["train/_file_list.txt"]), Input(...)
        -> dataset

An argument that changes HugeCTR's results and has no counterpart in recapp raises an error. For an
argument that only changes how HugeCTR computes, recapp prints a note.

The data are the files that NVTabular writes:

    train/_file_list.txt                    the number of files, and their paths
    train/_metadata.json                    labels, conts and cats: the columns, in order
    DataReaderSparseParam("data3", ...)     the fourth column of cats

`slot_size_array` adds the sizes of the slots before slot i to the keys of slot i, so that no two
slots share a key. The `min_key` of a table may include this sum, or may be 0 as in the notebook,
whose tables use the keys of the files. recapp takes the reading that fits the table's range of
keys, and the one with the sum if both fit.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from recapp.compat.hugectr.words import (
    AllReduceAlgo,
    Check_t,
    DataReaderType_t,
    DeviceLayout,
    LrPolicy_t,
    MetricsType,
    NamedEnum,
    NotNegative,
    Switch,
    check_fields,
    check_others,
    checked,
    plain,
)
from recapp.dataset.data_file import UnreadableFileError, facts_of
from recapp.dataset.files import file_names
from recapp.dataset.formats import FORMATS
from recapp.dataset.storage import stamp_of
from recapp.errors import ConfigError, DataError, suggest
from recapp.optim.named_rules import make_rule
from recapp.optim.rules import RowRule
from recapp.processes.launch import gpu_count
from recapp.processes.rank_environment import external_rank, rank_info
from recapp.settings.option_files import read_json
from recapp.settings.values import Natural, Positive, Within
from recapp.tables.config import EmbeddingBagConfig


class Optimizer_t(NamedEnum):
    """HugeCTR's optimisers that recapp has as row rules."""

    SGD = "sgd"
    MomentumSGD = "momentum_sgd"
    AdaGrad = "adagrad"
    Adam = "adam"
    Ftrl = "ftrl"


class Update_t(NamedEnum):
    """The rows that HugeCTR updates; recapp always updates those that a batch touches, `Local`."""

    Local = "local"
    Global = "global"
    LazyGlobal = "lazy_global"


Decay = Annotated[float, Within(0, below=1)]


@dataclass(frozen=True)
class OptParams:
    """An optimiser of a table.

    Args:
        optimizer_type: The optimiser.
        update_type: The rows that the optimiser updates.
        beta1: Adam's decay of the mean of gradients.
        beta2: Adam's decay of the mean of squared gradients.
        epsilon: The number that Adam and AdaGrad add to the square root.
        initial_accu_value: The start value of AdaGrad's sum of squares.
        momentum_factor: MomentumSGD's factor; rows that a batch does not touch keep their momentum.
        atomic_update: Whether HugeCTR adds with atomic operations; recapp ignores it.
        beta: Ftrl's beta.
        lambda1: Ftrl's L1 factor: above 0 it makes some weights exactly 0.
        lambda2: Ftrl's L2 factor.

    Raises:
        ConfigError: A value is out of range, or no row rule has it.
    """

    optimizer_type: Optimizer_t = Optimizer_t.Adam
    update_type: Update_t = Update_t.Local
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: NotNegative = 1e-7
    initial_accu_value: NotNegative = 0.0
    momentum_factor: NotNegative = 0.0
    atomic_update: Switch = True
    beta: NotNegative = 0.0
    lambda1: NotNegative = 0.0
    lambda2: NotNegative = 0.0

    def __post_init__(self) -> None:
        check_fields("CreateOptimizer", self)
        if self.optimizer_type is Optimizer_t.Adam and self.update_type is Update_t.Global:
            raise ConfigError(
                "CreateOptimizer: update_type=Global changes rows that a batch does not have: "
                "set Update_t.Local or Update_t.LazyGlobal"
            )


CreateOptimizer = OptParams


def row_rule(opt_params: OptParams) -> dict[str, Any]:
    """Return the row rule of an optimiser as plain values: its name and its numbers.

    The result has no learning rate: tables use that of the model, as in HugeCTR.
    """
    betas = {"beta1": opt_params.beta1, "beta2": opt_params.beta2}
    numbers: Mapping[Optimizer_t, dict[str, Any]] = {
        Optimizer_t.SGD: {"rule": "sgd"},
        Optimizer_t.MomentumSGD: {"rule": "momentum_sgd", "momentum": opt_params.momentum_factor},
        Optimizer_t.AdaGrad: {
            "rule": "adagrad",
            "eps": opt_params.epsilon,
            "initial_accumulator": opt_params.initial_accu_value,
        },
        Optimizer_t.Adam: {"rule": "adam", **betas, "eps": opt_params.epsilon},
        Optimizer_t.Ftrl: {
            "rule": "ftrl",
            "beta": opt_params.beta,
            "l1": opt_params.lambda1,
            "l2": opt_params.lambda2,
        },
    }
    return numbers[opt_params.optimizer_type]


def rules_of_opt_params(by_table: Mapping[str, OptParams], lr: float) -> dict[str, RowRule]:
    """Return the row rule of each table.

    Args:
        by_table: The optimiser of each table, by the table's name.
        lr: The learning rate of all tables.
    """
    return {
        name: make_rule(row_rule(opt_params) | {"lr": lr}, f"opt_params of table {name}")
        for name, opt_params in by_table.items()
    }


LANES = 16
"""The largest number of lanes (`dataset.lanes`) for up to 16 ranks; batch sizes may allow fewer."""
METRICS = {MetricsType.AUC: "auc", MetricsType.AverageLoss: "log_loss"}
SOLVER_SWITCHES: Mapping[str, Any] = {
    "model_name": "",
    "use_algorithm_search": True,
    "use_cuda_graph": True,
    "async_mlp_wgrad": False,
    "gen_loss_summary": True,
    "train_intra_iteration_overlap": False,
    "train_inter_iteration_overlap": False,
    "eval_intra_iteration_overlap": False,
    "eval_inter_iteration_overlap": False,
    "device_layout": DeviceLayout.LocalFirst,
    "all_reduce_algo": AllReduceAlgo.NCCL,
    "grouped_all_reduce": False,
    "num_iterations_statistics": 20,
    "perf_logging": False,
    "enable_tf32_compute": False,
}
"""Arguments that only change how HugeCTR computes, with their defaults."""
SOLVER_REFUSES: Mapping[str, tuple[Any, str]] = {
    "use_mixed_precision": (False, "mixed precision with loss scaling is not there: train in FP32"),
    "scaler": (1.0, "losses are not scaled, as there is no mixed precision with loss scaling"),
    "drop_incomplete_batch": (True, "training skips the short last batch of an epoch"),
    "kafka_brockers": ("", "models are not sent to Kafka; snapshots are checkpoints"),
    "kafka_brokers": ("", "models are not sent to Kafka; snapshots are checkpoints"),
    "data_source_params": (None, "data are read from local and mounted directories"),
}
"""Arguments that change HugeCTR's results and that recapp does not have: the default of each, and
the text of the error.
"""
DENSE: Mapping[Optimizer_t, str] = {
    Optimizer_t.SGD: "torch.optim.SGD",
    Optimizer_t.MomentumSGD: "torch.optim.SGD",
    Optimizer_t.AdaGrad: "torch.optim.Adagrad",
    Optimizer_t.Adam: "torch.optim.Adam",
}
"""The torch optimiser of the dense part for each of HugeCTR's optimisers."""


class CreateSolver:
    """The solver of a program.

    Args:
        seed: The seed of start values and of the order of rows.
        lr_policy: The learning-rate policy; must be `fixed`.
        lr: The learning rate of layers and tables after the warm-up.
        warmup_steps: The number of iterations in which the learning rate grows.
        decay_start: The iteration at which the learning rate begins to decay; 0 never decays it.
        decay_steps: The number of iterations of the decay.
        decay_power: The exponent of the decay.
        end_lr: The learning rate after the decay.
        max_eval_batches: The largest number of batches in an evaluation.
        batchsize_eval: The rows of an evaluation batch, over all GPUs.
        batchsize: The rows of a training batch, over all GPUs.
        vvgpu: The GPUs of each host. A machine without GPUs runs the same number of ranks on CPUs.
        repeat_dataset: Whether `fit` counts iterations (`max_iter`); False counts epochs
            (`num_epochs`).
        metrics_spec: The metrics of an evaluation, AUC or AverageLoss, with a goal for each;
            training ends when a metric reaches its goal.
        i64_input_key: Must be True, because keys of Parquet have 64 bits.
        use_embedding_collection: Must be True, because recapp has no other form of tables.
        others: Arguments that only change how HugeCTR computes, and arguments that must keep their
            defaults.

    Raises:
        ConfigError: An argument does not exist, or recapp does not have a value.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        lr_policy: NamedEnum = LrPolicy_t.fixed,
        lr: float = 0.001,
        warmup_steps: int = 1,
        decay_start: int = 0,
        decay_steps: int = 1,
        decay_power: float = 2.0,
        end_lr: float = 0.0,
        max_eval_batches: int = 100,
        batchsize_eval: int = 2048,
        batchsize: int = 2048,
        vvgpu: Sequence[Sequence[int]] = ((0,),),
        repeat_dataset: bool = True,
        metrics_spec: Mapping[NamedEnum, float] | None = None,
        i64_input_key: bool = False,
        use_embedding_collection: bool = False,
        **others: Any,
    ) -> None:
        known = signature(CreateSolver).parameters.keys() - {"others"}
        check_others("CreateSolver", others, SOLVER_SWITCHES, SOLVER_REFUSES, known)
        check = partial(checked, "CreateSolver")
        if lr_policy is not LrPolicy_t.fixed:
            raise ConfigError(f"CreateSolver: lr_policy={lr_policy}: must be LrPolicy_t.fixed")
        if not check("i64_input_key", i64_input_key, Switch):
            raise ConfigError(
                "CreateSolver: i64_input_key=False: keys of Parquet have 64 bits: set it to True"
            )
        if not check("use_embedding_collection", use_embedding_collection, Switch):
            raise ConfigError(
                "CreateSolver: use_embedding_collection=False: recapp has no SparseEmbedding: "
                "set it to True and add an embedding collection"
            )
        self.seed = check("seed", seed, Natural)
        self.lr = check("lr", lr, NotNegative)
        self.schedule = {
            "warmup_steps": check("warmup_steps", warmup_steps, Natural),
            "decay_start": check("decay_start", decay_start, Natural),
            "decay_steps": check("decay_steps", decay_steps, Positive),
            "decay_power": check("decay_power", decay_power, NotNegative),
            "end_lr": check("end_lr", end_lr, NotNegative),
        }
        self.max_eval_batches = check("max_eval_batches", max_eval_batches, Positive)
        self.batchsize_eval = check("batchsize_eval", batchsize_eval, Positive)
        self.batchsize = check("batchsize", batchsize, Positive)
        self.vvgpu: list[list[int]] = check("vvgpu", vvgpu, list[list[Natural]])
        if not self.vvgpu or not all(gpus and len({*gpus}) == len(gpus) for gpus in self.vvgpu):
            raise ConfigError(
                f"CreateSolver: vvgpu={self.vvgpu}: must be a list of different GPUs for each "
                "host, [[0, 1]]"
            )
        self.repeat_dataset = bool(check("repeat_dataset", repeat_dataset, Switch))
        self.metrics_spec = _checked_metrics(metrics_spec)
        self.lanes = self._lanes()

    @property
    def ranks(self) -> int:
        """Return the number of GPUs."""
        return sum(map(len, self.vvgpu))

    def _lanes(self) -> int:
        """Return the number of lanes: the largest multiple of the ranks, up to 16 or the number of
        ranks, that divides both batch sizes.
        """
        ranks = self.ranks
        for name, size in (("batchsize", self.batchsize), ("batchsize_eval", self.batchsize_eval)):
            if size % ranks:
                raise ConfigError(
                    f"CreateSolver: {name}={size}: counts the rows of all GPUs, so it must be a "
                    f"multiple of the {ranks} GPUs of vvgpu"
                )
        shared = math.gcd(self.batchsize, self.batchsize_eval)
        fits = (n for n in range(ranks, max(LANES, ranks) + 1, ranks) if shared % n == 0)
        return max(fits)

    def visible_gpus(self) -> str | None:
        """Return `CUDA_VISIBLE_DEVICES` for the ranks; None keeps the variable as it is.

        Raises:
            ConfigError: `vvgpu` lists a GPU that does not exist, several hosts without a launcher,
                or another number of GPUs than the ranks that torchrun or srun started.
        """
        started = rank_info() if external_rank() is not None else None
        if started is not None:
            if started.world != self.ranks:
                raise ConfigError(
                    f"CreateSolver: vvgpu lists {self.ranks} GPUs, and {started.world} ranks "
                    "were started: list one GPU for each rank"
                )
            return None
        if len(self.vvgpu) > 1:
            raise ConfigError(
                f"CreateSolver: vvgpu lists {len(self.vvgpu)} hosts: start the program with "
                "torchrun or srun on each"
            )
        there = gpu_count()
        if not there:
            return None
        gpu_list = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = gpu_list.split(",") if gpu_list else [str(k) for k in range(there)]
        for gpu in self.vvgpu[0]:
            if gpu >= len(gpus):
                raise ConfigError(
                    f"CreateSolver: vvgpu={self.vvgpu}: there is no GPU {gpu}: there are {there}"
                )
        return ",".join(gpus[gpu] for gpu in self.vvgpu[0])

    def metric_names(self) -> list[str]:
        """Return recapp's names of the metrics of an evaluation."""
        return [METRICS[metric] for metric in self.metrics_spec]

    def stops(self) -> dict[str, dict[str, Any]]:
        """Return the callbacks that end training when a metric reaches its goal."""
        callbacks = {}
        for metric, value in self.metrics_spec.items():
            grows = metric is MetricsType.AUC
            if (grows and value < 1) or (not grows and value > 0):
                callbacks[f"stop_{METRICS[metric]}"] = {
                    "_target_": "lightning.pytorch.callbacks.EarlyStopping",
                    "monitor": f"val_{METRICS[metric]}",
                    "mode": "max" if grows else "min",
                    "stopping_threshold": float(value),
                    "patience": 2**31,  # never end a run because a metric stops improving
                }
        return callbacks

    def optimizer(self, model: OptParams, tables: Mapping[str, OptParams]) -> dict[str, Any]:
        """Return the group `optimizer` of the settings.

        Args:
            model: The optimiser of layers, and of tables that name none.
            tables: The optimisers that tables name, by the table's name.

        Raises:
            ConfigError: recapp has the optimiser for tables only, not for the dense part.
        """
        kind = model.optimizer_type
        if kind not in DENSE:
            raise ConfigError(
                f"Model: opt_params={kind.name}: only tables have this optimiser: give it to the "
                "tables (opt_params) and another optimiser to the model"
            )
        numbers: Mapping[Optimizer_t, dict[str, Any]] = {
            Optimizer_t.SGD: {"fused": True},
            Optimizer_t.MomentumSGD: {"momentum": model.momentum_factor, "fused": True},
            Optimizer_t.AdaGrad: {
                "eps": model.epsilon,
                "initial_accumulator_value": model.initial_accu_value,
                "fused": True,
            },
            Optimizer_t.Adam: {
                "betas": [model.beta1, model.beta2],
                "eps": model.epsilon,
                "fused": True,
            },
        }
        rule = row_rule(model)
        table_rules = {
            name: {**row_rule(opt_params), "lr": self.lr} for name, opt_params in tables.items()
        }
        return {
            "dense": {"_target_": DENSE[kind], "lr": self.lr, **numbers[kind]},
            "sparse": {
                "_target_": f"recapp.optim.rules.{rule.pop('rule')}",
                "lr": self.lr,
                **rule,
                "tables": table_rules or None,
            },
            "schedule": {"_target_": "recapp.optim.schedule.warmup_poly", **self.schedule},
        }


def _checked_metrics(spec: Mapping[NamedEnum, float] | None) -> dict[NamedEnum, float]:
    if not isinstance(spec, Mapping | None):
        raise ConfigError(
            f"CreateSolver: metrics_spec={spec}: must be a dict of goals, {{MetricsType.AUC: 0.8}}"
        )
    goals = {MetricsType.AUC: 1.0} if spec is None else dict(spec)
    for metric, goal in goals.items():
        if metric not in METRICS:
            name = getattr(metric, "name", metric)
            known = [known.name for known in METRICS]
            raise ConfigError(
                f"CreateSolver: metrics_spec: unknown metric {name}; {suggest(str(name), known)}"
            )
        goals[metric] = checked("CreateSolver", f"metrics_spec: {metric.name}", goal, NotNegative)
    if not goals:
        raise ConfigError("CreateSolver: metrics_spec={}: name AUC, AverageLoss or both")
    return goals


METADATA = "_metadata.json"
READER_SWITCHES = {"cache_eval_data": 0, "num_workers": 12, "float_label_dense": False}
"""Arguments that only change how HugeCTR reads, with their defaults."""
READER_REFUSES: Mapping[str, tuple[Any, str]] = {
    "keyset": ([], "key sets are for the parameter server, which is not there"),
    "num_samples": (0, "Parquet files say how many rows they have"),
    "eval_num_samples": (0, "Parquet files say how many rows they have"),
    "read_file_sequentially": (
        False,
        "row groups are dealt to the lanes of a batch, in one order on any number of GPUs",
    ),
    "data_source_params": (None, "data are read from local and mounted directories"),
    "async_param": (None, "it is of the RawAsync reader; recapp reads Parquet"),
}
"""Arguments that recapp does not have: the default of each, and the text of the error."""


class DataReaderParams:
    """The data of a program.

    Args:
        data_reader_type: The format of the data; must be Parquet.
        source: The list of files for training, `_file_list.txt`.
        eval_source: The list of files for evaluation.
        check_type: Must be `Non`, because Parquet has no checksums of rows.
        slot_size_array: The size of each slot; empty adds nothing to keys.
        others: Arguments that only change how HugeCTR reads, and arguments that must keep their
            defaults.

    Raises:
        ConfigError: An argument does not exist, or recapp does not have a value.
    """

    def __init__(
        self,
        data_reader_type: NamedEnum,
        source: str | Sequence[str],
        *,
        eval_source: str,
        check_type: NamedEnum,
        slot_size_array: Iterable[int] = (),
        **others: Any,
    ) -> None:
        if data_reader_type is not DataReaderType_t.Parquet:
            name = getattr(data_reader_type, "name", data_reader_type)
            raise ConfigError(
                f"DataReaderParams: data_reader_type={name}: recapp reads Parquet: convert the "
                "data, as HugeCTR's NVTabular scripts do"
            )
        if check_type is not Check_t.Non:
            raise ConfigError(
                f"DataReaderParams: check_type={getattr(check_type, 'name', check_type)}: "
                "Parquet has no checksums of rows: set Check_t.Non"
            )
        known = ("data_reader_type", "source", "eval_source", "check_type", "slot_size_array")
        check_others("DataReaderParams", others, READER_SWITCHES, READER_REFUSES, known)
        sources = list(source) if isinstance(source, list | tuple) else [source]
        if len(sources) != 1:
            raise ConfigError(
                f"DataReaderParams: source={sources}: must be one list of files; several lists "
                "need HugeCTR's parameter server, which recapp does not have"
            )
        check = partial(checked, "DataReaderParams")
        self.source = check("source", sources[0], str)
        self.eval_source = check("eval_source", eval_source, str)
        sizes = plain(slot_size_array)
        is_iterable = isinstance(sizes, Iterable) and not isinstance(sizes, str | bytes)
        self.slot_size_array = check(
            "slot_size_array", list(sizes) if is_iterable else sizes, list[Positive]
        )


@dataclass(frozen=True)
class DataReaderSparseParam:
    """A column of keys.

    Args:
        top_name: The name of the column in lookups.
        nnz_per_slot: The largest number of keys in a sample: the hotness of a concatenation. Other
            lookups ignore it, because Parquet stores the lengths.
        is_fixed_length: Whether all samples have the same number of keys; recapp ignores it.
        slot_num: The number of slots; an embedding collection has 1.

    Raises:
        ConfigError: An argument is wrong, or the column has several slots.
    """

    top_name: str
    nnz_per_slot: Positive | list[Positive]
    is_fixed_length: Switch
    slot_num: int

    def __post_init__(self) -> None:
        check_fields("DataReaderSparseParam", self)
        if not self.nnz_per_slot:
            raise ConfigError(f"DataReaderSparseParam: {self.top_name}: nnz_per_slot=[]: is empty")
        if self.slot_num != 1:
            raise ConfigError(
                f"DataReaderSparseParam: {self.top_name}: slot_num={self.slot_num}: must be 1, "
                "because an embedding collection reads a column by its own name: declare one "
                "DataReaderSparseParam for each column"
            )


@dataclass(frozen=True)
class Input:
    """The inputs of a program by name: label, dense features and columns of keys.

    Args:
        label_dim: The number of labels; must be 1.
        label_name: The name of the label.
        dense_dim: The number of dense features.
        dense_name: The name of the tensor of dense features.
        data_reader_sparse_param_array: The columns of keys, in the order of the files.

    Raises:
        ConfigError: There are several labels, no columns of keys, or two inputs of one name.
    """

    label_dim: int
    label_name: str
    dense_dim: Natural
    dense_name: str
    data_reader_sparse_param_array: Any

    def __post_init__(self) -> None:
        check_fields("Input", self)
        if self.label_dim != 1:
            raise ConfigError(
                f"Input: label_dim={self.label_dim}: must be 1: recapp trains on one label of "
                "each sample, 0 or 1"
            )
        array = self.data_reader_sparse_param_array
        if not isinstance(array, list) or not all(
            isinstance(param, DataReaderSparseParam) for param in array
        ):
            raise ConfigError(
                f"Input: data_reader_sparse_param_array={array}: must be a list of "
                "DataReaderSparseParam"
            )
        names = [self.label_name, self.dense_name, *self.sparse_names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"Input: {twice[0]} is named more than once")
        if not self.sparse_names:
            raise ConfigError("Input: data_reader_sparse_param_array: must name a column of keys")

    @property
    def sparse_names(self) -> list[str]:
        """Return the names of the columns of keys."""
        return [param.top_name for param in self.data_reader_sparse_param_array]

    @property
    def most_keys(self) -> dict[str, int]:
        """Return the largest number of keys in a sample, by the name of the column."""
        counts = {p.top_name: p.nnz_per_slot for p in self.data_reader_sparse_param_array}
        return {name: n if isinstance(n, int) else max(n) for name, n in counts.items()}


@dataclass(frozen=True)
class Columns:
    """The names of the columns in the files.

    Args:
        label: The column of the label.
        dense: The columns of dense features.
        keys: The columns of keys.
    """

    label: str
    dense: list[str]
    keys: list[str]


def columns_of(reader: DataReaderParams, read: Input) -> Columns:
    """Return the columns of a program's data from the `_metadata.json` beside the files.

    Args:
        reader: The data.
        read: The `Input` of the program.

    Raises:
        DataError: A file is missing or differs from the program.
    """
    columns_by_file = [
        _columns(path, argument)
        for path, argument in ((reader.source, "source"), (reader.eval_source, "eval_source"))
    ]
    columns = columns_by_file[0]
    if columns_by_file[1] != columns:
        raise DataError(
            f"DataReaderParams: source={reader.source} and eval_source={reader.eval_source}: their "
            f"{METADATA} name different columns"
        )
    for parameter, count, names in (
        ("label_dim", 1, [columns.label]),
        ("dense_dim", read.dense_dim, columns.dense),
        ("data_reader_sparse_param_array", len(read.sparse_names), columns.keys),
    ):
        if count != len(names):
            raise DataError(
                f"Input: {parameter} has {count}, and {METADATA} beside {reader.source} names "
                f"{len(names)}: {', '.join(names) or 'none'}"
            )
    sizes = reader.slot_size_array
    if sizes and len(sizes) != len(columns.keys):
        raise ConfigError(
            f"DataReaderParams: slot_size_array has {len(sizes)} numbers: must be one for each of "
            f"the {len(columns.keys)} cats in {METADATA}"
        )
    return columns


def _columns(path: str, argument: str) -> Columns:
    setting = f"DataReaderParams: {argument}"
    if not Path(path).is_file():
        raise DataError(f"{setting}={path}: no such file: must be a _file_list.txt")
    first = Path(file_names(path, setting=setting)[0])
    file = first.parent / METADATA
    if not file.is_file():
        raise DataError(
            f"{setting}={path}: there is no {METADATA} beside {first}: NVTabular writes one, which "
            "names labels, conts and cats"
        )
    try:
        metadata = read_json(file)
        entries = [
            (part, entry["col_name"], entry.get("index"))
            for part in ("labels", "conts", "cats")
            for entry in metadata.get(part, [])
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{file}: cannot be read ({type(error).__name__}: {error}): must have labels, conts "
            "and cats, lists of entries with col_name"
        ) from error
    parts: dict[str, dict[str, int | None]] = {"labels": {}, "conts": {}, "cats": {}}
    for part, name, place in entries:
        if not isinstance(name, str) or not name:
            raise DataError(f"{file}: {part}: col_name={name!r}: must be the name of a column")
        if any(name in places for places in parts.values()):
            raise DataError(f"{file}: {part}: {name} is named more than once")
        parts[part][name] = place
    if len(parts["labels"]) != 1:
        raise DataError(f"{file}: has {len(parts['labels'])} labels: must have one")
    for part, places in parts.items():
        _check_places(part, places, file, first)
    return Columns(next(iter(parts["labels"])), list(parts["conts"]), list(parts["cats"]))


def _check_places(part: str, places: Mapping[str, int | None], file: Path, first: Path) -> None:
    """Check that columns are at the indices of `_metadata.json`, because HugeCTR reads by index.

    Raises:
        DataError: A column has another index in the file.
    """
    try:
        names = facts_of(FORMATS.of(str(first)), str(first), stamp_of(str(first))).columns.names
    except (OSError, UnreadableFileError, DataError):
        return  # the training command reports an unreadable file
    for name, place in places.items():
        if place is None or name not in names or place == names.index(name):
            continue
        raise DataError(
            f"{file}: {part}: {name} has index {place}, and is column {names.index(name)} of "
            f"{first}: HugeCTR reads columns by index: correct the index or the order of the "
            "columns"
        )


def first_key(
    table: EmbeddingBagConfig, slots: Sequence[int], names: Sequence[str], sizes: Sequence[int]
) -> int:
    """Return the key in the files that has row 0 of a table: the table's `min_key` minus the number
    that `slot_size_array` adds to the keys of its slots.

    Args:
        table: The table.
        slots: The numbers of the slots that are looked up in the table.
        names: The names of all slots.
        sizes: `slot_size_array`; empty adds nothing.

    Raises:
        ConfigError: The keys of a slot fit the table neither with the sum nor without it, or the
            slots of the table add different numbers.
    """
    if not sizes:
        return table.min_key
    grows = table.dynamic is not None  # such a table takes any key
    last = table.min_key + table.num_embeddings
    befores = list(accumulate(sizes, initial=0))
    offset_of_slot = {}
    for slot in slots:
        before = befores[slot]
        fitting = [
            number
            for number in (before, 0)
            if grows or (table.min_key <= number and number + sizes[slot] <= last)
        ]
        if not fitting:
            raise ConfigError(
                f"DataReaderParams: slot_size_array: keys of {names[slot]} are 0..{sizes[slot] - 1}"
                f", or {before}..{before + sizes[slot] - 1} with the slots before it; table "
                f"{table.name} has the keys {table.min_key}..{last - 1}"
            )
        offset_of_slot[names[slot]] = fitting[0]
    if len(set(offset_of_slot.values())) > 1:
        offsets = " and ".join(f"{name} {number}" for name, number in offset_of_slot.items())
        raise ConfigError(
            f"DataReaderParams: slot_size_array: adds different numbers to the keys that read "
            f"table {table.name} ({offsets}): give each a table, or write keys into the files that "
            "differ and leave slot_size_array out"
        )
    return table.min_key if grows else table.min_key - next(iter(offset_of_slot.values()))
