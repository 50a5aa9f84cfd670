# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Sharding strategies
#
# The same three tables under four plans, on two CPU ranks of this machine: what lies where, how long
# a lookup takes, how much memory a rank holds. Everything is computed and drawn by the cells below.
# A cell starts ranks with `run_ranks`; nothing else has to be running.

# %%
import torch
import torch.distributed as dist
from IPython.display import Markdown, display
from recapp.utils.benchmark import TorchRecBenchmark
from recapp.utils.debugging import TorchRecDebugger
from recapp.utils.visualization import TorchRecVisualizer

from recapp import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    ShardingType,
    Topology,
    analyze_plan,
    run_ranks,
)

RANKS = 2
BAG = 10  # ids of a bag
SAMPLES = 2_048  # of a rank's batch


def show_table(headings, rows):
    lines = [headings, ["---"] * len(headings), *rows]
    display(Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)))


# %% [markdown]
# ## The sharding types
#
# A plan cuts each table into rectangles of rows and columns and says which rank holds which.
#
# | type                   | a rank holds of a table       | a bag's vector comes from        |
# |------------------------|-------------------------------|----------------------------------|
# | `table_wise`           | all of it, or nothing         | the rank that holds the table    |
# | `row_wise`             | a range of rows, all columns  | all ranks: parts are summed      |
# | `column_wise`          | all rows, some columns        | all ranks: parts are put together|
# | `data_parallel`        | all of it, as all others do   | the rank itself                  |
# | `table_row_wise`       | rows, on the ranks of a host  | the ranks of that host           |
# | `grid_shard`           | columns by host, rows in it   | all ranks of some hosts          |
#
# | type            | fits                        | costs                                      |
# |-----------------|-----------------------------|--------------------------------------------|
# | `table_wise`    | many tables of like size    | the largest table is on a single rank      |
# | `row_wise`      | more rows than a rank holds | every rank is asked in every step          |
# | `column_wise`   | wide vectors                | ids go to every rank that has a strip      |
# | `data_parallel` | small tables                | memory on all ranks; gradients of all rows |

# %% [markdown]
# ## Three tables
#
# A long one, a wide one and a small one. They are built on the device `meta`: a description, without
# memory, which can be planned and sharded as often as one likes.

# %%
SIZES = {"long": (200_000, 128), "wide": (20_000, 256), "small": (2_000, 32)}
tables = [
    EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"{name}_ids"]
    )
    for name, (rows, dim) in SIZES.items()
]
module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
show_table(
    ["table", "rows", "columns", "MB"],
    [[name, f"{r:,}", d, f"{r * d * 4 / 1e6:.1f}"] for name, (r, d) in SIZES.items()],
)


# %% [markdown]
# ## Four strategies
#
# A strategy says which type the planner may use for which table; which rank gets what is the
# planner's choice. *Mixed* is what one would do by hand: rows of the long table, columns of the wide
# one, the small one whole.


# %%
def only(kind):
    return ParameterConstraints(sharding_types=[kind.value], pooling_factors=[BAG])


STRATEGIES = {
    "table_wise": {"*": only(ShardingType.TABLE_WISE)},
    "row_wise": {"*": only(ShardingType.ROW_WISE)},
    "column_wise": {"*": only(ShardingType.COLUMN_WISE)},
    "mixed": {
        "long": only(ShardingType.ROW_WISE),
        "wide": only(ShardingType.COLUMN_WISE),
        "small": only(ShardingType.TABLE_WISE),
    },
}


def plan_for(constraints):
    topology = Topology(world_size=RANKS, compute_device="cpu")
    return EmbeddingShardingPlanner(topology, SAMPLES, constraints=constraints).plan(module)


plans = {name: plan_for(constraints) for name, constraints in STRATEGIES.items()}
visualizer = TorchRecVisualizer()

# %% [markdown]
# ## The plans as pictures
#
# A rectangle is a table, its height the rows and its width the columns; colours are ranks.

# %%
visualizer.plot_plan(plans["table_wise"], module)

# %%
visualizer.plot_plan(plans["row_wise"], module)

# %%
visualizer.plot_plan(plans["column_wise"], module)

# %%
visualizer.plot_plan(plans["mixed"], module)

# %% [markdown]
# ## What a plan amounts to
#
# Counted before anything runs: the weights on each rank. The mode is how a table asks other ranks:
# `unique` for each distinct row once, which is summed where it is needed; `pooled` for sums, made
# where the rows lie. Where no constraint says which, the planner takes what it prices lower.

# %%
rows = []
for name, plan in plans.items():
    held = analyze_plan(plan, tables=tables)["memory_distribution"]
    modes = [plan.tables[table].mode for table in SIZES]
    rows.append([name, *(f"{n / 1e6:.1f}" for n in held), f"{max(held) / sum(held):.0%}", *modes])
show_table(
    [
        "strategy",
        *(f"MB on rank {rank}" for rank in range(RANKS)),
        "fullest has",
        *(f"mode of {table}" for table in SIZES),
    ],
    rows,
)

# %% [markdown]
# What the planner expects of a training step under the table-wise plan, of bags of one id:
# the rank with the long table has nearly all of the bytes.

# %%
visualizer.plot_ranks(plans["table_wise"], module, batch_size=SAMPLES)


# %% [markdown]
# ## Measure
#
# Each strategy shards the tables anew, and all look up the same batch in turn, round by round, so
# that a slow moment of the machine meets all of them. The ranks begin a forward together, and the
# slowest one counts. Memory is what a rank's tensors hold: weights, the state of the optimiser
# (row-wise Adagrad: a number for each row) and the buffers of the exchange. The function that
# `run_ranks` starts on both ranks is defined here, in a cell. The numbers in the headings are the
# samples of a rank's batch; bytes are those of both ranks in a forward.


# %%
def batch_of(samples):
    ids = [torch.randint(rows, (samples * BAG,)) for rows, _ in SIZES.values()]
    lengths = torch.full((len(SIZES) * samples,), BAG)
    keys = [f"{name}_ids" for name in SIZES]
    return KeyedJaggedTensor(keys=keys, values=torch.cat(ids), lengths=lengths)


def measure(samples):
    torch.manual_seed(dist.get_rank())
    batch = batch_of(samples)
    debugger = TorchRecDebugger()
    models = {}
    memory = {}
    for name, plan in plans.items():
        before = debugger.memory_status()["allocated"]
        models[name] = DistributedModelParallel(module, plan=plan)
        with torch.no_grad():
            models[name](batch)
        memory[name] = debugger.memory_status()["allocated"] - before
    benchmark = TorchRecBenchmark(rounds=7, round_seconds=0.2)
    times = benchmark.compare_forwards(models, batch, batch_size=samples)
    return {name: vars(times[name]) | {"memory": memory[name]} for name in plans}


def compare(samples):
    of_ranks = run_ranks(measure, samples, ranks=RANKS)
    return {
        name: of_ranks[0][name] | {"memory_gb": max(r[name]["memory"] for r in of_ranks) / 1e9}
        for name in plans
    }


small_batch = compare(32)
large_batch = compare(SAMPLES)
show_table(
    ["strategy", "ms, 32", "ms, 2,048", "samples/s, 2,048", "MB sent, 2,048", "MB held, 32"],
    [
        [
            name,
            f"{small_batch[name]['batch_time_ms']:.2f}",
            f"{large_batch[name]['batch_time_ms']:.2f}",
            f"{large_batch[name]['throughput']:,.0f}",
            f"{large_batch[name]['bytes_exchanged'] / 1e6:.1f}",
            f"{small_batch[name]['memory_gb'] * 1e3:.1f}",
        ]
        for name in plans
    ],
)

# %% [markdown]
# ## Latency
#
# Of 2,048 samples on each rank, forward alone.

# %%
visualizer.plot_latency(large_batch)


# %% [markdown]
# Where the middle halves of two strategies overlap, this run does not say which is
# faster:


# %%
def apart(one, other):
    first, second = sorted((one, other), key=lambda result: result["batch_time_ms"])
    return first["batch_time_ms_q3"] < second["batch_time_ms_q1"]


pairs = [(a, b) for i, a in enumerate(plans) for b in list(plans)[i + 1 :]]
for samples, results in ((32, small_batch), (SAMPLES, large_batch)):
    said = [f"{a} and {b}" for a, b in pairs if apart(results[a], results[b])]
    print(f"{samples:,} samples, no overlap: {', '.join(said) or 'none'}")

# %% [markdown]
# ## Memory
#
# Of the rank that holds most, with batches of 32 samples.

# %%
visualizer.plot_memory(small_batch)


# %% [markdown]
# ## Which type for which table
#
# Rules of thumb, as constraints: rows are cut where a table is longer than a rank should hold,
# columns where vectors are wide, and what is small stays whole.


# %%
def by_hand(table, rows_at_most=100_000, columns_at_most=128):
    if table.num_embeddings > rows_at_most:
        return only(ShardingType.ROW_WISE)
    if table.embedding_dim > columns_at_most:
        return only(ShardingType.COLUMN_WISE)
    return only(ShardingType.TABLE_WISE)


constraints = {table.name: by_hand(table) for table in tables}
assert plan_for(constraints).tables == plans["mixed"].tables

free = plan_for({"*": ParameterConstraints(pooling_factors=[BAG])})
show_table(
    ["table", "by hand", "the planner, left alone"],
    [
        [name, plans["mixed"].tables[name].sharding_type, free.tables[name].sharding_type]
        for name in SIZES
    ],
)

# %%
visualizer.plot_plan(free, module)

# %% [markdown]
# ## Look into a plan
#
# A plan is plain data: for each table its type and its shards, each a rank, rows and columns.

# %%
weights = dict.fromkeys(range(RANKS), 0)
for name, sharding in plans["mixed"].items():
    for shard in sharding.shards:
        print(f"{name:6}rank {shard.rank}: {len(shard.rows):,} rows of {len(shard.cols)} columns")
        weights[shard.rank] += len(shard.rows) * len(shard.cols) * 4  # float32
counted = analyze_plan(plans["mixed"], tables=tables)
assert list(weights.values()) == counted["memory_distribution"]
weights

# %% [markdown]
# ## What was learnt
#
# - **Memory is decided by the plan alone.** Whole tables cannot be spread evenly when one is larger
#   than all others together: its rank holds 83 % of the weights, wherever the others go. Every plan
#   that cuts the long table gives each rank a half, to a percent.
# - **The mode matters as much as the type.** With ten ids in a bag, tables that ask for sums send a
#   fraction of what tables send that ask for rows: the mixed plan, which does so for its two large
#   tables, sends a fifth of the bytes of the table-wise one. Which mode a table has is in the plan,
#   not in the type's name.
# - **With large batches time follows the bytes, where the machine is quiet enough to tell.** This
#   page was run six times on two cores that a lot of other work shared. With 2,048 samples the mixed
#   plan was the fastest each time. In the quietest run the table-wise plan was slower than all others
#   and row-wise and column-wise alike; in the others the middle halves of most overlapped. With 32
#   samples all took about 3 ms: a message costs its latency, whatever is in it.
# - **Time strategies in turn, not one after the other.** Before these cells did, a quiet moment of
#   the machine made the strategy that sends most look two to three times as fast as the others.
# - **The planner prices a training step, not a lookup.** Left alone it cuts all three tables by rows;
#   here the mixed plan was faster forward. Its prices are those of a machine that was measured once:
#   `python -m recapp.plan calibrate` measures yours, and `python -m recapp.bench strategies` times
#   forward and backward of any tables.
#
# More about plans is in [plans](plans.md), about ranks in a notebook in
# [Python](python.md#ranks-from-a-notebook).
