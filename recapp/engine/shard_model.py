"""Sharding is a function applied to a finished model: every `EmbeddingBagCollection` in it is
replaced by its sharded twin.

`DistributedModelParallel` does that and wraps the rest in DDP, for an ordinary torchrun script
without Lightning:

    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DistributedModelParallel(MyModel(collection))
    optimizer = HybridOptimizer(torch.optim.Adam(model.parameters()), model.sparse_groups())
    ...
    torch.save(model.state_dict(), f"rank{rank}.pt")    # what this rank holds
    whole = gathered_state_dict(model)                  # on rank 0, as the unsharded model has it

Names and argument order as in TorchRec's class of that name.
"""

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric, MetricCollection

from recapp.console import note
from recapp.engine.sharded_embedding_bag import ShardedEmbeddingBagCollection
from recapp.errors import ConfigError
from recapp.optim.rules import RowRule, rowwise_adagrad
from recapp.optim.table_rule import check_same_rule, rule_in_backward, table_rule
from recapp.planner.embedding_planner import EmbeddingShardingPlanner
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.tables.embedding_bag import EmbeddingBagCollection
from recapp.tables.lookups import embedding_tables
from recapp.transport.choose_transport import make_comm
from recapp.transport.communicator import Comm
from recapp.transport.dense_gradients import AverageOverRanks


@dataclass(frozen=True)
class EmbeddingBagCollectionSharder:
    """How collections become sharded ones.

    Args:
        rule: What happens to touched rows (`recapp/optim/rules.py`); None takes the optimiser that
            was applied in backward to the tables (`recapp/optim/table_rule.py`), or else row-wise
            Adagrad at its default rate.
    """

    rule: RowRule | None = None


def embedding_collections(module: nn.Module) -> list[tuple[str, EmbeddingBagCollection]]:
    """Return every unsharded collection in a model, by path; one that a model holds twice is listed
    twice.
    """
    return [
        (path, m)
        for path, m in module.named_modules(remove_duplicate=False)
        if isinstance(m, EmbeddingBagCollection)
    ]


def sharded_collections(module: nn.Module) -> list[ShardedEmbeddingBagCollection]:
    """Return every sharded collection in a model."""
    return [m for m in module.modules() if isinstance(m, ShardedEmbeddingBagCollection)]


def shard_model(
    module: nn.Module,
    plan: ShardingPlan,
    comm: Comm,
    rule: RowRule | None,
    backend: str = "auto",
    payload: torch.dtype | None = None,
    trains: bool = True,
) -> None:
    """Replace every collection in a model, in place. What is sharded already stays.

    Args:
        module: The model.
        plan: Where its tables lie.
        comm: Communicator of the ranks.
        rule: Optimiser of the rows; None for tables that are only read.
        backend: As of the sharded collection.
        payload: As of the sharded collection.
        trains: As of the sharded collection.

    Rows of a collection that was built on a real device are taken over; on the meta device there
    are none, and the start values are those of the collection's seed, the same under every plan.

    Raises:
        PlanError: The plan does not cover the model's tables or is for another number of ranks.
        ConfigError: The model itself is a collection, which has no parent to hold its twin; or
            another optimiser was applied in backward to its tables.
    """
    found = embedding_collections(module)
    in_backward = rule_in_backward(module)
    if in_backward and rule:
        check_same_rule(in_backward, rule, "the rule that shards them")
    if found:
        plan.check(embedding_tables(module))
    twins: dict[EmbeddingBagCollection, ShardedEmbeddingBagCollection] = {}
    for path, collection in found:
        if not path:
            raise ConfigError(
                "a collection cannot be sharded in place by itself: put it into a module, "
                "or use ShardedEmbeddingBagCollection"
            )
        if collection not in twins:
            twins[collection] = _twin(collection, plan, comm, rule, backend, payload, trains)
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, twins[collection])


def _twin(
    collection: EmbeddingBagCollection,
    plan: ShardingPlan,
    comm: Comm,
    rule: RowRule | None,
    backend: str,
    payload: torch.dtype | None,
    trains: bool,
) -> ShardedEmbeddingBagCollection:
    tables = collection.embedding_bag_configs()
    twin = ShardedEmbeddingBagCollection(
        tables,
        plan.part([t.name for t in tables]),
        comm,
        rule,
        collection.seed,
        backend,
        payload,
        trains,
        lookups=collection.lookups,
    )
    twin.leave_room(collection.room)
    for block in twin.blocks():
        whole = collection.weight(block.table)
        if block.tensor == "weight" and whole.device.type != "meta":
            block.data.copy_(
                whole.detach()[
                    block.rows.start : block.rows.stop, block.cols.start : block.cols.stop
                ]
            )
    return twin


def sharded_names(module: nn.Module) -> list[str]:
    """Return the names of parameters and buffers of sharded collections: what DDP must neither
    broadcast nor reduce.
    """
    return [
        f"{path}.{name}"
        for path, m in module.named_modules()
        if isinstance(m, ShardedEmbeddingBagCollection)
        for name, _ in [*m.named_parameters(), *m.named_buffers()]
    ]


def wrap_dense(module: nn.Module, comm: Comm, **settings: Any) -> nn.Module:
    """Wrap everything that is not sharded in DDP; return the module itself where nothing has to be
    reduced.

    DDP would broadcast rank 0's shards over the others without a word, so their names are on its
    ignore list. On CPUs gradients travel as the tables' messages do and are added in rank order
    (`recapp/transport/dense_gradients.py`), on GPUs by DDP's all-reduce.

    Raises:
        ConfigError: Dense parameters of several CPU ranks have an optimiser in backward.
    """
    names = sharded_names(module)
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, names)  # type: ignore[no-untyped-call]
    parameters = module.named_parameters()
    dense = {name: p for name, p in parameters if name not in names and p.requires_grad}
    if comm.world == 1 or not dense:
        return module
    in_backward = [name for name, p in dense.items() if hasattr(p, "_in_backward_optimizers")]
    if in_backward and comm.device.type == "cpu":
        raise ConfigError(
            f"{in_backward[0]} has an optimizer by apply_optimizer_in_backward, which torch's DDP "
            "runs on GPUs only: give the dense parameters an optimizer that is stepped, and apply "
            "it "
            "to the tables alone"
        )
    # torch 2.13 renames broadcast_buffers; 2.11 knows no other name
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        wrapped = DistributedDataParallel(module, **settings)
    if comm.device.type == "cpu":
        wrapped.register_comm_hook(None, AverageOverRanks(comm.twin()))
    return wrapped


def compile_dense(module: nn.Module) -> list[str]:
    """Compile every part of a model that holds no table with `torch.compile`, in place; names and
    start values stay. Metrics are no part.

    Call it once the tables are sharded and before DDP. A part is compiled when it is first called,
    for minutes where it is large.

    Returns:
        The paths of those parts.

    Raises:
        ConfigError: There is no C++ compiler, which torch needs for the CPU.
    """
    device = next((p.device.type for p in module.parameters()), "cpu")
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"engine.compile=true: torch.compile needs a C++ compiler and there is no {compiler} "
            "here: install one, name "
            "yours in CXX, or leave engine.compile=false"
        )
    chosen: list[str] = []
    for path, child in module.named_children():
        if isinstance(child, ShardedEmbeddingBagCollection | Metric | MetricCollection):
            continue
        if sharded_collections(child):
            chosen += [f"{path}.{below}" for below in compile_dense(child)]
        else:
            child.compile()
            chosen.append(path)
    return chosen


class DistributedModelParallel(nn.Module):
    """A model with sharded tables and a replicated dense part, outside of Lightning.

    Args:
        module: Holds `EmbeddingBagCollection`s, best built on `torch.device("meta")`.
        env: The ranks: a process group, or an object that has one as `process_group` (TorchRec's
            `ShardingEnv`); None takes the default group, or this process alone where there is none.
            A group that is handed in carries the tables' messages: use it for no messages of your
            own.
        device: Device of this rank; None takes the rank's GPU where the process group is NCCL,
            else the CPU.
        plan: Where tables lie; None lets recapp decide.
        sharders: A list of one `EmbeddingBagCollectionSharder`, which names the optimiser of
            touched rows. None takes the optimiser that
            `torch.distributed.optim._apply_optimizer_in_backward` has left on the tables, or else
            row-wise Adagrad at its default rate.
        transport: Which way the tables' messages go (`recapp/transport/choose_transport.py`).

    Raises:
        ConfigError: Either `env` or `sharders` cannot be used, or sharders contradict the optimiser
            applied in backward.

    Scale the loss so that its mean over ranks is the loss of the global batch, as for DDP.

    Tables are updated inside of `backward`, as with any fused optimiser, and have no gradient: two
    backwards before one `optimizer.step()` update the touched rows twice, with the learning rate of
    that moment, while dense gradients add up. So do not accumulate gradients over several
    backwards; use a larger batch.

    `parameters()` are the dense ones. `sparse_groups()` hands out the learning rate of the tables.

    `state_dict()` has the names of the unsharded model; a table is the list of (rows, cols, tensor)
    that this rank holds. `load_state_dict()` takes that, or whole tables
    (`recapp/engine/sharded_state.py`). Every rank calls both. The state of the tables'
    optimiser is not in them.
    """

    def __init__(
        self,
        module: nn.Module,
        env: Any = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[EmbeddingBagCollectionSharder] | None = None,
        *,
        transport: str = "auto",
    ) -> None:
        super().__init__()
        ranks = _process_group(env)
        chosen = table_rule(module, sharders)
        rule = chosen or rowwise_adagrad()
        self.device = device or _own_device(ranks)
        self.comm = make_comm(_tables_group(ranks), self.device, transport)
        planner = EmbeddingShardingPlanner(rule=rule)
        self.plan = plan or planner.collective_plan(module, process_group=self.comm.group)
        shard_model(module, self.plan, self.comm, rule)
        module = module.to(self.device)
        ids = (
            [self.device.index]
            if self.device.type == "cuda" and self.device.index is not None
            else None
        )
        self._wrapped = wrap_dense(
            module,
            self.comm,
            device_ids=ids,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            process_group=ranks,
        )
        self._rate_is_known = chosen is not None
        for collection in sharded_collections(module):
            collection.update.before_first_update = self._note_rate
        self.register_load_state_dict_pre_hook(_below_wrapper)  # type: ignore[no-untyped-call]

    @property
    def module(self) -> nn.Module:
        """Return the model itself, without DDP around it."""
        wrapped = self._wrapped
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._wrapped(*args, **kwargs)

    def sparse_groups(self) -> list[dict[str, Any]]:
        """Return the param groups of the tables, for `HybridOptimizer` or to set their learning
        rate by hand.
        """
        self._rate_is_known = True
        return [c.param_group for c in sharded_collections(self)]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, under the names that it has without wrappers. Every rank calls
        it.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a `state_dict`, of this class or of the unsharded model. Every rank calls it.

        Raises:
            RuntimeError: As of any module: names that are missing or unknown, and tables that do
                not fit, a line for each.
        """
        return self.module.load_state_dict(state_dict, strict, assign)

    def _note_rate(self) -> None:
        """Note for users whose optimiser has `parameters()` alone that tables train, and at which
        rate.
        """
        collections = sharded_collections(self)
        if not self._rate_is_known and not self.comm.rank:
            rule = collections[0].rule
            assert rule is not None, "an update has a rule"
            note_once(
                f"tables are updated in backward by {rule.name} at its default learning rate "
                f"{rule.lr}; an "
                "optimizer over model.parameters() does not reach them: pass "
                "sharders=[EmbeddingBagCollectionSharder(rule)], or give model.sparse_groups() to "
                "HybridOptimizer"
            )
        self._rate_is_known = True

    def extra_repr(self) -> str:
        """Return the plan in one line; the collections below show which tables lie where."""
        return f"plan={self.plan.name}, rank {self.comm.rank} of {self.comm.world}, {self.device}"


@cache
def note_once(text: str) -> None:
    """Print a note on standard error the first time only: a script may make many models alike."""
    note(text)


def _below_wrapper(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give names the wrappers back that `state_dict` leaves out, where the module around is
    loaded.
    """
    assert isinstance(model, DistributedModelParallel)
    wrappers = "_wrapped." if model.module is model._wrapped else "_wrapped.module."
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + wrappers + name.removeprefix(prefix)] = state.pop(name)


def _process_group(env: Any) -> dist.ProcessGroup | None:
    """Of an environment; None where there is no process group at all.

    Raises:
        ConfigError: it has none, though there is one.
    """
    if env is None:
        return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    group = env if isinstance(env, dist.ProcessGroup) else getattr(env, "process_group", None)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"env is a {type(env).__name__} without a process group: pass a "
            "torch.distributed.ProcessGroup, an object that has one as process_group, or nothing "
            "for "
            "the default group"
        )
    return group


def _tables_group(ranks: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Choose the group of the tables' messages, which keep an order of their own.

    Beside the default group it is one more. A group that was handed in is taken itself, because
    only all ranks of the default group together can make another.
    """
    if ranks is None or ranks is not dist.group.WORLD:
        return ranks
    made = dist.new_group()
    assert isinstance(made, dist.ProcessGroup)
    return made


def _own_device(ranks: dist.ProcessGroup | None) -> torch.device:
    if ranks is not None and dist.get_backend(ranks) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
