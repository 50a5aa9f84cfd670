"""Lightning's own parts, adapted to sharded tables, whoever has made the trainer and the module.

    check_trainer        refuses a precision and callbacks that cannot train tables
    limit_waits          no wait for other ranks before every step, and none without a limit
    reach_tables         a module's own methods reach its tables, which are no parameters of it:
                         self.freeze(), self.unfreeze(), self.toggle_optimizer(optimizer)
    count_tables         Lightning's table of a module's parameters has the rows of all ranks, like
                         the parameters of the unsharded module: shards are no parameters, and
                         Lightning would print 0. A dynamic table counts its expected rows

    RankEnvironment      ranks that were started from outside

    BatchCallback        the base of callbacks that run after every training step (a batch, or
                         several with `accumulate_grad_batches`), or after every other batch
    AverageWeights       takes the place of Lightning's `WeightAveraging`
    skip_idle_hooks      spares the calls of hooks that do nothing

`requires_grad_` of any module around tables is that of `shard_model`.

Lightning's cluster environment tells Lightning the rank of this process. recapp's takes the rank
from `recapp/processes/rank_environment.py`, so that all of recapp uses the same rank. Lightning's
own environments accept other launches. Its SLURM environment refuses `srun -n 2`, installs a
handler that requeues the job, and uses one port for all steps of a job. Ranks that were started by
hand are ranks for Lightning only if LOCAL_RANK is set.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _InfiniteBarrier
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary as SummaryCallback
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from recapp.console import note
from recapp.engine.sharded_collection import (
    modules_around_tables,
    sharded_collections,
    sharded_tables,
    without_tables,
)
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.table_weights import MethodOf
from recapp.errors import ConfigError
from recapp.optim.optimizer import HybridOptimizer
from recapp.processes.rank_environment import RankInfo, external_rank
from recapp.settings.values import shown
from recapp.sharding.layout import AVERAGE, RAW
from recapp.stored.plain_parts import state_must_fit
from recapp.trainer.trainer_settings import AverageSettings, refuse_class


def check_trainer(trainer: Trainer) -> None:
    """Check the precision and, where it trains, the callbacks of a trainer.

    Raises:
        ConfigError: The trainer cannot train tables; the error gives the reason.
    """
    if trainer.precision == "16-mixed":
        raise ConfigError(
            "trainer.precision=16-mixed: tables are updated in backward, where the scaled loss "
            "would reach them; use bf16-mixed"
        )
    trains = trainer.state.fn == TrainerFn.FITTING
    for callback in trainer.callbacks if trains else ():  # type: ignore[attr-defined]
        refuse_class(type(callback), "Trainer(callbacks=...)")


def limit_waits(trainer: Trainer, make_group: Callable[[], Any]) -> None:
    """Remove Lightning's broadcast before every step, and end its wait for the rank that prepares
    data after a time.

    Args:
        trainer: The trainer, before it prepares data.
        make_group: Makes a process group, with the timeout of all waits.
    """
    # A stop flag goes to all ranks before every step, which would wait for them; the header of the
    # counts message carries it (`EndTogether`). The handler of SIGTERM would start another
    # broadcast at any point at which it interrupts this rank.
    trainer._signal_connector.register_signal_handlers = (  # type: ignore[method-assign]
        lambda: None
    )
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    connector = trainer._data_connector
    prepare = type(connector).prepare_data

    def prepare_data() -> None:
        names = vars(data_connector)
        names[_InfiniteBarrier.__name__] = partial(_Barrier, make_group)
        try:
            prepare(connector)
        finally:
            names[_InfiniteBarrier.__name__] = _InfiniteBarrier

    connector.prepare_data = prepare_data  # type: ignore[method-assign]


def read_when_shown(trainer: Trainer) -> None:
    """Let Lightning read the values of the progress bar when the bar shows them. By itself it reads
    them after every step as well, where the host would wait for all work of a GPU.
    """
    connector = trainer._logger_connector
    end = type(connector).on_batch_end

    def on_batch_end() -> None:
        results: Any = trainer._results or {}
        of_bar = [result.meta for result in results.values() if result.meta.prog_bar]
        for meta in of_bar:
            meta.prog_bar = False
        end(connector)
        for meta in of_bar:
            meta.prog_bar = True

    connector.on_batch_end = on_batch_end  # type: ignore[method-assign]


class _Barrier(_InfiniteBarrier):
    """Lightning's barrier around `prepare_data`, with a limit; its own is 10,000 days."""

    def __init__(self, make_group: Callable[[], Any]) -> None:
        super().__init__()
        self.make_group = make_group

    @override
    def __enter__(self) -> "_Barrier":
        if _distributed_is_initialized():
            group = self.make_group()
            self.group = group
            self.barrier = group.monitored_barrier
        return self


def reach_tables(module: LightningModule) -> None:
    """Let `freeze`, `unfreeze` and the toggling of optimisers reach the sharded tables of a module
    and of LightningModules inside. A method that a class of its own has stays as it is.
    """
    modules = [m for m in modules_around_tables(module) if isinstance(m, LightningModule)]
    for around, (name, function) in product(modules, METHODS.items()):
        if getattr(type(around), name) is getattr(LightningModule, name):
            setattr(around, name, MethodOf(around, function))


def _set_trained(method: str, trained: bool, module: LightningModule) -> None:
    for collection in sharded_collections(module):
        collection.requires_grad_(trained)
    getattr(LightningModule, method)(module)


def _toggle(module: LightningModule, optimizer: Any) -> None:
    LightningModule.toggle_optimizer(module, optimizer)
    inner = getattr(optimizer, "optimizer", optimizer)
    others = [other for other in module.trainer.optimizers if other is not inner]
    for shared in sharded_tables(module):
        shared.update.ignores = any(_has(other, shared) for other in others)


def _untoggle(module: LightningModule, optimizer: Any) -> None:
    LightningModule.untoggle_optimizer(module, optimizer)
    for shared in sharded_tables(module):
        shared.update.ignores = False


def _has(optimizer: Any, shared: ShardedTables) -> bool:
    if not isinstance(optimizer, HybridOptimizer):
        return False
    groups = [id(group) for group in optimizer.sparse_groups]
    return shared.update in optimizer.table_gradients or any(
        id(group) in groups for group in shared.param_groups
    )


METHODS: dict[str, Callable[..., Any]] = {
    "freeze": partial(_set_trained, "freeze", False),
    "unfreeze": partial(_set_trained, "unfreeze", True),
    "toggle_optimizer": _toggle,
    "untoggle_optimizer": _untoggle,
}


def count_tables(callbacks: Iterable[Any]) -> None:
    """Make Lightning's summary callbacks of a trainer count the sharded tables."""
    for callback in callbacks:
        if isinstance(callback, SummaryCallback):
            summarize = partial(type(callback).on_fit_start, callback)
            callback.on_fit_start = partial(  # type: ignore[method-assign]
                _with_tables, summarize
            )


def _with_tables(summarize: Callable[..., None], trainer: Trainer, pl_module: Any) -> None:
    """Call Lightning's summary while each sharded table is a parameter of its whole shape, without
    memory. A table that collections share is one parameter.
    """
    collections = sharded_collections(pl_module)
    parameters: dict[tuple[int, str], nn.Parameter] = {}
    for part in collections:
        for table in part.tables():
            rows = torch.empty(table.num_embeddings, table.embedding_dim, device="meta")
            parameter = nn.Parameter(rows, not part.shared.is_frozen(table.name))
            key = (id(part.shared), table.name)
            part._parameters[table.name] = parameters.setdefault(key, parameter)
    try:
        summarize(trainer, pl_module)
    finally:
        for part in collections:
            part._parameters.clear()


@dataclass(frozen=True)
class RankEnvironment(ClusterEnvironment):
    """A cluster whose ranks were all started from outside.

    Args:
        info: The number, host and address of this rank.
    """

    info: RankInfo
    creates_processes_externally: ClassVar[bool] = True

    @property
    @override
    def main_address(self) -> str:
        return self.info.address

    @property
    @override
    def main_port(self) -> int:
        return self.info.port

    @staticmethod
    @override
    def detect() -> bool:
        return external_rank() is not None

    @override
    def world_size(self) -> int:
        return self.info.world

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's product of devices and nodes, because hosts may have different numbers
        of ranks.
        """

    @override
    def global_rank(self) -> int:
        return self.info.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's number, which follows from its product of devices and nodes."""

    def local_rank(self) -> int:
        """Return the number of this rank among the ranks of its host; its GPU has the same
        number.
        """
        return self.info.local_rank

    @override
    def node_rank(self) -> int:
        return self.info.node


def ends_step(trainer: Trainer, done: int) -> bool:
    """Return whether a training batch ends a step.

    Args:
        trainer: The trainer of the run.
        done: The number of batches of the epoch so far, this one included.
    """
    return done % trainer.accumulate_grad_batches == 0 or ends_epoch(trainer, done)


def ends_epoch(trainer: Trainer, done: int) -> bool:
    """Return whether a training batch ends an epoch. Arguments as for `ends_step`."""
    return bool(trainer.is_last_batch) or done >= trainer.num_training_batches


# The hooks that Lightning calls for each batch.
BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    *(f"on_{s}_batch_{end}" for s in ("validation", "test", "predict") for end in ("start", "end")),
)


def log_in(
    module: LightningModule, hook: str, name: str, value: Tensor, rows: int, prog_bar: bool = False
) -> None:
    """Log a value that a hook of training logs again and again.

    Lightning's `log` checks its arguments and moves the metric to its device each time, .5 ms. So
    it is called for the first batch of an epoch, and later values go to the metric that it made.

    Args:
        module: The module that is trained.
        hook: The name of the hook that is running.
        name: The name of the value.
        value: The value, a scalar on the device of earlier ones.
        rows: The weight of the value.
        prog_bar: Whether the progress bar shows the value.
    """
    connector: Any = getattr(module.trainer, "_logger_connector", None)
    results: Any = getattr(module.trainer, "_results", None) or ()
    key = f"{hook}.{name}"
    if key in results and not connector.should_reset_tensors(hook):
        results.update_metrics(key, value, rows)
    else:
        module.log(name, value, prog_bar=prog_bar, batch_size=rows)


def is_idle(callback: Callback, hook: str) -> bool:
    """Return whether a callback leaves a hook as `Callback` has it."""
    return getattr(callback, hook) in (None, getattr(Callback, hook).__get__(callback))


def skip_idle_hooks(callbacks: Iterable[Callback]) -> None:
    """Make Lightning pass over the hooks of a batch that a callback leaves as `Callback` has them.

    Lightning calls all hooks of all callbacks, each in a section of its profiler: 80 calls a step
    that do nothing, .5 ms. It passes over a hook that is not callable.

    Args:
        callbacks: The callbacks of a trainer.
    """
    for callback in callbacks:
        for name in BATCH_HOOKS:
            if is_idle(callback, name):
                setattr(callback, name, None)


class BatchCallback(Callback):
    """Calls `on_step` after every training step, and `on_batch` after every other batch.

    Lightning has one hook for each stage, with arguments that most callbacks do not need. Each
    stage of recapp has one loader, so the methods get no index of the loader.
    """

    def on_step(self, trainer: Trainer, done: int) -> None:
        """Act on the end of a training step.

        Args:
            trainer: The trainer of the run.
            done: The number of batches of the epoch so far, this one included.
        """

    def on_batch(self, trainer: Trainer, done: int) -> None:
        """Act on the end of a batch that was validated, tested or scored.

        Args:
            trainer: The trainer of the run.
            done: The number of batches of the stage so far, this one included.
        """

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if ends_step(trainer, batch_idx + 1):
            self.on_step(trainer, batch_idx + 1)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.on_batch(trainer, batch_idx + 1)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end


class AverageWeights(BatchCallback):
    """Averages the weights while they train: an exponential moving average (EMA), or the mean of
    many steps or epochs (SWA, stochastic weight averaging). It must come before callbacks that
    save.

        ema    average += (1 - decay) (weights - average)    weighs a past update by decay^age
        swa    average += (weights - average) / (n + 1)      the mean of n + 1 updates

    The average of the weights along the way often predicts better than the last weights (Polyak and
    Juditsky 1992; Izmailov et al., "Averaging Weights Leads to Wider Optima and Better
    Generalization", arXiv 1803.05407).

        training      raw weights                    average += weight * (raw - average)
        validation    the average, in their place    metrics and the best checkpoint are its own
        checkpoint    both: a stored model scores by its average, a resume trains the raw weights on

    Ranks have the same dense weights, and each averages the rows that it holds
    (`recapp/engine/row_average.py`), so they send nothing. Lightning's `WeightAveraging` averages a
    copy of the module: its parameters. Tables are no parameters here, and a module may be too large
    to copy on one rank. Updates are those of `torch.optim.swa_utils`.

    Args:
        settings: When and how to average.
        restarts: Whether tables begin anew at each epoch: then the average does, too, because rows
            of two epochs have nothing in common.

    Raises:
        ConfigError: A setting has no effect, or the kind is `none`.
    """

    def __init__(self, settings: AverageSettings, restarts: bool = False) -> None:
        settings.check_effect()
        if settings.kind == "none":
            raise ConfigError(
                "AverageWeights: kind=none averages nothing: set ema or swa, or leave it out"
            )
        self.settings = settings
        self.restarts = restarts
        self.average = WeightAverage(settings.every or math.inf)
        self._epoch = 0  # of the last update
        self._speaks = True  # whether this rank prints notes: rank 0 of a training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the strategy store the average, and plan for it, also where a validation comes before
        the training.
        """
        strategy: Any = trainer.strategy  # recapp's, which imports this file
        strategy.weight_average = self.average
        self._speaks = trainer.is_global_zero and stage == "fit"

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epoch = 0
        strategy: Any = trainer.strategy
        self.average.keep(pl_module, strategy.sharded_tables())

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": self.settings.kind,
            "updates": self.average.updates,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the average of a checkpoint. An average of another kind begins anew, with a
        note.
        """
        if state_dict["kind"] == self.settings.kind:
            self.average.updates = int(state_dict["updates"])
            self._epoch = int(state_dict["epoch"])
        elif state_dict["updates"] and self._speaks:
            note(
                f"trainer.average.kind={self.settings.kind}: the average begins anew, because that "
                f"of the checkpoint is of kind {state_dict['kind']}"
            )

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.average.updates and trainer.is_global_zero:
            settings = self.settings
            unit = "epochs" if settings.every is None else "steps"
            note(
                f"trainer.average.start={settings.start} trainer.average.every="
                f"{shown(settings.every)}: training ended before the first update of the average, "
                f"so the model has its last weights: set trainer.average.start or "
                f"trainer.average.every to fewer {unit} than the run has"
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.restarts and trainer.current_epoch > self._epoch:
            self.average.updates = 0
        self._epoch = trainer.current_epoch

    @override
    def on_step(self, trainer: Trainer, done: int) -> None:
        settings = self.settings
        every = settings.every
        now = ends_epoch(trainer, done) if every is None else trainer.global_step % every == 0
        passed = trainer.current_epoch + 1 if every is None else trainer.global_step
        if now and passed > settings.start:
            count = self.average.updates
            self.average.update(1 - settings.decay if settings.kind == "ema" else 1 / (count + 1))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.average.show()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average.hide()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.average.hide()


# The entry of a checkpoint's plain part with the raw dense weights, where `state_dict` has their
# average.
OF_AVERAGE = "weight_average"


class WeightAverage:
    """The average of the weights of a module, beside the weights that train.

    Args:
        every: The steps between two updates, infinity if epochs lie between them; None if there is
            no average.

    Attributes:
        updates: The number of updates so far; the weights have no average before the first.
    """

    def __init__(self, every: float | None = None) -> None:
        self.every = every
        self.updates = 0
        self._trained: dict[str, Tensor] = {}
        self._average: dict[str, Tensor] = {}
        self._has_average = False
        self._shown = False  # whether the average is in the place of the weights
        self._raw: dict[str, Tensor] = {}  # the weights meanwhile
        self._alike: dict[str, str] = {}
        self._tables: Sequence[ShardedTables] = ()

    def keep(self, module: LightningModule, tables: Sequence[ShardedTables]) -> None:
        """Make room for an average that begins anew; a checkpoint may fill it.

        Args:
            module: The module, with its tables sharded.
            tables: The sharded tables of the module.
        """
        self.updates = 0
        self._has_average = True
        with without_tables(sharded_collections(module)):
            state = module.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        floats = {name: weight for name, weight in state.items() if weight.is_floating_point()}
        # layers may share a parameter, which has several names then
        self._alike = {name: first.setdefault(id(weight), name) for name, weight in floats.items()}
        self._trained = {name: floats[name].detach() for name in first.values()}
        self._average = {
            name: weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for name, weight in self._trained.items()
        }
        self._tables = tables
        for shared in tables:
            shared.keep_average()

    def update(self, weight: float) -> None:
        """Move the average a share of the way towards the weights. The first update copies them.
        Every rank calls it between two steps.
        """
        share = weight if self.updates else 1.0
        for name, average in self._average.items():
            trained = self._trained[name].to(average.dtype)
            average.copy_(trained) if share == 1 else average.lerp_(trained, share)
        for shared in self._tables:
            shared.update_average(share)
        self.updates = self.updates + 1

    def show(self) -> None:
        """Put the average in the place of the weights. Every rank calls it between two steps."""
        if not self.updates or self._shown:
            return
        self._raw = {name: weight.clone() for name, weight in self._trained.items()}
        self._write(self._average, shown=True)

    def hide(self) -> None:
        """Put the raw weights back."""
        if self._shown:
            self._write(self._raw, shown=False)
            self._raw = {}

    def _write(self, values: Mapping[str, Tensor], *, shown: bool) -> None:
        self._shown = shown
        for name, weight in self._trained.items():
            weight.copy_(values[name])
        for shared in self._tables:
            shared.show_average(shown)

    # ---- checkpoints

    def averaged(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dense part's state with the average in the place of the weights."""
        if not self.updates:
            return dict(state)
        average = {
            name: self._average[first].to(state[name].dtype)
            for name, first in self._alike.items()
            if name in state
        }
        return {**state, **average}

    def entries(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's plain part: the raw weights, and averages that are
        wider than these.
        """
        if not self.updates:
            return {}
        raw = self._raw or self._trained
        wide = {n: mean for n, mean in self._average.items() if mean.dtype != raw[n].dtype}
        return {OF_AVERAGE: {RAW: {n: raw[f] for n, f in self._alike.items()}, AVERAGE: wide}}

    def tensors(self) -> dict[str, Tensor]:
        """Return by name the raw weights and the average of a checkpoint, for a check."""
        if not self.updates:
            return {}
        raw = {f"{name}, raw": weight for name, weight in (self._raw or self._trained).items()}
        return raw | {f"{name}, average": mean for name, mean in self._average.items()}

    def loaded(self, meta: Mapping[str, Any], noted: bool = False) -> dict[str, Any]:
        """Take over the average of a checkpoint, if it has one.

        Args:
            meta: The plain part of the checkpoint.
            noted: Whether to say that this run keeps no average, if that is so.

        Returns:
            The plain part with the raw dense weights, with which training goes on.

        Raises:
            CheckpointError: The average belongs to another model.
        """
        if OF_AVERAGE not in meta:
            return dict(meta)
        if not self._has_average and noted:
            note(
                "the checkpoint has an average of the weights, and trainer.average.kind=none ends "
                "it: training goes on with the raw weights, and the model will have the last ones"
            )
        state = meta["state_dict"]
        with state_must_fit("the average of weights", "model"):
            stored = meta[OF_AVERAGE]
            for name, average in self._average.items():
                average.copy_(stored[AVERAGE].get(name, state[name]))
            raw = stored[RAW] | {name: stored[RAW][name] for name in self._alike}
            return {**meta, "state_dict": {**state, **raw}}
