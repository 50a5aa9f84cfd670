"""What a plan costs: counted work, priced with measured hardware. It reads rectangles and modes, never a type's name.

    table, sharding, id statistics -> Work: what each rank does for itself, and what the owner of each piece does for all
    all works of a plan            -> seconds per phase and rank, bytes between ranks
    step = sum over phases of the slowest rank's time: ranks meet at every message

Every rank is home to a batch of B samples, so what is done at home (route, link, combine, spread) is the same on all ranks, and only the
owners' part depends on where pieces lie. One step has four messages: counts (latency alone), ids, vectors and gradients, and where strips
of a row agree on a statistic one more. TorchRec's estimator (`planner/estimator`) is the model of the terms; latency, input exchange,
replicas' touched rows, skew and repeated ids are what it leaves out.

W ranks, P phases, n ids of a rank's batch, U distinct rows among them, rho the share of requests that falls into a piece's rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import nn

from recapp.optim.rules import RowRule
from recapp.planner.hardware import Hardware
from recapp.planner.topology import Topology
from recapp.sharding.plan import Mode, Shard, ShardingPlan, TableSharding
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics, default_statistics

PHASES = ("input", "lookup", "output", "dense", "gradients", "update")
MESSAGES = ("ids", "vectors", "gradients")
PHASE_OF_MESSAGE = {"ids": "input", "vectors": "output", "gradients": "gradients"}
ID_BYTES, NUMBER_BYTES, STATISTIC_BYTES = 4, 4, 8
HEADER_BYTES = 64           # of the counts message, from each rank to each
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Dense:
    """The part of the model that is not sharded.

    Args:
        flops: of a sample's forward and backward.
        bytes: of its gradients, which all ranks sum.
    """

    flops: float = 0.0
    bytes: float = 0.0


def dense_of(module: nn.Module) -> Dense:
    """Of any model: two operations for each weight and sample forward and four backward, as linear layers do; tables do not count."""
    inside = {id(p) for m in module.modules() if hasattr(m, "embedding_bag_configs") for p in m.parameters()}
    weights = sum(p.numel() for p in module.parameters() if p.requires_grad and id(p) not in inside)
    return Dense(6.0 * weights, 4.0 * weights)


@dataclass(frozen=True)
class Setting:
    """What plans are compared for.

    Args:
        topology: the ranks; its hardware prices the work.
        batch_per_rank: samples, B.
        rule: what happens to touched rows; None prices serving, which has no backward.
        statistics: of ids, by table; a table nobody has looked at gets `default_statistics`.
        dense: the rest of the model.
        payload_bytes: of a number that travels.
    """

    topology: Topology
    batch_per_rank: int = 1024
    rule: RowRule | None = None
    statistics: Mapping[str, TableStatistics] = field(default_factory=dict)
    dense: Dense = Dense()
    payload_bytes: int = NUMBER_BYTES

    @cached_property
    def hardware(self) -> Hardware:
        """What work costs."""
        return self.topology.costs

    @cached_property
    def seconds_per_byte(self) -> tuple[float, float]:
        """What a byte asked by each home costs the busiest rank: inside its host, and beyond it."""
        topology, links = self.topology, self.hardware.all_to_all
        W, mates, hosts = topology.world_size, topology.ranks_per_host, topology.hosts
        near = (links["host"].seconds(mates, 1e9) - links["host"].seconds(mates, 0)) / 1e9 if mates > 1 else 0.0
        far = (links["network"].seconds(hosts, 1e9) - links["network"].seconds(hosts, 0)) / 1e9 if hosts > 1 else 0.0
        return float(near * (mates - 1)), float(far * (W - mates))

    def of(self, table: EmbeddingBagConfig) -> TableStatistics:
        """A table's id statistics."""
        return self.statistics.get(table.name) or default_statistics(table)


@dataclass(frozen=True)
class Work:
    """What one table costs under one sharding, its M rectangles in order.

    Args:
        home: seconds of each rank's kernels for its own batch, by phase, [P].
        rank_M: owner of each rectangle; of replicas, every rank.
        seconds_PM: of the owners' kernels, for all ranks' requests.
        asked_3M: bytes that one home exchanges with the owner, by message.
        bytes_M: of weights and optimiser state.
        everywhere: bytes that each rank sends to each other, by message, [3]; zero but for replicas.
        agreeing: rows whose strips tell each other a statistic.
        kinds: width and mode of each strip, which share kernels' calls with those of other tables.
    """

    home: Floats
    rank_M: npt.NDArray[np.int64]
    seconds_PM: Floats
    asked_3M: Floats
    bytes_M: Floats
    everywhere: Floats
    agreeing: float
    kinds: frozenset[tuple[int, Mode]]

    @property
    def mode(self) -> Mode:
        """How the table asks: one way for all its strips."""
        return next(iter(self.kinds))[1]


def work_of(table: EmbeddingBagConfig, sharding: TableSharding, setting: Setting) -> Work:
    """Count and price a table's work; `auto` counts as whichever of `unique` and `pooled` exchanges fewer bytes."""
    cells = sharding.cells(table, setting.topology.world_size)
    modes: tuple[Mode, ...] = ("unique", "pooled") if sharding.mode == "auto" else (sharding.mode,)
    choices = [price(table, cells, mode, setting) for mode in modes]
    return min(choices, key=lambda work: float(work.asked_3M.sum()))


def price(table: EmbeddingBagConfig, cells: Sequence[Shard], mode: Mode, setting: Setting) -> Work:
    """The work of rectangles that tile a table."""
    c, world, train = _Counts(table, cells, setting), setting.topology.world_size, setting.rule is not None
    cols = {s.cols.start: len(s.cols) for s in cells}
    pairs_M = c.bags * (1.0 - (1.0 - np.minimum(c.share_M, 1.0)) ** (c.n / c.bags))
    home = np.zeros(len(PHASES))
    for start, width in cols.items():
        of_strip = np.array([s.cols.start == start for s in cells])
        home += _home(c, width, float(pairs_M[of_strip].sum()) if mode == "pooled" else None)
    held = c.rows_M * c.width_M * table.data_type.dtype.itemsize
    if setting.rule is not None:
        held = held + NUMBER_BYTES * c.rows_M * c.state_M
    seconds, asked = _owners(c, mode, pairs_M)
    local = world == 1 or mode == "replicated"
    everywhere = np.array([ID_BYTES * c.U, 0.0, train * c.U * table.embedding_dim * setting.payload_bytes])
    cut = len(cols) > 1 and setting.rule is not None and setting.rule.needs_row
    everywhere *= mode == "replicated" and world > 1
    return Work(home, np.array([s.rank for s in cells]), seconds, asked * (not local), held, everywhere, c.U_of_all if cut else 0.0,
                frozenset((width, mode) for width in cols.values()))


class _Counts:
    """How often things happen, expected over batches; M rectangles."""

    def __init__(self, table: EmbeddingBagConfig, cells: Sequence[Shard], setting: Setting) -> None:
        self.table, self.setting, known = table, setting, setting.of(table)
        B, world, R = setting.batch_per_rank, setting.topology.world_size, table.num_embeddings
        self.n, self.bags = B * known.ids_per_sample, max(B * known.bags_per_sample, 1e-9)
        self.U, self.U_of_all = known.distinct_rows(self.n), known.distinct_rows(world * self.n)
        self.samples = B * len(table.feature_names)
        self.rows_M, self.width_M = np.array([len(s.rows) for s in cells], float), np.array([len(s.cols) for s in cells], float)
        shares = {s.rows: 1.0 if len(s.rows) == R else known.share(s.rows) for s in cells}
        self.share_M = np.array([shares[s.rows] for s in cells])
        self.touched_M = np.minimum(self.U_of_all * self.share_M, self.rows_M)
        state = setting.rule.state if setting.rule is not None else ()
        self.state_M = sum((self.width_M if kind == "element" else 1.0 for _, kind in state), np.zeros(len(cells)))


def _home(c: _Counts, width: int, pairs: float | None) -> Floats:
    """Kernels for one strip at home, by phase; `pairs` of bags and owners in mode `pooled`."""
    kernels, number, vectors = c.setting.hardware.kernels, NUMBER_BYTES * width, c.n if pairs is None else pairs
    spent = dict.fromkeys(PHASES, 0.0)
    spent["input"] = kernels["route"].seconds(0, c.n, 0) + kernels["link"].seconds(0, c.n, 0)
    spent["lookup"] = kernels["combine"].seconds(0, vectors, (vectors + c.samples) * number)
    if c.setting.rule is not None and c.setting.topology.world_size > 1:
        spent["gradients"] = kernels["spread"].seconds(0, vectors, (vectors + (c.U if pairs is None else pairs)) * number)
    return np.array([spent[p] for p in PHASES])


def _owners(c: _Counts, mode: str, pairs_M: Floats) -> tuple[Floats, Floats]:
    """Kernels [P, M] and bytes asked by one home [3, M]. An owner serves all ranks, itself among them; a rank alone asks nobody."""
    setting, kernels, world = c.setting, c.setting.hardware.kernels, c.setting.topology.world_size
    number_M = NUMBER_BYTES * c.width_M
    rows_M = (c.n if mode == "pooled" else c.U) * c.share_M             # asked by one home
    vectors_M = pairs_M if mode == "pooled" else rows_M
    spent = {p: np.zeros(len(number_M)) for p in PHASES}
    if world > 1:
        spent["input"] = kernels["serve"].seconds(0, world * rows_M, 0)
        if mode != "replicated":
            spent["lookup"] = kernels["answer"].seconds(0, world * rows_M, world * (rows_M + vectors_M) * number_M)
    if setting.rule is not None:
        learned_M = world * rows_M if world > 1 else np.full(len(number_M), c.n)
        if world > 1:
            spent["gradients"] = kernels["group"].seconds(0, learned_M, 0)
        moved_M = learned_M * number_M + 2 * c.touched_M * (number_M + NUMBER_BYTES * c.state_M)
        spent["update"] = kernels["update"].seconds(0, c.touched_M, moved_M)
    message_M = vectors_M * c.width_M * setting.payload_bytes
    lengths_M = vectors_M * ID_BYTES if mode == "pooled" else 0.0
    asked = np.stack([rows_M * ID_BYTES + lengths_M, message_M, message_M * (setting.rule is not None)])
    return np.stack([spent[p] for p in PHASES]), asked


@dataclass(frozen=True)
class PlanCost:
    """A plan's price.

    Args:
        seconds_PW: of each phase on each rank, messages included.
        asked_3W: bytes that one home exchanges with each owner in a step, by message.
        each: bytes that every rank sends to each other beside them, whatever the plan asks.
        bytes_W: weights and optimiser state of each rank.
        buffer_bytes_W: what messages of a step need beside them.
    """

    seconds_PW: Floats
    asked_3W: Floats
    each: float
    bytes_W: Floats
    buffer_bytes_W: Floats

    @property
    def step_seconds(self) -> float:
        """Ranks meet in every phase, so the slowest sets its time."""
        return float(self.seconds_PW.max(1).sum())

    @cached_property
    def bytes_WW(self) -> Floats:
        """From rank to rank in a step: ids and gradients go to owners, vectors come from them; nobody sends to itself."""
        ids, vectors, gradients = self.asked_3W
        sent: Floats = (ids + gradients)[None] + vectors[:, None] + self.each
        np.fill_diagonal(sent, 0.0)
        return sent

    @property
    def sent_bytes(self) -> float:
        """By all ranks together in a step."""
        W = self.asked_3W.shape[1]
        return float((W - 1) * (self.asked_3W.sum() + W * self.each))


def cost_of(works: Sequence[Work], setting: Setting) -> PlanCost:
    """Price all tables of a plan together."""
    W, phase = setting.topology.world_size, {p: i for i, p in enumerate(PHASES)}
    seconds, held, asked = np.zeros((len(PHASES), W)), np.zeros(W), np.zeros((3, W))
    everywhere = sum((w.everywhere for w in works), np.zeros(3))
    for work in works:
        seconds += work.home[:, None]
        add_by_rank(seconds, work.rank_M, work.seconds_PM)
        np.add.at(held, work.rank_M, work.bytes_M)
        add_by_rank(asked, work.rank_M, work.asked_3M)
    kinds = len(set().union(*(w.kinds for w in works))) if works else 0
    for at, spent in _calls(setting, kinds):
        seconds[phase[at]] += spent
    told = STATISTIC_BYTES * sum(w.agreeing for w in works) / W
    if W > 1:
        nothing = np.zeros(W)
        seconds[phase["input"]] += message_seconds(nothing, HEADER_BYTES, setting)
        for m, message in enumerate(MESSAGES):
            if message != "gradients" or setting.rule is not None:
                seconds[phase[PHASE_OF_MESSAGE[message]]] += message_seconds(asked[m], float(everywhere[m]), setting)
        if told:
            seconds[phase["update"]] += message_seconds(nothing, told, setting)
    seconds[phase["dense"]] += _dense_seconds(setting)
    beside = float(everywhere.sum()) + HEADER_BYTES + told
    buffers = asked.sum(0) * W + asked.sum() + 2 * W * everywhere.sum()
    return PlanCost(seconds, asked, beside if W > 1 else 0.0, held, buffers if W > 1 else np.zeros(W))


_CALLS = {"route": "input", "link": "input", "serve": "input", "answer": "lookup", "combine": "lookup", "spread": "gradients",
          "group": "gradients", "update": "update"}


def _calls(setting: Setting, kinds: int) -> list[tuple[str, float]]:
    """Phase and seconds of every kernel's calls for so many widths and modes, with nothing to do."""
    kernels, alone = setting.hardware.kernels, setting.topology.world_size == 1
    return [(at, float(kernels[name].seconds(kinds, 0, 0))) for name, at in _CALLS.items()
            if not alone or name in ("route", "link", "combine", "update")]


def call_seconds(setting: Setting) -> tuple[float, float]:
    """What kernels' calls cost a step at all, and what each width or mode adds."""
    first, second = (sum(spent for _, spent in _calls(setting, kinds)) for kinds in (1, 2))
    return 2 * first - second, second - first


def add_by_rank(sum_KW: Floats, rank_M: npt.NDArray[np.int64], values_KM: Floats) -> None:
    """Add each rectangle's values to its rank's, in place; a rank may come several times."""
    np.add.at(sum_KW.T, rank_M, values_KM.T)


def message_seconds(asked_W: Floats, each: float, setting: Setting) -> float:
    """One all-to-all: the busiest rank's bytes within its host and beyond it, which travel at the same time.

    Args:
        asked_W: bytes that every rank exchanges with each owner; the way they go does not matter.
        each: bytes that every rank sends to each other beside them.
        setting: the ranks and their links.
    """
    topology, links = setting.topology, setting.hardware.all_to_all
    W, L, H = topology.world_size, topology.ranks_per_host, topology.hosts
    of_host_W = np.repeat(asked_W.reshape(H, L).sum(1), L)
    most = asked_W.max()
    near = max((of_host_W - asked_W).max(), most * (L - 1)) + each * (L - 1)
    far = max((asked_W.sum() - of_host_W).max(), most * (W - L)) + each * (W - L)
    return max(float(links["host"].seconds(L, near)) if L > 1 else 0.0, float(links["network"].seconds(H, far)) if H > 1 else 0.0)


def _dense_seconds(setting: Setting) -> float:
    """Products, and what of the gradients' sum does not hide behind the tables' backward."""
    topology, hardware = setting.topology, setting.hardware
    spent = setting.dense.flops * setting.batch_per_rank / hardware.flops_per_s
    if topology.world_size > 1 and setting.rule is not None and setting.dense.bytes:
        link, ranks = ("network", topology.hosts) if topology.hosts > 1 else ("host", topology.world_size)
        spent += hardware.all_reduce[link].seconds(ranks, setting.dense.bytes) * (1.0 - hardware.overlap)
    return spent


def plan_cost(tables: Sequence[EmbeddingBagConfig], plan: ShardingPlan, setting: Setting) -> PlanCost:
    """The price of a plan as it stands."""
    return cost_of([work_of(t, plan.tables[t.name], setting) for t in tables], setting)
