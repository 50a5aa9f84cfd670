"""The sharded twin of an `EmbeddingBagCollection`: same input, same output, any plan.

    features -> Requests (input_dist) -> Lookup (lookup, output_dist; backward updates the rows) -> KeyedTensor

Rows live in one store per group (`recapp/distributed/row_store.py`). The optimiser is fused into backward: a table has no gradient. The
live learning rate is read from `param_group`, which the one optimiser object holds too, so schedules reach tables like any parameter.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recapp.distributed.comm import Comm
from recapp.distributed.lookup import Lookup
from recapp.distributed.message import Buffers, Header
from recapp.distributed.requests import Requests
from recapp.distributed.row_store import RowStore
from recapp.distributed.shared_state import SharedState
from recapp.errors import PlanError
from recapp.kernels.reference import Links, group, pool, square_sums
from recapp.optim.rules import RowRule
from recapp.sharding.layout import Block, make_layout
from recapp.sharding.modes import Routes
from recapp.sharding.plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.tables.config import EmbeddingBagConfig, PoolingType, output_names
from recapp.tables.embedding_bag import compute_dtype
from recapp.tables.ids import IdRules


class ShardedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` whose tables lie where a plan says.

    Args:
        tables: as of the unsharded collection.
        plan: of exactly these tables, for as many ranks as `comm` has.
        comm: the ranks.
        rule: what happens to touched rows.
        seed: of the start values: the same model under every plan.

    Raises:
        PlanError: the plan does not tile the tables or was made for another number of ranks.
    """

    def __init__(self, tables: list[EmbeddingBagConfig], plan: ShardingPlan, comm: Comm, rule: RowRule, seed: int = 0) -> None:
        super().__init__()
        if plan.world_size != comm.world:
            raise PlanError(f"plan {plan.name} is for {plan.world_size} ranks, but there are {comm.world}: "
                            f"set trainer.devices={plan.world_size} or make the plan for {comm.world}")
        self.layout, self.plan, self.comm, self.rule = make_layout(tables, plan), plan, comm, rule
        self.dtype, device = compute_dtype(tables), comm.device
        self.id_rules = IdRules(tables)
        self.routes = [Routes(self.layout, g, comm.rank, device) for g in range(len(self.layout.groups))]
        self.stores = nn.ModuleList([RowStore(self.layout, g, comm.rank, rule, self.dtype, device) for g in range(len(self.layout.groups))])
        pairs = [t for t, _ in self.id_rules.pairs]
        self.width = sum(t.embedding_dim for t in pairs)
        self.any_mean = any(t.pooling is PoolingType.MEAN for t in pairs)
        self.mean_F = torch.tensor([t.pooling is PoolingType.MEAN for t in pairs], device=device)
        self.dim_F = torch.tensor([t.embedding_dim for t in pairs], device=device)
        slots = sorted((s.column, g, i) for g, held in enumerate(self.layout.groups) for i, s in enumerate(held.slots))
        self.columns = [(g, i) for _, g, i in slots]
        self.anchor = torch.zeros(0, device=device, requires_grad=True)
        self.agree = SharedState(self.layout, comm) if rule.needs_row and self.layout.column_cut else None
        self.header, self.messages = Header(), Buffers()
        self.in_flight: weakref.WeakSet[Requests] = weakref.WeakSet()
        self._waiting: list[tuple[list[Tensor], list[Tensor]]] = []
        self.updates = 0
        self.param_group: dict[str, Any] = {"params": [], "lr": rule.lr, "name": f"sparse/{rule.name}"}
        self.reset_parameters(seed)

    def reset_parameters(self, seed: int) -> None:
        """Write the start values of every row held here; optimiser state becomes zero."""
        for g in range(len(self.stores)):
            self.store(g).reset(seed)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return list(self.layout.tables)

    def store(self, group: int) -> RowStore:
        """The rows of a group on this rank."""
        store = self.stores[group]
        assert isinstance(store, RowStore)
        return store

    def input_dist(self, features: KeyedJaggedTensor) -> Requests:
        """Exchange which rows a batch needs. Reads no weights, so it may run before the batch's turn has come; every rank calls it."""
        return Requests(features, self.layout, self.routes, self.id_rules, self.comm, self.header, self.messages, self.dtype)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool every bag; every rank calls it with its own batch, an empty one if need be.

        Args:
            features: raw ids of at least the tables' features.

        Returns:
            [B, sum of dims], keyed by feature (`feature@table` where several tables read one).

        Raises:
            IdError: on all ranks, if one of them has an id outside a table whose rule is `error`.
        """
        self.finish_step()
        requests = self.input_dist(features)
        values_BD = Lookup.apply(self.anchor, requests.weights_L, self, requests)  # type: ignore[no-untyped-call]
        assert isinstance(values_BD, Tensor)
        if values_BD.requires_grad:
            self.in_flight.add(requests)
        assert values_BD.requires_grad or not torch.is_grad_enabled(), "without a gradient the tables would silently not train"
        return KeyedTensor(output_names(self.layout.tables), [t.embedding_dim for t, _ in self.id_rules.pairs], values_BD)

    def learn(self, requests: Requests, row_GU: list[Tensor], grad_GUD: list[Tensor]) -> None:
        """Take one lookup's gradients; update once the last lookup of this step has come back."""
        self.in_flight.discard(requests)
        self._waiting.append((row_GU, grad_GUD))
        if not self.in_flight:
            self._update()

    def finish_step(self) -> None:
        """Update with gradients that still wait for another lookup of their step, which had no part in the loss.

        Such an output may be held for ever, and on some ranks only: so the next lookup or reading of the rows ends a step for certain.
        """
        if self._waiting:
            self._update()

    @torch.no_grad()
    def _update(self) -> None:
        row_GU, grad_GUD = self._waiting[0] if len(self._waiting) == 1 else self._merged()
        self._waiting = []
        self.updates += 1
        lr = float(self.param_group["lr"])
        lr = self.rule.rate(lr, self.updates) if self.rule.rate else lr
        means: list[Tensor | None] = [None] * len(row_GU)
        if self.rule.needs_row:
            squares = [square_sums(grad_UD) for grad_UD in grad_GUD]
            if self.agree:
                squares = self.agree(row_GU, squares)
            means = [self._mean(g, row_U, total_U) for g, (row_U, total_U) in enumerate(zip(row_GU, squares, strict=True))]
        for g, (row_U, grad_UD, mean_U1) in enumerate(zip(row_GU, grad_GUD, means, strict=True)):
            self.store(g).update(row_U, grad_UD, mean_U1, lr)

    def _mean(self, group: int, row_U: Tensor, total_U: Tensor) -> Tensor:
        """Sums of squares over whole rows become means: a strip's table may be wider than the strip."""
        if self.agree is None:
            return (total_U / self.store(group).width).to(self.dtype)[:, None]
        store = self.store(group)
        edge = torch.tensor([p.base for p in store.pieces] or [0], device=row_U.device)
        dim_K = torch.tensor([self.layout.tables[self.layout.strips[p.strip].table].embedding_dim for p in store.pieces] or [1],
                             device=row_U.device)
        return (total_U / dim_K[torch.searchsorted(edge, row_U, right=True) - 1]).to(self.dtype)[:, None]

    def _merged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Several lookups of one step: a row's gradients are added in the order in which the lookups came back."""
        rows, grads = [], []
        for g in range(len(self.stores)):
            distinct = group(torch.cat([row_GU[g] for row_GU, _ in self._waiting]))
            rows.append(distinct.key_U)
            grads.append(pool(torch.cat([grad_GUD[g] for _, grad_GUD in self._waiting]), Links(distinct.order_N.int(), distinct.start_U1)))
        return rows, grads

    def blocks(self) -> Iterator[Block]:
        """The rectangles held here, as views: what a checkpoint reads and writes. Every rank calls it."""
        self.finish_step()
        for g in range(len(self.stores)):
            yield from self.store(g).blocks()

    def extra_repr(self) -> str:
        """Which tables lie where."""
        lines = []
        for t in self.layout.tables:
            s = self.plan.tables[t.name]
            ranks = "all ranks" if s.mode == "replicated" else f"rank{'s' if len(s.ranks) > 1 else ''} {', '.join(map(str, s.ranks))}"
            lines.append(f"{t.name}: {t.num_embeddings:,} x {t.embedding_dim}, {s.sharding_type}, {s.mode}, {ranks}")
        return f"plan={self.plan.name}, rank {self.comm.rank} of {self.comm.world}\n" + "\n".join(lines)
