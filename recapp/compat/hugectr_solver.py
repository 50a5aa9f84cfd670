"""HugeCTR's solver: how long, how fast and on how many GPUs a program trains, as the settings of
`recapp.train`.

    CreateSolver(batchsize=65536, lr=0.5, warmup_steps=300, vvgpu=[[0, 1]], ...)
        -> dataset.batch_size, optimizer, trainer, metrics

What would change results in HugeCTR and has no counterpart is refused; what only chooses how
HugeCTR computes is noted.
"""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

from recapp.compat.hugectr_arguments import number, switch, whole
from recapp.compat.hugectr_enums import AllReduceAlgo, DeviceLayout, LrPolicy_t, MetricsType
from recapp.compat.hugectr_optimizers import Optimizer_t, OptParams, row_rule
from recapp.console import note_once
from recapp.errors import ConfigError, suggest
from recapp.processes.launch import gpu_count
from recapp.processes.rank_environment import external_rank, rank_info

LANES = 16
"""Lanes of a batch (`dataset.lanes`), where its size allows as many."""
METRICS = {MetricsType.AUC: "auc", MetricsType.AverageLoss: "log_loss"}
SWITCHES: Mapping[str, Any] = {
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
"""What chooses how HugeCTR computes, with its defaults."""
REFUSED: Mapping[str, tuple[Any, str]] = {
    "use_mixed_precision": (False, "mixed precision with loss scaling is not there: train in FP32"),
    "scaler": (1.0, "losses are not scaled, as there is no mixed precision with loss scaling"),
    "drop_incomplete_batch": (True, "training skips the short last batch of an epoch"),
    "kafka_brockers": ("", "models are not sent to Kafka; snapshots are checkpoints"),
    "kafka_brokers": ("", "models are not sent to Kafka; snapshots are checkpoints"),
    "data_source_params": (None, "data are read from local and mounted directories"),
}
"""What changes results in HugeCTR and is not there: its default, and why."""
DENSE: Mapping[Optimizer_t, str] = {
    Optimizer_t.SGD: "torch.optim.SGD",
    Optimizer_t.MomentumSGD: "torch.optim.SGD",
    Optimizer_t.AdaGrad: "torch.optim.Adagrad",
    Optimizer_t.Adam: "torch.optim.Adam",
}
"""The optimiser of the dense part."""


class CreateSolver:
    """The solver of a program.

    Args:
        seed: The seed of start values and of the order of rows.
        lr_policy: There is one.
        lr: The learning rate of layers and tables, after the warm-up.
        warmup_steps: Iterations in which it grows.
        decay_start: The iteration at which it begins to decay; 0: never.
        decay_steps: Iterations that the decay takes.
        decay_power: Its exponent.
        end_lr: The rate after it.
        max_eval_batches: Batches of an evaluation at most.
        batchsize_eval: Rows of a batch of an evaluation, of all GPUs together.
        batchsize: Rows of a batch, of all GPUs together.
        vvgpu: The GPUs of each host; where there is none, as many ranks on the CPU.
        repeat_dataset: Whether `fit` counts iterations (`max_iter`); False: epochs (`num_epochs`).
        metrics_spec: What an evaluation measures: AUC, AverageLoss; training ends once one reaches
            the value beside it.
        i64_input_key: Must be True, as keys of Parquet have 64 bits.
        use_embedding_collection: Must be True, as tables are an embedding collection.
        others: Arguments that only choose how HugeCTR computes, and arguments that must keep their
            defaults.

    Raises:
        ConfigError: An argument that does not exist or a value that is not there.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        lr_policy: LrPolicy_t = LrPolicy_t.fixed,
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
        metrics_spec: Mapping[MetricsType, float] | None = None,
        i64_input_key: bool = False,
        use_embedding_collection: bool = False,
        **others: Any,
    ) -> None:
        _check_others(others)
        if lr_policy is not LrPolicy_t.fixed:
            raise ConfigError(f"CreateSolver: lr_policy={lr_policy}: must be LrPolicy_t.fixed")
        if not switch("CreateSolver", "i64_input_key", i64_input_key):
            raise ConfigError(
                "CreateSolver: i64_input_key=False: keys of Parquet have 64 bits: set it to True"
            )
        if not switch("CreateSolver", "use_embedding_collection", use_embedding_collection):
            raise ConfigError(
                "CreateSolver: use_embedding_collection=False: SparseEmbedding is not there: set "
                "it to True and add an embedding collection"
            )
        count = partial(whole, "CreateSolver")
        finite = partial(number, "CreateSolver")
        self.seed = count("seed", seed)
        self.lr = finite("lr", lr)
        self.schedule = {
            "warmup_steps": count("warmup_steps", warmup_steps),
            "decay_start": count("decay_start", decay_start),
            "decay_steps": count("decay_steps", decay_steps, 1),
            "decay_power": finite("decay_power", decay_power),
            "end_lr": finite("end_lr", end_lr),
        }
        self.max_eval_batches = count("max_eval_batches", max_eval_batches, 1)
        self.batchsize_eval = count("batchsize_eval", batchsize_eval, 1)
        self.batchsize = count("batchsize", batchsize, 1)
        self.vvgpu = _checked_gpus(vvgpu)
        self.repeat_dataset = switch("CreateSolver", "repeat_dataset", repeat_dataset)
        self.metrics_spec = _checked_metrics(metrics_spec)
        self.lanes = self._lanes()

    @property
    def ranks(self) -> int:
        """Return the number of GPUs."""
        return sum(map(len, self.vvgpu))

    def _lanes(self) -> int:
        """Return the most lanes up to 16, or a rank's one, that both batches and all ranks share
        evenly.
        """
        ranks = self.ranks
        for name, size in (("batchsize", self.batchsize), ("batchsize_eval", self.batchsize_eval)):
            if size % ranks:
                raise ConfigError(
                    f"CreateSolver: {name}={size}: is of all GPUs together, so it must be a "
                    f"multiple of the {ranks} that vvgpu lists"
                )
        shared = math.gcd(self.batchsize, self.batchsize_eval)
        fits = (n for n in range(ranks, max(LANES, ranks) + 1, ranks) if shared % n == 0)
        return max(fits)

    def visible_gpus(self) -> str | None:
        """Return `CUDA_VISIBLE_DEVICES` of the ranks; None where it stays as it is.

        Raises:
            ConfigError: A GPU is listed that is not there, several hosts where one process was
                started by hand, or other ranks than torchrun or srun have started.
        """
        started = rank_info() if external_rank() is not None else None
        if started is not None:
            if started.world != self.ranks:
                raise ConfigError(
                    f"CreateSolver: vvgpu lists {self.ranks} GPUs, and {started.world} ranks were "
                    "started: list as many"
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
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        known = named.split(",") if named else [str(k) for k in range(there)]
        for gpu in self.vvgpu[0]:
            if gpu >= len(known):
                raise ConfigError(
                    f"CreateSolver: vvgpu={[list(gpus) for gpus in self.vvgpu]}: there is no GPU "
                    f"{gpu}: there are {there}"
                )
        return ",".join(known[gpu] for gpu in self.vvgpu[0])

    def metric_names(self) -> list[str]:
        """Return the metrics of an evaluation, in recapp's names."""
        return [METRICS[metric] for metric in self.metrics_spec]

    def stops(self) -> dict[str, dict[str, Any]]:
        """Return the callbacks that end training once a metric has reached its value."""
        made = {}
        for metric, value in self.metrics_spec.items():
            grows = metric is MetricsType.AUC
            if (grows and value < 1) or (not grows and value > 0):
                made[f"stop_{METRICS[metric]}"] = {
                    "_target_": "lightning.pytorch.callbacks.EarlyStopping",
                    "monitor": f"val_{METRICS[metric]}",
                    "mode": "max" if grows else "min",
                    "stopping_threshold": float(value),
                    "patience": 2**31,  # it never ends because nothing is gained any more
                }
        return made

    def optimizer(self, model: OptParams, tables: Mapping[str, OptParams]) -> dict[str, Any]:
        """Return the group `optimizer`.

        Args:
            model: The optimiser of layers, and of tables that name none.
            tables: The optimisers that tables name, by the table's name.

        Raises:
            ConfigError: The dense part has no such optimiser.
        """
        kind = model.optimizer_type
        if kind not in DENSE:
            raise ConfigError(
                f"Model: opt_params={kind.name}: tables have it, dense layers do not: give it to "
                "the tables (opt_params) and another one to the model"
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
        own = {name: {**row_rule(said), "lr": self.lr} for name, said in tables.items()}
        return {
            "dense": {"_target_": DENSE[kind], "lr": self.lr, **numbers[kind]},
            "sparse": {
                "_target_": f"recapp.optim.rules.{rule.pop('rule')}",
                "lr": self.lr,
                **rule,
                "tables": own or None,
            },
            "schedule": {"_target_": "recapp.optim.schedule.warmup_poly", **self.schedule},
        }


def _check_others(others: Mapping[str, Any]) -> None:
    known = {*SWITCHES, *REFUSED, *(signature(CreateSolver).parameters.keys() - {"others"})}
    for name, value in others.items():
        if name in SWITCHES:
            if value != SWITCHES[name]:
                note_once(
                    f"CreateSolver: {name} chooses how HugeCTR computes or names its files; recapp "
                    "chooses by itself"
                )
        elif name not in REFUSED:
            raise ConfigError(f"CreateSolver: unknown argument {name}; {suggest(name, known)}")
        elif value != REFUSED[name][0]:
            raise ConfigError(f"CreateSolver: {name}={value}: {REFUSED[name][1]}")


def _checked_gpus(vvgpu: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    hosts = vvgpu if isinstance(vvgpu, list | tuple) else ()
    made = tuple(tuple(gpus) if isinstance(gpus, list | tuple) else () for gpus in hosts)
    right = made and all(
        gpus and len(set(gpus)) == len(gpus) and all(isinstance(g, int) and g >= 0 for g in gpus)
        for gpus in made
    )
    if not right:
        raise ConfigError(
            f"CreateSolver: vvgpu={vvgpu}: must be a list of GPUs for each host, [[0, 1]]"
        )
    return made


def _checked_metrics(spec: Mapping[MetricsType, float] | None) -> dict[MetricsType, float]:
    if not isinstance(spec, Mapping | None):
        raise ConfigError(
            f"CreateSolver: metrics_spec={spec}: must be a dict of goals, {{MetricsType.AUC: 0.8}}"
        )
    made = {MetricsType.AUC: 1.0} if spec is None else dict(spec)
    for metric, goal in made.items():
        if metric not in METRICS:
            name = getattr(metric, "name", metric)
            known = [known.name for known in METRICS]
            raise ConfigError(
                f"CreateSolver: metrics_spec: {name} is not there; {suggest(str(name), known)}"
            )
        made[metric] = number("CreateSolver", f"metrics_spec: {metric.name}", goal)
    if not made:
        raise ConfigError("CreateSolver: metrics_spec={}: name AUC, AverageLoss or both")
    return made
