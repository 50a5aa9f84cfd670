"""What could be done with a table: every allowed type and mode, cut and priced, with its places still open.

    Option      a type and a mode                                    row_wise, unique
      Block     rectangles that are placed at once                   a strip; all the strips of a row; a whole table
        places  [alternatives, rectangles] the ranks of each         table_wise on 4 ranks: [[0], [1], [2], [3]]

A price has lanes, each of which the slowest rank decides for itself: kernels of four phases, and three messages by two links.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from recapp.planner.constraints import MODES, ParameterConstraints, allowed_ranks
from recapp.planner.cost import MESSAGES, PHASE_OF_MESSAGE, PHASES, Floats, Setting, Work, add_by_rank, price, work_of
from recapp.planner.topology import Topology
from recapp.sharding.plan import Mode, Shard, TableSharding
from recapp.sharding.tilings import COLUMN_WIDTH, ShardingType, cut, strips
from recapp.tables.config import DataType, EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics, default_statistics

KERNEL_PHASES = ("input", "lookup", "gradients", "update")
LANES = len(KERNEL_PHASES) + 2 * len(MESSAGES)
NARROWEST = 16              # columns of a strip that nobody asked for: one cache line of fp32
UNEVEN_FROM = 1.05          # strips of equal rows whose requests differ by less are left equal
SIMPLEST_FIRST = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL, ShardingType.COLUMN_WISE,
                  ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)         # of types that cost the same the first is taken
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Rectangles that are placed at once.

    Args:
        rectangles: rows and columns, m of them.
        lanes: seconds of each rectangle's owner, [LANES, m].
        bytes: of each, [m].
        places: ranks of the rectangles, by alternative, [A, m].
    """

    rectangles: tuple[tuple[range, range], ...]
    lanes: Floats
    bytes: Floats
    places: Ints


@dataclass(frozen=True)
class Option:
    """A way to shard one table, places open.

    Args:
        table: its name.
        kind: sharding type.
        mode: how it asks.
        work: priced, rectangles in the order of the blocks; its ranks are of the first alternative.
        home: seconds that every rank spends whatever the places, by lane, [LANES].
        blocks: what is placed.
    """

    table: str
    kind: str
    mode: Mode
    work: Work
    home: Floats
    blocks: tuple[Block, ...]

    @property
    def seconds(self) -> float:
        """All work of all ranks together: by this tables are ordered."""
        return float(self.home.sum() + sum(b.lanes.sum() for b in self.blocks))

    def sharding(self, chosen: Sequence[int]) -> TableSharding:
        """With an alternative chosen for each block."""
        shards = tuple(Shard(int(rank), *rectangle) for block, a in zip(self.blocks, chosen, strict=True)
                       for rectangle, rank in zip(block.rectangles, block.places[a], strict=True))
        return TableSharding(shards, self.mode, self.kind)

    def placed(self, chosen: Sequence[int]) -> Work:
        """The work, its rectangles on the ranks of the chosen alternatives."""
        return replace(self.work, rank_M=np.concatenate([b.places[a] for b, a in zip(self.blocks, chosen, strict=True)]))


def seen_table(table: EmbeddingBagConfig, c: ParameterConstraints) -> EmbeddingBagConfig:
    """The table as it is counted."""
    return table if c.data_type is None else replace(table, data_type=DataType(c.data_type))


def seen_statistics(table: EmbeddingBagConfig, c: ParameterConstraints, known: TableStatistics | None) -> TableStatistics:
    """A table's statistics: given ones, measured ones, or what its pooling factor suggests."""
    if c.statistics is not None:
        return c.statistics
    if c.pooling_factors is not None:
        return default_statistics(table, sum(c.pooling_factors) / len(c.pooling_factors))
    return known or default_statistics(table)


def options_of(table: EmbeddingBagConfig, c: ParameterConstraints, setting: Setting) -> list[Option]:
    """Every option that constraints allow, in a fixed order."""
    topology, ranks = setting.topology, allowed_ranks(c, setting.topology)
    kinds = [ShardingType(k) for k in c.sharding_types] if c.sharding_types is not None else _sensible(topology)
    known = setting.of(table)
    several = known.ids_per_sample > known.bags_per_sample
    modes = [m for m in MODES if (m in c.modes if c.modes is not None else several or m == "unique")]
    found = []
    for kind in kinds:
        own: Sequence[Mode] = ("replicated",) if kind is ShardingType.DATA_PARALLEL else modes
        found += [_priced(table, kind.value, mode, cuts, setting) for cuts in _cuts(kind, table, c, ranks, setting) for mode in own]
    return found


def _sensible(topology: Topology) -> list[ShardingType]:
    """What is worth pricing: one rank keeps tables whole, and on one host table_row_wise is row_wise by another name."""
    if topology.world_size == 1:
        return [ShardingType.TABLE_WISE]
    return [k for k in SIMPLEST_FIRST if topology.hosts > 1 or k is not ShardingType.TABLE_ROW_WISE]


Cut = tuple[list[tuple[range, range]], list[list[int]]]
"""The rectangles of a block, and the ranks they may lie on, by alternative."""


def _cuts(kind: ShardingType, table: EmbeddingBagConfig, c: ParameterConstraints, ranks: list[int], setting: Setting) -> list[list[Cut]]:
    """The ways to cut a table as a type does: blocks of each."""
    R, D, topology = range(table.num_embeddings), range(table.embedding_dim), setting.topology
    allowed = set(ranks)
    hosts = [mates for h in topology.host_ranks() if (mates := [r for r in h if r in allowed])]
    match kind:
        case ShardingType.TABLE_WISE:
            return [[([(R, D)], [[r] for r in ranks])]]
        case ShardingType.COLUMN_WISE:
            return [[([(R, cols)], [[r] for r in ranks]) for cols in parts] for parts in _widths(table, c, len(ranks))]
        case ShardingType.ROW_WISE:
            return [[([(rows, D) for rows in parts], [ranks[:len(parts)]])] for parts in _row_cuts(table, len(ranks), setting)]
        case ShardingType.TABLE_ROW_WISE:
            rows = cut(len(R), min(len(h) for h in hosts))
            return [[([(r, D) for r in rows], [h[:len(rows)] for h in hosts])]]
        case ShardingType.GRID_SHARD:
            rows = cut(len(R), min(len(h) for h in hosts))
            places = [h[:len(rows)] for h in hosts]
            return [[([(r, cols) for r in rows], places) for cols in parts] for parts in _widths(table, c, len(hosts))]
        case ShardingType.DATA_PARALLEL:
            everyone = list(range(topology.world_size))
            return [[([(R, D)] * len(everyone), [everyone])]] if ranks == everyone else []


def _widths(table: EmbeddingBagConfig, c: ParameterConstraints, count: int) -> list[list[range]]:
    """Strips of the usual width, and as many as there are ranks (or hosts); at least two, or it is no cut."""
    least = c.min_partition or 1
    wanted = {max(least, COLUMN_WIDTH), max(least, NARROWEST, -(-table.embedding_dim // max(count, 1)))}
    found = [strips(table, width) for width in sorted(wanted, reverse=True)]
    if c.sharding_types is not None:
        return found[:1] if all(len(parts) < 2 for parts in found) else [parts for parts in found if len(parts) > 1]
    return [parts for parts in found if len(parts) > 1]


def _row_cuts(table: EmbeddingBagConfig, count: int, setting: Setting) -> list[list[range]]:
    """Equal strips; where ids are known to crowd, also strips of equal requests."""
    rows, known = table.num_embeddings, setting.of(table)
    equal = cut(rows, count)
    shares = [known.share(r) for r in equal]
    if len(equal) < 2 or max(shares) * len(equal) < UNEVEN_FROM:
        return [equal]
    uneven = [r for r in known.equal_shares(count) if len(r)]
    return [equal, uneven] if len(uneven) == len(equal) else [equal]


def _priced(table: EmbeddingBagConfig, kind: str, mode: Mode, cuts: list[Cut], setting: Setting) -> Option:
    """What an owner does depends on the rectangle, not on its rank: each is priced once."""
    work = price(table, [Shard(ranks[0][i], *r) for rectangles, ranks in cuts for i, r in enumerate(rectangles)], mode, setting)
    lanes, blocks, first = owner_lanes(work, setting), [], 0
    for rectangles, places in cuts:
        here = slice(first, first := first + len(rectangles))
        blocks.append(Block(tuple(rectangles), lanes[:, here], work.bytes_M[here], np.array(places, np.int64)))
    return Option(table.name, kind, mode, work, home_lanes(work, setting), tuple(blocks))


def option_of(table: EmbeddingBagConfig, sharding: TableSharding, setting: Setting) -> Option:
    """A sharding as it stands: one block, one alternative. An open mode counts as `work_of` counts it."""
    cells, mode = sharding.cells(table, setting.topology.world_size), sharding.mode
    if mode == "auto":
        mode = work_of(table, sharding, setting).mode
    places = [[s.rank for s in cells]]
    return _priced(table, sharding.sharding_type, mode, [([(s.rows, s.cols) for s in cells], places)], setting)


def own_seconds(option: Option, world: int) -> Floats:
    """A table's own share of a step by lane, [LANES]: as if it were alone, without what calls and messages cost at all."""
    load = np.zeros((LANES, world))
    for block in option.blocks:
        add_by_rank(load, block.places[0], block.lanes)
    found: Floats = option.home + load.max(1)
    return found


def phases_of(lanes: Floats) -> Floats:
    """Lanes as phases, [P]: a message takes the slower of its two links."""
    K, M = len(KERNEL_PHASES), len(MESSAGES)
    found = dict.fromkeys(PHASES, 0.0)
    for i, phase in enumerate(KERNEL_PHASES):
        found[phase] += float(lanes[i])
    for i, message in enumerate(MESSAGES):
        found[PHASE_OF_MESSAGE[message]] += float(max(lanes[K + i], lanes[K + M + i]))
    return np.array([found[p] for p in PHASES])


def owner_lanes(work: Work, setting: Setting) -> Floats:
    """Owners' prices by lane, [LANES, M]: kernels, then each message through the links of its host, then through the network."""
    kernels = work.seconds_PM[[PHASES.index(p) for p in KERNEL_PHASES]]
    near, far = setting.seconds_per_byte
    return np.concatenate([kernels, work.asked_3M * near, work.asked_3M * far])


def home_lanes(work: Work, setting: Setting) -> Floats:
    """What all ranks pay alike: kernels at home, and replicas' messages to everybody."""
    near, far = setting.seconds_per_byte
    return np.array([*(work.home[PHASES.index(p)] for p in KERNEL_PHASES), *(work.everywhere * near), *(work.everywhere * far)])
