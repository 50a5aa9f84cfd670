"""Calls of a model as graphs where lookups need the host: on several ranks, and with tables that
grow. As in `test_cut_lookups.py`, a recorder stands for CUDA graphs.
"""

import pytest
import torch
from engine.engine_cases import make_plan, same_bits
from gpu_first.recorder import counted
from kernels.test_cut_lookups import SKETCHED, Model, WithSequences, batch_of, loss
from ranks import auto_means

from recapp.data_parallel import wrap_dense
from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.errors import IdError, TrainingError
from recapp.graphs.module_graph import ModuleGraph
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.step_graph import NOT_CUT
from recapp.optim.optimizer import hybrid
from recapp.optim.rules import rowwise_adagrad
from recapp.parallel import DistributedModelParallel
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.transport.communicator import Comm

RECORDED = WARM_UP + 2  # calls before a form is recorded: the first one learns what the model does


class Loop:
    """A loop of a user whose model is wrapped as `DistributedModelParallel` wraps it."""

    def __init__(self, comm, graphs, model=None, plan="row_wise"):
        self.comm = comm
        self.model = model or Model()
        plan = make_plan(plan, self.model.tables, comm.world, column_width=4)
        self.model.bags.leave_room(4)
        shard_model(self.model, plan, comm, rowwise_adagrad(0.125), "triton")
        self.tables = sharded_tables(self.model)
        settings = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
        self.wrapped = wrap_dense(self.model, comm, process_group=comm.group, **settings)
        self.dense = torch.optim.Adam(self.model.parameters(), 2**-7, fused=True)
        self.optimizer = hybrid(self.dense, self.tables)
        self.captures = self.replays = 0
        self.call = self.wrapped
        if graphs:
            self.call = self.graph = ModuleGraph(self.wrapped, torch.device("cpu"), self.capture)

    def capture(self, work):
        return counted(self, work, [self.graph._verdict.stopped, self.graph.found_inf])

    def train(self, seeds, backwards=1, **forms):
        for seed in seeds:
            self.optimizer.zero_grad()
            for part in range(backwards):
                value = loss(self.call, batch_of(seed + 100 * part, self.comm.rank, **forms))
                value.backward()
            self.optimizer.step()
            yield value.detach().clone()

    def weights(self):
        data = [b.data for t in self.tables for store in t.stores for b in store.blocks()]
        rows = [x if isinstance(x, torch.Tensor) else x.memory[x.slots] for x in data]
        return [x.detach().clone() for x in (*self.model.parameters(), *rows)]


def pair(comm, model=Model, plan="row_wise", **of_model):
    return [Loop(comm, graphs, model(**of_model), plan) for graphs in (True, False)]


def compare(comm, plan, **of_table):
    recorded, loop = pair(comm, plan=plan, **of_table)
    seeds = range(RECORDED + 3)
    values = [[*way.train(seeds), *way.weights()] for way in (recorded, loop)]
    recorded.graph.finish()
    assert all(map(same_bits, *values))
    assert (recorded.captures, recorded.replays) == (2, 2 * 3)


def does_not_fit(comm):
    """Train with batches of which those of one rank, and then of both, are of other forms."""
    recorded, loop = pair(comm)
    forms = [False] * RECORDED + [False, comm.rank == 1, comm.rank == 0, True, False]
    values = []
    for way in (recorded, loop):
        steps = [way.train([3 * seed + 1], varies=varies) for seed, varies in enumerate(forms)]
        values.append([*(x for step in steps for x in step), *way.weights()])
    recorded.graph.finish()
    assert all(map(same_bits, *values))
    assert recorded.replays == 2 * 3


def reads_sequences(comm):
    """Train a model that reads vectors one by one. A batch of the last rank has fewer ids."""
    recorded, loop = pair(comm, WithSequences)
    numbers = [7] * (RECORDED + 1) + [7 - 2 * comm.rank, 7, 7]
    values = []
    for way in (recorded, loop):
        steps = [way.train([seed], per_feature=n) for seed, n in enumerate(numbers)]
        values.append([*(x for step in steps for x in step), *way.weights()])
    recorded.graph.finish()
    assert all(map(same_bits, *values))
    assert recorded.replays == 2 * (4 - comm.rank)
    rows = Loop(comm, True, WithSequences(need_indices=True))
    assert rows.graph.why_not == NOT_CUT


def stops(comm, fault):
    """Train until a fault on the last rank, on for some steps, and after its error."""
    recorded, loop = pair(comm)
    for way in (recorded, loop):
        list(way.train(range(RECORDED + 2)))
    before = recorded.weights()
    kind = IdError if fault == "bad" else TrainingError
    text = "which is outside its" if fault == "bad" else f"step {RECORDED + 3}: the gradient of an"
    recorded.dense.found_inf = recorded.graph.found_inf
    with pytest.raises(kind, match=text):
        list(recorded.train([50], **{fault: True}))
        assert recorded.graph.found_inf == 1
        assert not any(p.grad.any() for p in recorded.model.parameters())
        list(recorded.train(range(60, 64)))
    assert recorded.graph.calls <= RECORDED + 5
    assert all(map(same_bits, before, recorded.weights()))
    values = [[*way.train([70, 71]), *way.weights()] for way in (recorded, loop)]
    assert all(map(same_bits, *values))


def adds_up(comm):
    """Train with two backwards a step, as `accumulate` of a loop does."""
    recorded, loop = pair(comm)
    values = [
        [*way.train(range(RECORDED), backwards=2), *way.weights()] for way in (recorded, loop)
    ]
    assert all(map(torch.allclose, *values))
    assert recorded.replays


def has_calls_without_backward(comm):
    """Leave the outputs of some calls in training mode without a backward."""
    recorded, loop = pair(comm)
    values = []
    for way in (recorded, loop):
        values.append([])
        for seed in range(RECORDED + 4):
            if seed in (2, RECORDED + 1):
                way.call(batch_of(40 + seed, comm.rank))
            values[-1] += way.train([seed])
        values[-1] += way.weights()
    assert all(map(same_bits, *values))
    assert recorded.replays


def goes_another_way(comm):
    """Call the model that DDP wraps by itself, after calls were recorded."""
    way = Loop(comm, True)
    list(way.train(range(RECORDED + 1)))
    with pytest.raises(RuntimeError, match="train all batches by the same loop"):
        way.wrapped(batch_of(1, comm.rank))
    way.wrapped.eval()
    way.wrapped(batch_of(1, comm.rank))
    way.wrapped.train()
    list(way.train([1]))


class Maps(Model):
    """A model that finds rows of its own for ids, which may be outside of the tables."""

    def forward(self, batch):
        ids = batch.sparse
        mapped = KeyedJaggedTensor(list(ids.keys()), ids.values() % 5, lengths=ids.lengths())
        return super().forward(Batch(batch.dense_BI, mapped, batch.labels_B))


class Odd:
    def __init__(self, made):
        self.made = made


class ReturnsOdd(Model):
    def forward(self, batch):
        return Odd(super().forward(batch))


def is_launched(comm, case, why):
    """Train a model whose calls cannot be recorded: all ranks launch them as without graphs."""
    model = {
        "others": lambda: Model(weighs=True),
        "mapped": Maps,
        "output": ReturnsOdd,
        "again": Model,
    }[case]
    values = []
    for graphs in (True, False):
        way = Loop(comm, graphs, model())
        values.append([])
        for seed in range(4):
            way.optimizer.zero_grad()
            seeds = [seed, 9] if case == "again" else [seed]
            made = [way.call(batch_of(x, comm.rank, bad=case == "mapped")) for x in seeds]
            value = sum(getattr(x, "made", x).square().sum() for x in made)
            value.backward()
            way.optimizer.step()
            values[-1].append(value.detach())
        values[-1] += way.weights()
        if graphs:
            assert way.graph.why_not.startswith(why) and not way.captures
    assert all(map(same_bits, *values))


def is_wrapped_later(comm):
    """Wrap the dense part once it is final: graphs begin there."""
    with auto_means("triton"):
        model = DistributedModelParallel(Model(), comm.group, init_data_parallel=False, graph=True)
    assert model.graph is None
    model.init_data_parallel()
    assert model.graph.why_not == "the model is on the cpu" and model.graph.cuts
    loss(model, batch_of(1, comm.rank)).backward()


def test_a_rank_whose_call_does_not_fit_is_launched_beside_the_others(interpreted, ranks):
    ranks.run(does_not_fit, 2)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["row_wise", "column_wise"])
def test_calls_of_several_ranks_have_the_bits_of_a_loop_with_ddp(interpreted, ranks, plan):
    ranks.run(compare, 2, plan)


@pytest.mark.full
def test_calls_of_several_ranks_read_vectors_one_by_one(interpreted, ranks):
    ranks.run(reads_sequences, 2)


@pytest.mark.full
def test_calls_with_tables_that_need_the_host_have_the_bits_of_a_loop(interpreted):
    compare(Comm(), "table_wise", num_embeddings="dynamic", dynamic=SKETCHED)


@pytest.mark.full
def test_ddp_does_not_take_calls_whose_gradients_it_would_not_average(interpreted, ranks):
    ranks.run(goes_another_way, 2)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["infinite", "bad"])
def test_a_fault_of_one_rank_stops_all(interpreted, ranks, fault):
    ranks.run(stops, 2, fault)


@pytest.mark.full
def test_gradients_of_several_backwards_add_up(interpreted, ranks):
    ranks.run(adds_up, 2)


@pytest.mark.full
def test_calls_without_backward_change_nothing(interpreted, ranks):
    ranks.run(has_calls_without_backward, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("others", "the model looks up other ids than those of the batch"),
        ("mapped", "the model looks up other ids than those of the batch"),
        ("output", "the model returns a Odd"),
        ("again", "the model is called again before backward"),
    ],
)
def test_what_cannot_be_recorded_is_launched_on_all_ranks(interpreted, ranks, case, why):
    ranks.run(is_launched, 2, case, why)


@pytest.mark.full
def test_graphs_begin_where_the_dense_part_is_wrapped(interpreted, ranks):
    ranks.run(is_wrapped_later, 2)
