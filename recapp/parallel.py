"""Model-parallel tables and data-parallel layers, for a torchrun script without Lightning: every
collection of a model is replaced by its sharded twin, and DDP wraps the rest.

    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DistributedModelParallel(MyModel(collection))
    optimizer = HybridOptimizer(torch.optim.Adam(model.parameters()), model.sparse_groups())
    ...
    torch.save(model.state_dict(), f"rank{rank}.pt")    # the strips of this rank
    whole = gathered_state_dict(model)                  # on rank 0, as the unsharded model has it

A sharder has the settings of sharding. It also shards a single collection:

    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": 0.1})
    plan = planner.collective_plan(collection, [sharder])
    sharded = sharder.shard(collection, plan.plan[""], env)

Names and argument order are those of TorchRec's classes. One sharder serves all collections of a
model, of bags and of sequences. There is only one engine, so no sharder needs to be registered.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recapp.console import note_once
from recapp.data_parallel import own_device, process_group_of, tables_group, wrap_dense
from recapp.engine.sharded_collection import (
    ShardedCollection,
    shard_model,
    sharded_collections,
    sharded_tables,
    sharded_twins,
)
from recapp.errors import ConfigError
from recapp.graphs.module_graph import ModuleGraph
from recapp.optim.named_rules import Rules, is_rules
from recapp.optim.rules import WITHOUT_RATE, RowRule, rowwise_adagrad
from recapp.optim.table_rule import describe, table_rule, with_frozen_of
from recapp.planner.embedding_planner import EmbeddingShardingPlanner
from recapp.settings.other_systems import fused
from recapp.sharding.sharding_plan import ShardingPlan, TableSharding
from recapp.sharding.sharding_types import BUILT_IN
from recapp.tables.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    UnshardedCollection,
)
from recapp.transport.join_ranks import make_comm


class CollectionSharder:
    """The optimiser of a model's tables, and the dtype of their vectors in messages.

    Args:
        fused_params: The optimiser as TorchRec's settings
            (`recapp/compat/torchrec/keyed.py`), or a row rule (`recapp/optim/rules.py`); the
            entry `tables` has settings of single tables. None takes the optimiser that was applied
            in backward to the tables (`recapp/optim/named_rules.py`), or else row-wise Adagrad at
            its default rate.
        qcomm_codecs_registry: The result of `get_qcomm_codecs_registry` for a `QCommsConfig`, with
            the dtype of vectors and gradients in messages. None or {} takes the compute type.
        rule: A row rule, or rules by table name or glob (`recapp/optim/named_rules.py`), instead
            of `fused_params`.

    Raises:
        ConfigError: The optimiser is not a row rule, `fused_params` and `rule` are both given, or
            `qcomm_codecs_registry` is not a registry.
    """

    # The class of the modules that the sharder shards.
    module_type: ClassVar[type[Any]]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | RowRule | None = None,
        qcomm_codecs_registry: Any = None,
        *,
        rule: Rules | None = None,
    ) -> None:
        if fused_params is not None and rule is not None:
            raise ConfigError(
                "fused_params and rule both set the optimiser of the tables: give only one of them"
            )
        if not isinstance(fused_params, RowRule | Mapping | None):
            raise ConfigError(
                f"fused_params is a {type(fused_params).__name__}: give a dict such as "
                '{"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}, or a row rule'
            )
        if not is_rules(rule):
            raise ConfigError(
                f"rule is a {type(rule).__name__}: give a row rule such as adagrad(0.05), or a "
                'dict of them by table name or glob, {"*": adagrad(0.05), "C3": sgd(0.1)}'
            )
        self.rule: Rules | None = (
            fused("rules_of_fused_params")(fused_params)
            if isinstance(fused_params, Mapping)
            else fused_params or rule
        )
        self.payload: torch.dtype | None = None
        if qcomm_codecs_registry is not None and qcomm_codecs_registry != {}:
            if not hasattr(qcomm_codecs_registry, "payload"):
                raise ConfigError(
                    f"qcomm_codecs_registry is a {type(qcomm_codecs_registry).__name__}: make it "
                    "with recapp's get_qcomm_codecs_registry(QCommsConfig(...)), or leave it out"
                )
            self.payload = qcomm_codecs_registry.payload

    def shardable_parameters(self, module: UnshardedCollection) -> dict[str, nn.Parameter]:
        """Return the weights of a collection by table name."""
        return {
            t.name: nn.Parameter(weight) if not isinstance(weight, nn.Parameter) else weight
            for t in module.tables()
            for weight in [module.weight(t.name)]
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the names of the sharding types, the same for every device."""
        return [record.name for record in BUILT_IN]

    def shard(
        self,
        module: UnshardedCollection,
        params: Mapping[str, TableSharding],
        env: Any = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """Return the sharded twin of a collection. Every rank calls it.

        Args:
            module: The collection, which does not change.
            params: The sharding of each table: `plan.plan[path]`.
            env: The ranks, as for `DistributedModelParallel`.
            device: The device of this rank; None takes the rank's GPU where the process group is
                NCCL, else the CPU.
            module_fqn: The path of the collection, for error texts.

        Raises:
            PlanError: `params` has other tables than the collection, or is for another number of
                ranks.
            ConfigError: The optimiser contradicts the one that was applied in backward.
        """
        ranks = process_group_of(env)
        comm = make_comm(tables_group(ranks), device or own_device(ranks))
        plan = ShardingPlan(dict(params), comm.world, name=module_fqn or "custom")
        plan.check(module.tables())
        rule = with_frozen_of(table_rule(module, [self]) or rowwise_adagrad(), module)
        (twin,) = sharded_twins([module], plan, comm, rule, payload=self.payload)
        return twin

    def __repr__(self) -> str:
        named = "default" if self.rule is None else describe(self.rule)
        return f"{type(self).__name__}({named}, payload={self.payload})"


class EmbeddingBagCollectionSharder(CollectionSharder):
    """A sharder with the name of TorchRec's sharder for collections of bags."""

    module_type = EmbeddingBagCollection


class EmbeddingCollectionSharder(CollectionSharder):
    """A sharder with the name of TorchRec's sharder for collections of sequences. Arguments as for
    `CollectionSharder`: the optimiser of touched rows, and the dtype of vectors in messages.
    """

    module_type = EmbeddingCollection


def get_default_sharders() -> list[CollectionSharder]:
    """Return the default sharders of `DistributedModelParallel`."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def payload_of(sharders: Sequence[CollectionSharder] | None) -> torch.dtype | None:
    """Return the dtype of vectors in messages that sharders name; None for the compute type.

    Raises:
        ConfigError: The sharders name different dtypes.
    """
    payloads = [sharder.payload for sharder in sharders or ()]
    if len(set(payloads)) > 1:
        raise ConfigError(
            f"sharders have different types of sent vectors, {payloads}: pass a single sharder, "
            "which shards all tables of a model"
        )
    return payloads[0] if payloads else None


class DistributedModelParallel(nn.Module):
    """A model with sharded tables and a replicated dense part, outside of Lightning.

    Args:
        module: A model with `EmbeddingBagCollection`s, or one of them; best built on
            `torch.device("meta")`.
        env: The ranks: a process group, or an object that has one as `process_group` (TorchRec's
            `ShardingEnv`); None takes the default group, or this process alone where there is none.
            A group that you pass carries the messages of the tables: do not send messages of your
            own on it.
        device: The device of this rank, or its name. None takes the rank's GPU where the process
            group is NCCL, else the CPU.
        plan: The sharding plan of the tables; None lets recapp plan.
        sharders: A list of one `EmbeddingBagCollectionSharder`, with the optimiser of touched rows
            and the dtype of vectors and gradients in messages. None takes the optimiser that
            `torch.distributed.optim._apply_optimizer_in_backward` has set on the tables, or else
            row-wise Adagrad at its default rate.
        init_data_parallel: Whether to wrap the dense part in DDP now. If False, call
            `init_data_parallel()` once the dense part is final.
        init_parameters: Whether dense parameters on the meta device get their start values, by
            `reset_parameters` of their modules. If False, they get memory without values, for a
            state dict that is loaded next.
        transport: The transport of the tables' messages (`recapp/transport/join_ranks.py`).
        graph: Whether to record forward and backward of training calls as two CUDA graphs, on GPUs
            (`recapp/graphs/module_graph.py`). The Python of the model then runs in the first calls
            only. Where that cannot be, a note says why, and nothing changes.

    Attributes:
        graph: The recorded calls (`ModuleGraph`); None without `graph=True`, and before
            `init_data_parallel()`.

    Raises:
        ConfigError: `env` or `sharders` cannot be used, or the sharders contradict the optimiser
            applied in backward.

    Scale the loss so that its mean over ranks is the loss of the global batch, as for DDP.

    `backward` updates the tables, as with any fused optimiser, and tables have no gradient. So do
    not accumulate gradients: two backwards before one `optimizer.step()` update the touched rows
    twice, each with the current learning rate, while dense gradients add up. Use a larger batch.

    `parameters()` returns the dense parameters, and the tables that the plan makes parameters. Such
    a table has the gradient of the global batch, as if DDP had reduced it. `sparse_groups()`
    returns the param groups, with the learning rates, of the other tables.

    `state_dict()` has the names of the unsharded model. A table is a list of the strips (rows,
    cols, tensor) of this rank, with the methods `local_shards()` and `metadata()` of torch's
    ShardedTensor. `load_state_dict()` takes such strips, also from a file, or whole tables
    (`recapp/engine/sharded_state.py`). Every rank calls both. They do not include the state of the
    tables' optimiser.
    """

    def __init__(
        self,
        module: nn.Module,
        env: Any = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[CollectionSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        *,
        transport: str = "auto",
        graph: bool = False,
    ) -> None:
        super().__init__()
        self._ranks = process_group_of(env)
        user_rule = table_rule(module, sharders)
        rule = with_frozen_of(user_rule or rowwise_adagrad(), module)
        self.device = own_device(self._ranks) if device is None else torch.device(device)
        self.comm = make_comm(tables_group(self._ranks), self.device, transport)
        planner = EmbeddingShardingPlanner(rule=rule)
        self.plan = plan or planner.collective_plan(module, pg=self.comm.group)
        module = shard_model(module, self.plan, self.comm, rule, payload=payload_of(sharders))
        _materialise(module, self.device, init_parameters)
        self._wrapped = module.to(self.device)
        self._graphs = graph
        self.graph: ModuleGraph | None = None
        if init_data_parallel:
            self.init_data_parallel()
        self._rate_is_known = user_rule is not None
        for shared in sharded_tables(module):
            shared.update.before_first_update = self._note_rate
        self.register_load_state_dict_pre_hook(_below_wrapper)  # type: ignore[no-untyped-call]

    def init_data_parallel(self) -> None:
        """Wrap the dense part in DDP, unless it is wrapped. Graphs begin here. Every rank calls
        it.
        """
        if self._wrapped is self.module:
            on_gpu = self.device.type == "cuda" and self.device.index is not None
            self._wrapped = wrap_dense(
                self.module,
                self.comm,
                device_ids=[self.device.index] if on_gpu else None,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                process_group=self._ranks,
            )
        if self._graphs and self.graph is None:
            self.graph = ModuleGraph(self._wrapped, self.device)

    @property
    def module(self) -> nn.Module:
        """Return the model without DDP around it."""
        wrapped = self._wrapped
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return (self.graph or self._wrapped)(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or train all parameters, those of the tables too. Every rank calls it.

        Raises:
            ConfigError: As for a sharded collection.
        """
        for collection in sharded_collections(self):
            collection.requires_grad_(requires_grad)
        return super().requires_grad_(requires_grad)

    def sparse_groups(self) -> list[dict[str, Any]]:
        """Return the param groups of the tables, for `HybridOptimizer` or to set learning rates by
        hand.
        """
        self._rate_is_known = True
        return [group for shared in sharded_tables(self) for group in shared.param_groups]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module, under the names of the module without wrappers. Every
        rank calls it.

        Raises:
            IdError: With a graph, an id of one of the last calls is outside of its table.
            TrainingError: With a graph, a gradient of one of the last calls was not finite.
        """
        if self.graph is not None:
            self.graph.finish()
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a `state_dict` of this class or of the unsharded model. Every rank calls it.

        Raises:
            RuntimeError: As for any module: names are missing or unknown, or tables do not fit; the
                text has a line for each.
        """
        return self.module.load_state_dict(state_dict, strict, assign)

    @property
    def fused_optimizer(self) -> Any:
        """Return the update of all tables as an optimiser object, for `CombinedOptimizer`."""
        self._rate_is_known = True
        return fused("FusedOptimizer")(
            {
                path: part
                for path, part in self.module.named_modules()
                if isinstance(part, ShardedCollection)
            }
        )

    def _note_rate(self) -> None:
        """Print a note that the tables train, with their learning rate, for users whose optimiser
        has only `parameters()`.
        """
        fused = [rule for rule in sharded_tables(self)[0].update.rules if rule not in WITHOUT_RATE]
        if fused and not self._rate_is_known and not self.comm.rank:
            (rule,) = fused
            note_once(
                f"tables are updated in backward by {rule.name} at its default learning rate "
                f"{rule.lr}; an optimizer over model.parameters() does not reach them: pass "
                "sharders=[EmbeddingBagCollectionSharder(rule)], or give model.sparse_groups() to "
                "HybridOptimizer"
            )
        self._rate_is_known = True

    def extra_repr(self) -> str:
        """Return the plan in one line. The collections below show the placement of their tables."""
        return f"plan={self.plan.name}, rank {self.comm.rank} of {self.comm.world}, {self.device}"


def _below_wrapper(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the prefix of the wrappers, which `state_dict` leaves out, to the names when the parent
    module loads a state dict.
    """
    assert isinstance(model, DistributedModelParallel)
    wrappers = "_wrapped." if model.module is model._wrapped else "_wrapped.module."
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + wrappers + name.removeprefix(prefix)] = state.pop(name)


def _materialise(module: nn.Module, device: torch.device, with_values: bool) -> None:
    """Give dense parameters and buffers on the meta device memory, and start values if
    `with_values`.

    Raises:
        ConfigError: A module cannot make start values.
    """
    for path, part in module.named_modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(t.is_meta for t in tensors):
            continue
        reset = getattr(part, "reset_parameters", None)
        if with_values and reset is None:
            raise ConfigError(
                f"{path} ({type(part).__name__}) is on the meta device and has no "
                "reset_parameters(): build it on a real device, or pass init_parameters=False and "
                "load its state"
            )
        part.to_empty(device=device, recurse=False)
        if with_values and reset is not None:
            reset()
