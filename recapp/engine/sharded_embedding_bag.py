"""The sharded twin of an `EmbeddingBagCollection`: same input, same output, any plan.

    features -> Requests (input_dist)
             -> Lookup (lookup, output_dist; backward updates the rows) -> KeyedTensor

Rows live in one store per group (`recapp/engine/row_store.py`). The optimiser is fused into
backward: a table has no gradient. The live learning rate is read from `param_group`, which the one
optimiser object holds too, so schedules reach tables like any parameter.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from recapp.console import note
from recapp.engine.exchange_modes import make_routes
from recapp.engine.lookup import Lookup
from recapp.engine.requests import Lesson, Requests
from recapp.engine.row_statistics import SharedState
from recapp.engine.row_store import RowStore
from recapp.engine.sharded_state import put_tables_in_state
from recapp.errors import PlanError
from recapp.kernels.backend import backend as choose_backend
from recapp.kernels.backend import missed
from recapp.kernels.links import CACHE_LINE_BYTES, Bags, Links, Scratch, place_type
from recapp.kernels.warm_up import told, warm_up
from recapp.optim.rules import RowRule
from recapp.sharding.layout import Block, make_layout
from recapp.sharding.sharding_plan import ShardingPlan
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.keyed_tensor import KeyedTensor
from recapp.sparse.transfer import to_device
from recapp.tables.config import EmbeddingBagConfig, PoolingType
from recapp.tables.embedding_bag import compute_dtype
from recapp.tables.ids import IdRules, Rows
from recapp.tables.lookups import TableLookup
from recapp.transport.communicator import Comm
from recapp.transport.message_layout import Buffers, Header
from recapp.transport.waits import Sent, Waits

Message = TypeVar("Message")


class ShardedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` whose tables lie where a plan says.

    Args:
        tables: as of the unsharded collection.
        plan: of exactly these tables, for as many ranks as `comm` has.
        comm: the ranks.
        rule: what happens to touched rows.
        seed: of the start values: the same model under every plan.
        backend: which kernels run (`recapp/kernels/backend.py`); `auto` takes the fastest that is
            there.
        payload: type of vectors and gradients that travel; None takes the compute type.
        learns: whether kernels for updates are compiled ahead; without, at the first update.
        lookups: What reads the tables, in output order; None takes what the tables declare.

    Raises:
        PlanError: the plan does not tile the tables or was made for another number of ranks.
        ConfigError: the backend is unknown or not there.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        plan: ShardingPlan,
        comm: Comm,
        rule: RowRule,
        seed: int = 0,
        backend: str = "auto",
        payload: torch.dtype | None = None,
        learns: bool = True,
        lookups: Sequence[TableLookup] | None = None,
    ) -> None:
        super().__init__()
        _check_ranks(plan, comm)
        self.layout = make_layout(tables, plan, lookups)
        self.lookups = self.layout.lookups
        self.plan = plan
        self.comm = comm
        self.rule = rule
        self.dtype = compute_dtype(tables)
        device = comm.device
        self.backend = choose_backend(backend, device)
        self.payload = payload or self.dtype
        self.id_rules = IdRules(self.lookups, self.backend.rows_of_ids)
        groups = range(len(self.layout.groups))
        self.routes = [make_routes(self.layout, g, comm.rank, device) for g in groups]
        self.stores = nn.ModuleList(
            [
                RowStore(self.layout, g, comm.rank, rule, self.dtype, device, self.backend)
                for g in groups
            ]
        )
        self.widths_G = np.array([g.width for g in self.layout.groups])
        self.answered = sum(g.mode != "replicated" for g in self.layout.groups)
        self.width = sum(x.dim for x in self.lookups)
        self.leave_room(0)
        means = [x.pooling is PoolingType.MEAN for x in self.lookups]
        self.any_mean = any(means)
        self.mean_F = torch.tensor(means, device=device)
        self.anchor = torch.zeros(0, device=device, requires_grad=True)
        self.agree = (
            SharedState(self.layout, comm, self.backend)
            if rule.needs_row and self.layout.column_cut
            else None
        )
        self.header = Header()
        self.messages = Buffers()
        self.mark: Callable[[str], None] = _no_mark
        self.in_flight: weakref.WeakSet[Requests] = weakref.WeakSet()
        self.waits = Waits(("counts", "ids", "vectors", "gradients"))
        self._ahead: list[tuple[KeyedJaggedTensor | Exception, Requests]] = []
        self._leases: dict[bool, list[list[Scratch]]] = {False: [], True: []}
        self._merging = [Scratch() for _ in groups]
        self._waiting: list[list[tuple[Tensor, Tensor]]] = []
        self.updates = 0
        self.param_group: dict[str, Any] = {
            "params": [],
            "lr": rule.lr,
            "name": f"sparse/{rule.name}",
        }
        self.tables_in_state = True
        self.before_first_update: Callable[[], None] = _nothing
        put_tables_in_state(self)
        self._warm_up(learns, missed(backend, device))
        self.reset_parameters(seed)

    def _warm_up(self, learns: bool, missing: str) -> None:
        """Compile kernels before the first step: rank 0 first, the others read what it left on
        disk.
        """
        if missing and not self.comm.rank:
            note(missing)
        if self.backend.name != "numba":
            return
        if self.comm.rank:
            self.comm.barrier()
        with told(self.comm.rank == 0):
            warm_up(
                self.backend,
                self.routes,
                self.comm.world,
                [g.dtype for g in self.layout.groups],
                self.in_lines_G,
                self.dtype,
                self.payload,
                self.any_mean,
                self.rule if learns else None,
                self.agree is not None,
            )
        if not self.comm.rank:
            self.comm.barrier()

    def reset_parameters(self, seed: int) -> None:
        """Write the start values of every row held here; optimiser state becomes zero."""
        for g in range(len(self.stores)):
            self.store(g).reset(seed)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return list(self.layout.tables)

    def leave_room(self, columns: int) -> None:
        """Leave columns free before the first vector of a sample, from the next lookup on:
        `KeyedTensor.prepend` writes there.
        """
        self.room = columns
        line = CACHE_LINE_BYTES // self.dtype.itemsize
        self.in_lines_G = [
            not (np.array([r.width, self.width, columns, *r.column_S]) % line).any()
            for r in self.routes
        ]
        self._where: dict[tuple[int, int], Tensor] = {}

    def store(self, group: int) -> RowStore:
        """The rows of a group on this rank."""
        store = self.stores[group]
        assert isinstance(store, RowStore)
        return store

    # ---- the exchange of a batch

    def input_dist(self, features: KeyedJaggedTensor | Exception) -> Requests:
        """Start to exchange which rows a batch needs. Reads no weights, so it may run before the
        batch's turn; every rank calls it.
        """
        return Requests(features, self)

    def look_ahead(self, features: KeyedJaggedTensor | Exception) -> int:
        """Start the exchange of a batch that comes later; `forward` finds it by the identity of
        `features`. Every rank calls it.

        Args:
            features: of the batch. Or why this rank could not read it: the others raise a RankError
                when its turn comes. On a GPU the exchange does not wait for the stream that
                computes: ids are complete or come from `comm.side`.

        Returns:
            Exchanges that wait for their batches now.
        """
        self.finish_step()
        with self.comm.side.beside():
            self._ahead.append((features, self.input_dist(features)))
        return len(self._ahead)

    def advance_ahead(self) -> None:
        """Go on with exchanges that were started ahead, in their order; every rank calls it at the
        same point.

        What their headers ask of all is heard now: a stop does not wait for the batch it travelled
        with.
        """
        for _, requests in self._ahead:
            requests.advance()
            self.header.wanted_W = np.bitwise_or(
                self.header.wanted_W or [0], requests.heads[:, 2]
            ).tolist()

    def failure_ahead(self) -> bool:
        """Whether a batch that was looked ahead to is known to fail in its turn: on all ranks
        alike.
        """
        return any(requests.heads[:, :1].any() for _, requests in self._ahead)

    def forget_ahead(self) -> None:
        """End exchanges that were started ahead for batches that will not come. Every rank calls
        it.
        """
        while self._ahead:
            self._ahead.pop(0)[1].abandon()

    def _requests(self, features: KeyedJaggedTensor) -> Requests:
        """Of a batch whose turn has come: started ahead, or now."""
        for i, (expected, requests) in enumerate(self._ahead):
            if expected is features:
                del self._ahead[i]
                return requests
        return self.input_dist(features)

    def wait(self, phase: str, message: Sent[Message]) -> Message:
        """Wait for a message of `waits.sent`."""
        arrived = self.waits.arrived(phase, message)
        self.mark(phase)
        return arrived

    def lease(self, learns: bool) -> list[Scratch]:
        """Lend memory for one batch in flight, by group.

        Batches that are only evaluated have their own. They may be larger, and whichever lease of
        training was free at that moment would grow to their size, in time all of them.
        """
        held = self._leases[learns]
        return held.pop() if held else [Scratch() for _ in self.routes]

    def give_back(self, lease: list[Scratch], learns: bool) -> None:
        """Memory that a batch in flight no longer needs."""
        self._leases[learns].append(lease)

    def bags(self, rows: Rows) -> list[Bags]:
        """A batch as each group sees it; a strip asks for its feature again."""
        edge_F1 = np.array([0, *accumulate(rows.per_F)], np.int64)
        B = rows.lengths_FB.shape[1]
        scale_FB = None
        if self.any_mean or rows.weights_L is not None:
            length_FB = torch.where(self.mean_F[:, None], rows.lengths_FB.clamp(min=1), 1)
            scale_FB = length_FB.to(self.dtype).reciprocal()
        found = []
        for g, r in enumerate(self.routes):
            if (g, B) not in self._where:
                column_S = to_device(self.room + r.column_S, self.comm.device)
                wide = self.room + self.width
                where = column_S[:, None] + wide * torch.arange(B, device=self.comm.device)
                self._where[g, B] = where.to(place_type(B * wide)).view(-1)
            scale_M = None if scale_FB is None else scale_FB[r.feature_S].view(-1)
            found.append(
                Bags(
                    rows.rows_L,
                    rows.lengths_FB,
                    edge_F1[r.features],
                    edge_F1[1:][r.features],
                    self._where[g, B],
                    scale_M,
                    rows.weights_L,
                )
            )
        return found

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
        requests = self._requests(features)
        requests.finish()
        self.header.rows_W = requests.heads[:, 1].tolist()
        self.header.wanted_W = requests.heads[:, 2].tolist()
        values_BD = Lookup.apply(self.anchor, requests.weights_L, self, requests)  # type: ignore[no-untyped-call]
        assert isinstance(values_BD, Tensor)
        if values_BD.requires_grad:
            self.in_flight.add(requests)
        else:
            requests.release()
        assert values_BD.requires_grad or not torch.is_grad_enabled(), (
            "without a gradient the tables would silently not train"
        )
        return KeyedTensor(
            [x.output for x in self.lookups],
            [x.dim for x in self.lookups],
            values_BD,
            room=self.room,
        )

    # ---- the update

    def learn(self, requests: Requests, gradients: Tensor, lessons: Sequence[Lesson]) -> None:
        """Take one lookup's gradients; update once the last lookup of this step has come back.

        Args:
            requests: of the lookup.
            gradients: flat; used before this returns.
            lessons: of each group.
        """
        self.in_flight.discard(requests)
        if not self.in_flight and not self._waiting:
            self._update(gradients, lessons)
            return
        self._waiting.append(
            [self._summed(g, gradients, lesson) for g, lesson in enumerate(lessons)]
        )
        if not self.in_flight:
            self.finish_step()

    @torch.no_grad()
    def finish_step(self) -> None:
        """Update with gradients that still wait for another lookup of their step, which had no part
        in the loss.

        Such an output may be held for ever, and on some ranks only: so the next lookup or reading
        of the rows ends a step for certain.
        """
        if self._waiting:
            waiting = self._waiting
            self._waiting = []
            merged = [
                self._merged(g, [lookup[g] for lookup in waiting]) for g in range(len(self.stores))
            ]
            self._update([gradients for gradients, _ in merged], [lesson for _, lesson in merged])

    @torch.no_grad()
    def _update(self, gradients: Tensor | list[Tensor], lessons: Sequence[Lesson]) -> None:
        """Of one flat tensor, or of one per group."""
        gradients_G: Sequence[Tensor] = (
            gradients if isinstance(gradients, list) else [gradients] * len(lessons)
        )
        if not self.updates:
            self.before_first_update()
        self.updates += 1
        lr = float(self.param_group["lr"])
        lr = self.rule.rate(lr, self.updates) if self.rule.rate else lr
        means: Sequence[Tensor | None] = [None] * len(lessons)
        if self.agree:
            gradients_G, lessons = self._side_by_side(gradients_G, lessons)
            squares = [
                self.backend.square_sums(grad, self.store(g).width, lesson.links, self.dtype)
                for g, (grad, lesson) in enumerate(zip(gradients_G, lessons, strict=True))
            ]
            means = self.agree(
                [
                    lesson.pieces or self.agree.find(g, lesson.row_U)
                    for g, lesson in enumerate(lessons)
                ],
                squares,
                self.dtype,
            )
        for g, (grad, lesson, mean_U) in enumerate(zip(gradients_G, lessons, means, strict=True)):
            self.store(g).update(grad, lesson.links, lesson.row_U, mean_U, lr)

    def _side_by_side(
        self, gradients_G: Sequence[Tensor], lessons: Sequence[Lesson]
    ) -> tuple[list[Tensor], list[Lesson]]:
        """Every touched row's gradient summed once and for all: it is read twice, for its squares
        and for the update.
        """
        summed = []
        read = []
        for g, (gradients, lesson) in enumerate(zip(gradients_G, lessons, strict=True)):
            width = self.store(g).width
            n = lesson.links.bags
            take = self._merging[g]
            flat = (
                take("summed", n * width, self.dtype)
                if gradients.device.type == "cpu"
                else gradients.new_empty(n * width)
            )
            self.backend.pool(gradients, 1, width, lesson.links, flat, self.dtype)
            number = torch.arange(n + 1, dtype=torch.int32, device=gradients.device)
            summed.append(flat)
            read.append(lesson._replace(links=Links(number[:n] * width, number, None, None, n)))
        return summed, read

    def _summed(self, group: int, gradients: Tensor, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Memory of its own for what one lookup teaches: rows, and their gradients side by side."""
        width = self.store(group).width
        summed = torch.empty(lesson.links.bags * width, dtype=self.dtype, device=gradients.device)
        self.backend.pool(gradients, 1, width, lesson.links, summed, self.dtype)
        return lesson.row_U.clone(), summed

    def _merged(self, group: int, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Lesson]:
        """Several lookups of one step: a row's gradients are added in the order in which the
        lookups came back.
        """
        row_N = torch.cat([row_U for row_U, _ in parts])
        gradients = torch.cat([summed for _, summed in parts])
        at_N = (self.store(group).width * torch.arange(len(row_N), device=row_N.device)).to(
            place_type(gradients.numel())
        )
        asked = Links(row_N, None, None, at_N, len(row_N))
        return gradients, Lesson(
            *self.backend.group_rows(self.store(group).rows, asked, self._merging[group])
        )

    def blocks(self) -> Iterator[Block]:
        """The rectangles held here, as views: what a checkpoint reads and writes. Every rank calls
        it.
        """
        self.finish_step()
        for g in range(len(self.stores)):
            yield from self.store(g).blocks()

    def extra_repr(self) -> str:
        """Which tables lie where."""
        lines = []
        for t in self.layout.tables:
            s = self.plan.tables[t.name]
            ranks = (
                "all ranks"
                if s.mode == "replicated"
                else f"rank{'s' if len(s.ranks) > 1 else ''} {', '.join(map(str, s.ranks))}"
            )
            lines.append(
                f"{t.name}: {t.num_embeddings:,} x {t.embedding_dim}, {s.sharding_type}, "
                f"{s.mode}, {ranks}"
            )
        return f"plan={self.plan.name}, rank {self.comm.rank} of {self.comm.world}\n" + "\n".join(
            lines
        )


def _nothing() -> None:
    """What `before_first_update` is until somebody has something to say."""


def _no_mark(phase: str) -> None:
    """What `mark` is until a profiler puts its own there: called with a phase's name when it
    ends.
    """


def _check_ranks(plan: ShardingPlan, comm: Comm) -> None:
    if plan.world_size != comm.world:
        raise PlanError(
            f"plan {plan.name} is for {plan.world_size} ranks, but there are {comm.world}: "
            f"set trainer.devices={plan.world_size} or make the plan for {comm.world}"
        )
