"""What a training step of sharded tables gives a GPU to do, counted without one.

    tables    lookup, backward and update of three tables: row-wise Adagrad, one id a bag
    sums      the same where owners sum bags (mode `pooled`)
    drops     the same with the id rule `drop`
    dynamic   the same of 26 dynamic tables that share a store, half of whose ids are new
    seen      the same where a key gets its row in the second step that sees it
    limits    the same far below a limit of rows
    ttl       the same where rows leave that were not used for some time
    model     the same in a DLRM, with its dense part, loss and fused Adam

Steps of a model are also counted as a graph that is recorded before (`StepGraph`, mode `recorded`):
what it does is one launch then, and operations are those around it, copies on a GPU. On two ranks
the graph is what happens between lookup and update. Batches lie in one memory, as those of recapp's
loader do.

Of two ranks, one is counted: the `Mirror` returns its own messages as its peer's, and dense
gradients are its own. A single rank has its tables whole, two have them by rows (mode `unique`).
Kernels are Triton's.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from recapp.benchmarks.kernel_costs import Mirror
from recapp.benchmarks.session import rule
from recapp.engine.sharded_collection import shard_bags, sharded_tables
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.several_ranks import OfRanks
from recapp.graphs.step_graph import StepGraph
from recapp.models.published_dlrm import DLRM
from recapp.optim.optimizer import hybrid
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.sparse.transfer import Packed
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport import communicator, step_messages
from recapp.transport.communicator import Comm, GpuSideStream, average_over_ranks

from .recorder import Recorder

WIDTHS = {1: (8, 8, 8), 2: (8, 8, 16), 3: (8, 16, 32)}
"""The columns of each table, by the number of groups."""
ROWS = (64, 40, 8)  # even, so that both ranks of the mirror have rows of the same numbers
GROWING = {
    "dynamic": {},
    "seen": {"seen": 2},
    "limits": {"max_rows": 64 * 50_000},
    "ttl": {"eviction": "ttl", "ttl_steps": 1000},
}
"""The settings of 26 dynamic tables, by what trains."""
SAMPLES = 300  # more than a long bag of any table may have entries: its sums are launches, too
FEW = 20
NUMBERS = 13  # dense inputs


class NoStream:
    """A stream without work."""

    def wait_stream(self, other):
        """Wait for nothing."""

    def wait_event(self, event):
        """Wait for nothing."""

    def record_event(self):
        """Return no event."""


def counted_rows():
    """Return a row of counts for each part, mode, number of ranks and of groups. Where all of a
    step is one graph, its counts are those of a small batch.
    """
    return [
        {
            "part": part,
            "mode": mode,
            "ranks": ranks,
            "groups": groups,
            **record(
                *(ranks, groups),
                samples=FEW if (mode, ranks) == ("recorded", 1) else SAMPLES,
                part=part,
                mode=mode,
            ).counts(),
        }
        for part, mode, rank_numbers in (
            ("tables", "eager", (1, 2)),
            ("sums", "eager", (2,)),
            ("drops", "eager", (1, 2)),
            ("dynamic", "eager", (1,)),
            ("dynamic", "recorded", (1,)),
            ("seen", "eager", (1,)),
            ("seen", "recorded", (1,)),
            ("limits", "eager", (1,)),
            ("limits", "recorded", (1,)),
            ("ttl", "recorded", (1,)),
            ("model", "eager", (1,)),
            ("model", "recorded", (1, 2)),
        )
        for ranks in rank_numbers
        for groups in ((1,) if part in GROWING else WIDTHS)
    ]


def record(ranks, groups, seed=1, samples=SAMPLES, part="tables", mode="eager"):
    """Return the record of a training step.

    Args:
        ranks: One or two ranks.
        groups: The number of groups.
        seed: The seed of the ids.
        samples: The samples of the batch.
        part: What trains, `tables`, `sums`, `drops`, `dynamic`, `seen`, `limits`, `ttl` or `model`.
        mode: `eager`, or `recorded`: a step of a model that `StepGraph` has recorded before.
    """
    if part in GROWING:
        collection, batches = grows(**GROWING[part]), new_ids
    else:
        mode_of_tables = "pooled" if part == "sums" else "unique"
        rule_of_ids = "drop" if part == "drops" else "error"
        collection = sharded(ranks, groups, mode_of_tables, rule_of_ids)
        batches = batch_of
    with tf32():
        if mode == "recorded":
            step = recorded_model(collection, samples, batches)
        else:
            step = PARTS[part](collection, samples)
            for _ in range(2):  # two batches have the memory that later ones use again
                step(batches(0, samples))
        return recorded(step, collection, batches(seed, samples))[0]


@contextmanager
def tf32():
    """While this lasts products are those of TF32, which the kernels of a dense part want."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def sharded(ranks, groups, mode="unique", id_rule="error"):
    """Return sharded tables on one or two ranks, with streams on which nothing overlaps."""
    comm = Comm() if ranks == 1 else Mirror(torch.device("cpu"))
    comm.side = GpuSideStream(NoStream(), NoStream, lambda stream: nullcontext())
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}",
            num_embeddings=rows,
            embedding_dim=width,
            feature_names=[f"f{k}"],
            id_rule=id_rule,
        )
        for k, (rows, width) in enumerate(zip(ROWS, WIDTHS[groups], strict=True))
    ]
    places = CandidateRanks([*range(ranks)], [[*range(ranks)]])
    kind = "table_wise" if ranks == 1 else "row_wise"
    plan = ShardingPlan({t.name: tile(t, kind, places, mode) for t in tables}, ranks, kind)
    return shard_bags(tables, plan, comm, rule(), backend="triton")


def batch_of(seed, samples=SAMPLES):
    """Return a batch of one id a bag."""
    drawn = torch.Generator().manual_seed(seed)
    ids = [torch.randint(rows, (samples,), generator=drawn) for rows in ROWS]
    lengths = torch.ones(len(ROWS) * samples, dtype=torch.int64)
    return KeyedJaggedTensor([f"f{k}" for k in range(len(ROWS))], torch.cat(ids), lengths=lengths)


def grows(**settings):
    """Return 26 dynamic tables on one rank."""
    comm = Comm()
    comm.side = GpuSideStream(NoStream(), NoStream, lambda stream: nullcontext())
    tables = [
        EmbeddingBagConfig(
            name=f"t{k}",
            num_embeddings="dynamic",
            embedding_dim=8,
            feature_names=[f"f{k}"],
            dynamic=settings,
        )
        for k in range(26)
    ]
    places = CandidateRanks([0], [[0]])
    plan = ShardingPlan({t.name: tile(t, "table_wise", places) for t in tables}, 1)
    return shard_bags(tables, plan, comm, rule(), backend="triton")


def new_ids(seed, samples=SAMPLES):
    """Return a batch of one id a bag for 26 tables; half of its ids are those of another seed."""
    ids = torch.arange(samples).repeat(26) + samples // 2 * seed
    lengths = torch.ones(26 * samples, dtype=torch.int64)
    return KeyedJaggedTensor([f"f{k}" for k in range(26)], ids, lengths=lengths)


def tables_alone(collection, samples):
    """Return a step that looks up a batch, updates the rows, and returns the vectors."""
    gradient_BK = torch.ones(samples, sum(x.dim for x in collection.lookups))

    def step(batch):
        vectors_BK = collection(batch).values()
        torch.autograd.backward(vectors_BK, gradient_BK)
        return vectors_BK

    return step


def whole_model(collection, samples):
    """Return a step that trains a DLRM by fused Adam, and returns the logits."""
    dlrm, optimizer, batch_with = _model(collection, samples)

    def step(ids):
        optimizer.zero_grad()
        batch = batch_with(ids)
        logits_B = dlrm(batch)
        _loss(lambda batch: logits_B, batch).backward()
        optimizer.step()
        return logits_B

    return step


def recorded_model(collection, samples, batches=batch_of):
    """Return a step of the same model that runs as a graph, and returns the loss.

    Args:
        collection: The sharded tables.
        samples: The samples of a batch.
        batches: Returns the ids of a batch by seed and samples.
    """
    dlrm, optimizer, batch_with = _model(collection, samples)
    several = collection.shared.comm.world > 1

    def capture(step):
        recorder = Recorder()
        with recorder.recording():
            loss = step()
        return loss, recorder.replay

    graph = StepGraph(
        dlrm,
        _loss,
        optimizer,
        capture,
        ranks=OfRanks(lambda: 1.0, average_over_ranks) if several else None,
    )
    for seed in range(WARM_UP + 1):
        graph(batch_with(batches(seed, samples)))
    graph.finish()  # verdicts of steps that nobody has recorded
    return lambda ids: graph(_in_one_memory(batch_with(ids)))


def _model(collection, samples):
    """Return a DLRM, its optimiser, and a function that makes a batch of ids."""
    torch.manual_seed(0)
    dlrm = DLRM(collection, NUMBERS, (16, 8), (16, 1))
    adam = torch.optim.Adam([p for p in dlrm.parameters() if p.numel()], fused=True)
    dense_BI = torch.rand(samples, NUMBERS)
    labels_B = torch.arange(samples) % 2.0
    optimizer = hybrid(adam, sharded_tables(dlrm))
    return dlrm, optimizer, lambda ids: Batch(dense_BI, ids, labels_B)


def _in_one_memory(batch):
    """Return a batch that lies in one memory. A step that is counted gets it so."""
    tensors = batch.tensors()
    with _disable_current_modes():
        views = Packed(tensors, torch.device("cpu")).nested
    there = dict(zip(map(id, tensors), views, strict=True))
    return batch.each(lambda x: there[id(x)])


def _loss(model, batch):
    return torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels_B)


PARTS = {
    "tables": tables_alone,
    "sums": tables_alone,
    "drops": tables_alone,
    "dynamic": tables_alone,
    "seen": tables_alone,
    "limits": tables_alone,
    "ttl": tables_alone,
    "model": whole_model,
}


def recorded(step, collection, batch):
    """Return the record of a step of a batch, and what the step returns."""
    comm = collection.shared.comm
    recorder = Recorder()
    with (
        recorder.recording(comm if comm.world > 1 else None),
        _counts_on_host() if comm.world == 1 else _averages(recorder),
    ):
        result = step(batch)
    return recorder, result


def _averages(recorder):
    """Return a context in which an average over ranks is a message, although there is one rank."""
    return mock.patch.multiple(
        communicator.dist,
        is_initialized=lambda: True,
        get_world_size=lambda group: 2,
        all_reduce=lambda tensor, group: recorder._note("message", "all_reduce"),
    )


def _counts_on_host():
    """Return a context in which counts stay on the host, as those of a single rank do."""
    return mock.patch.multiple(
        step_messages,
        to_device=lambda numbers, device: torch.from_numpy(numbers),
        to_host=lambda tensor: tensor,
    )
