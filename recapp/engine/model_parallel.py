"""Model-parallel tables and data-parallel layers, for a torchrun script without Lightning: every
collection of a model is replaced by its sharded twin, and DDP wraps the rest.

    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DistributedModelParallel(MyModel(collection))
    optimizer = HybridOptimizer(torch.optim.Adam(model.parameters()), model.sparse_groups())
    ...
    torch.save(model.state_dict(), f"rank{rank}.pt")    # the strips of this rank
    whole = gathered_state_dict(model)                  # on rank 0, as the unsharded model has it

Names and argument order are those of TorchRec's class.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recapp.console import note_once
from recapp.engine.fused_optimizer import FusedOptimizer
from recapp.engine.shard_model import shard_model, sharded_tables, wrap_dense
from recapp.engine.sharded_collection import ShardedCollection
from recapp.engine.sharder import (
    CollectionSharder,
    own_device,
    payload_of,
    process_group_of,
    tables_group,
)
from recapp.errors import ConfigError
from recapp.optim.rules import GRADIENT, rowwise_adagrad
from recapp.optim.table_rule import table_rule
from recapp.planner.embedding_planner import EmbeddingShardingPlanner
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.transport.choose_transport import make_comm


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
        transport: The transport of the tables' messages (`recapp/transport/choose_transport.py`).

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
    ) -> None:
        super().__init__()
        self._ranks = process_group_of(env)
        chosen = table_rule(module, sharders)
        rule = chosen or rowwise_adagrad()
        self.device = own_device(self._ranks) if device is None else torch.device(device)
        self.comm = make_comm(tables_group(self._ranks), self.device, transport)
        planner = EmbeddingShardingPlanner(rule=rule)
        self.plan = plan or planner.collective_plan(module, process_group=self.comm.group)
        module = shard_model(module, self.plan, self.comm, rule, payload=payload_of(sharders))
        _materialise(module, self.device, init_parameters)
        self._wrapped = module.to(self.device)
        if init_data_parallel:
            self.init_data_parallel()
        self._rate_is_known = chosen is not None
        for shared in sharded_tables(module):
            shared.update.before_first_update = self._note_rate
        self.register_load_state_dict_pre_hook(_below_wrapper)  # type: ignore[no-untyped-call]

    def init_data_parallel(self) -> None:
        """Wrap the dense part in DDP, unless it is wrapped. Every rank calls it."""
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

    @property
    def module(self) -> nn.Module:
        """Return the model without DDP around it."""
        wrapped = self._wrapped
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._wrapped(*args, **kwargs)

    def sparse_groups(self) -> list[dict[str, Any]]:
        """Return the param groups of the tables, for `HybridOptimizer` or to set learning rates by
        hand.
        """
        self._rate_is_known = True
        return [group for shared in sharded_tables(self) for group in shared.param_groups]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module, under the names of the module without wrappers. Every
        rank calls it.
        """
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
    def fused_optimizer(self) -> FusedOptimizer:
        """Return the update of all tables as an optimiser object, for `CombinedOptimizer`."""
        self._rate_is_known = True
        return FusedOptimizer(
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
        fused = [rule for rule in sharded_tables(self)[0].update.rules if rule != GRADIENT]
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
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not any(t.is_meta for t in own):
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
