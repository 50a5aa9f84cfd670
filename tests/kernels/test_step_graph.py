"""Recorded steps of one rank. There is no CUDA graph here: a recorder notes the work of a step, and
does it again on what later batches have left in the same memory. Kernels run in Triton's
interpreter.
"""

import pytest
import torch
from engine.engine_cases import same_bits
from gpu_first.recorder import Recorder, captured
from torch.autograd.graph import get_gradient_edge

from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.errors import IdError, TrainingError
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.step_graph import StepGraph
from recapp.optim.optimizer import hybrid
from recapp.optim.rules import adam, rowwise_adagrad
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection, EmbeddingCollection
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig
from recapp.transport.communicator import Comm

ROWS = {"a": 40, "b": 9, "c": 5}
B = 6


class Model(torch.nn.Module):
    def __init__(self, pooling="sum", is_weighted=False, features="abc", drops=0):
        super().__init__()
        torch.manual_seed(1)
        tables = [
            EmbeddingBagConfig(
                rows - drops,
                4 + 4 * (f == "c"),
                f,
                feature_names=[f],
                pooling=pooling,
                id_rule="drop" if drops else "error",
            )
            for f, rows in ROWS.items()
            if f in features
        ]
        self.bags = EmbeddingBagCollection(tables, seed=2, is_weighted=is_weighted)
        self.top = torch.nn.Linear(sum(t.embedding_dim for t in tables) + 3, 1)

    def forward(self, batch):
        return self.top(torch.cat([batch.dense_BI, self.bags(batch.sparse).values()], 1)).squeeze(1)


class WithSequence(Model):
    """A model that reads the vectors of the ids of c one by one."""

    def __init__(self):
        super().__init__(features="ab")
        table = EmbeddingConfig(ROWS["c"], 4, "s", feature_names=["c"])
        self.sequence = EmbeddingCollection([table], seed=3)

    def forward(self, batch):
        vectors_LD = self.sequence(batch.sparse)["c"].values()
        return super().forward(batch) + vectors_LD.view(B, -1).sum(1)


class Weighs(Model):
    """A model that weighs ids by their place among those of all features."""

    def __init__(self):
        super().__init__(is_weighted=True)

    def forward(self, batch):
        ids = batch.sparse
        weighed = ids.with_weights(torch.arange(len(ids.values())) / 8)
        vectors = self.bags(weighed).values()
        return self.top(torch.cat([batch.dense_BI, vectors], 1)).squeeze(1)


def loss(model, batch):
    return torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels_B)


def batch(seed, hot=1):
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(rows, (B * hot,), generator=drawn) for rows in ROWS.values()])
    lengths = torch.full((len(ROWS) * B,), hot)
    features = KeyedJaggedTensor(list(ROWS), ids, lengths=lengths)
    return Batch(
        torch.randn(B, 3, generator=drawn), features, (torch.rand(B, generator=drawn) < 0.4).float()
    )


def ragged(seed, per_F, weighted=False):
    """A batch that has some ids of each feature, in bags of any size."""
    drawn = torch.Generator().manual_seed(seed)
    one = batch(seed)
    bags = [torch.randint(B, (n,), generator=drawn).bincount(minlength=B) for n in per_F]
    of_keys = zip(ROWS.values(), per_F, strict=True)
    ids = torch.cat([torch.randint(rows, (n,), generator=drawn) for rows, n in of_keys])
    weights = torch.rand(len(ids), generator=drawn) if weighted else None
    one.sparse = KeyedJaggedTensor(list(ROWS), ids, weights, lengths=torch.cat(bags))
    return one


class GradientNodes:
    """The nodes that add up the gradients of a model's leaves. Something else holds them, as DDP
    does, or the loss that a loop still has. On a GPU they belong to the stream of the loop.
    """

    def __init__(self, model):
        self.model = model
        self.nodes = self.now()

    def now(self):
        leaves = [*self.model.parameters(), *(t.anchor for t in sharded_tables(self.model))]
        return {id(x): get_gradient_edge(x).node for x in leaves if x.requires_grad}

    def check_new(self):
        """Check that nodes of the leaves are others, on whatever stream is recorded now."""
        now = self.now()
        assert not any(now.get(leaf) is node for leaf, node in self.nodes.items())


class Trained:
    """A model and its steps. `captures` has the recorded steps, and `replays` counts those that ran
    again.
    """

    def __init__(self, rule=None, graphs=True, model=None, **optimizer):
        self.model = model or Model()
        self.replays = 0
        places = CandidateRanks([0], [[0]])
        collections = [m for m in self.model.children() if hasattr(m, "tables")]
        tables = [t for one in collections for t in one.tables()]
        plan = {t.name: tile(t, "table_wise", places) for t in tables}
        plan = ShardingPlan(plan, 1)
        shard_model(self.model, plan, Comm(), rule or rowwise_adagrad(), "triton")
        self.tables = sharded_tables(self.model)
        self.dense = torch.optim.Adam(self.model.parameters(), **{"fused": True, **optimizer})
        optimizer = hybrid(self.dense, self.tables)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.captures = []
        self.nodes = GradientNodes(self.model)
        self.step = StepGraph(self.model, loss, optimizer, self.capture)
        if not graphs:
            self.step.why_not = "a test launches all steps one by one"

    def capture(self, step):
        self.nodes.check_new()
        value, recorder = captured(step, self.tensors())
        self.captures.append(recorder)

        def replay():
            self.replays += 1
            recorder.replay()

        return value, replay

    def poison(self):
        """Spoil what recorded steps must not read before they write it: ids that no bag has are
        outside of all tables, and integers and gradients of the step before are wrong.
        """
        for recorded in self.step._graphs:
            scratch = [one for lease in recorded.static.leases for one in lease]
            for x in (
                *recorded.static._packed.nested,
                *(x for one in scratch for x in one.tensors()),
            ):
                x.fill_(torch.nan if x.is_floating_point() else 3)
            recorded.static.samples.sparse.values().fill_(10**6)

    def tensors(self):
        rows = [b.data for t in self.tables for store in t.stores for b in store.blocks()]
        state = [x for s in self.dense.state.values() for x in s.values()]
        return [
            *(p.data for p in self.model.parameters()),
            *rows,
            *state,
            self.step._verdict.stopped,
        ]

    def train(self, batches):
        values = []
        for one in batches:
            self.poison()
            values.append(self.step(one))
            self.schedule.step()
        self.step.finish()
        return [*values, *(x.clone() for x in self.tensors())]


@pytest.mark.parametrize(
    "rule",
    [rowwise_adagrad(0.1), pytest.param(adam(0.1), marks=pytest.mark.full)],
    ids=lambda r: r.name,
)
def test_recorded_steps_have_the_bits_of_steps_that_are_launched_one_by_one(interpreted, rule):
    forms = [1] * (WARM_UP + 2) + [2, 1]  # a batch of another form comes between
    batches = [batch(seed, hot) for seed, hot in enumerate(forms)]
    recorded, launched = Trained(rule), Trained(rule, graphs=False)
    mine, known = recorded.train(batches), launched.train(batches)
    assert all(map(same_bits, mine, known))
    assert len(recorded.captures) == 1 and not launched.captures
    counts = recorded.captures[0].counts()
    assert counts["waits"] == counts["pins"] == counts["messages"] == 0
    assert [t.update.updates for t in recorded.tables] == [len(batches)]


def around(call):
    """Return the names of what is around the graphs in a call: operations, and copies."""
    recorder = Recorder()
    with recorder.recording():
        call()
    return [entry.name for entry in recorder.entries]


def test_around_a_recorded_step_are_the_batch_the_verdict_and_the_result(interpreted):
    trained = Trained()
    for seed in range(WARM_UP + 1):
        trained.step(batch(seed))
    apart, again = batch(8), batch(9)
    copies = ["_foreach_copy_"] * 2  # of tensors of two types
    after = ["graph", "start_to_host", "_foreach_copy_"]
    assert around(lambda: trained.step(apart)) == [*copies, *after]
    trained.schedule.step()  # the device does not know these rates
    assert around(lambda: trained.step(again)) == ["copy_", *copies, *after]
    assert around(lambda: trained.step(apart)) == [*copies, *after]


def test_a_batch_that_lies_in_one_memory_is_one_copy(interpreted):
    batches = [batch(seed).packed() for seed in range(WARM_UP + 3)]
    assert batches[0].sparse.lengths().stride() == (0,)  # lengths of 1 are one number
    recorded, launched = Trained(), Trained(graphs=False)
    mine, known = recorded.train(batches), launched.train(batches)
    assert all(map(same_bits, mine, known))
    assert recorded.replays == 2
    recorded.step(batches[0])  # which brings new rates
    assert around(lambda: recorded.step(batches[1]))[:2] == ["copy_", "graph"]
    recorded.step(batch(9))  # another form: its lengths are numbers of their own
    assert recorded.replays == 4


@pytest.mark.parametrize("pooling", ["sum", pytest.param("mean", marks=pytest.mark.full)])
def test_a_batch_with_fewer_ids_runs_as_the_recorded_step(interpreted, pooling):
    weighted = pooling == "mean"
    before = [[9, 6, 4], [0, 6, 7], [12, 6, 5], [10, 6, 1]]  # b always has as many ids
    room = [14, 6, 8]
    later = [[3, 5, 8], [0, 0, 0], room, [14, 6, 9], [14, 7, 8], [1, 6, 2]]
    batches = [ragged(seed, per_F, weighted) for seed, per_F in enumerate([*before, *later])]
    recorded, launched = (
        Trained(rowwise_adagrad(0.1), graphs, Model(pooling, weighted)) for graphs in (True, False)
    )
    mine, known = recorded.train(batches), launched.train(batches)
    assert all(map(same_bits, mine, known))
    (step,) = recorded.step._graphs
    assert step.static.samples.sparse.length_per_key() == room
    assert recorded.replays == len(later) - 2  # two have more ids


@pytest.mark.parametrize(
    "weighted", [False, pytest.param(True, marks=pytest.mark.full)], ids=["plain", "weighted"]
)
def test_ids_leave_their_bags_within_a_recorded_step(interpreted, weighted):
    numbers = [[9, 6, 4], [2, 6, 7], [12, 6, 5], [10, 6, 1], [3, 6, 8], [14, 6, 0]]
    batches = [ragged(seed, per_F, weighted) for seed, per_F in enumerate(numbers)]
    recorded, launched = (
        Trained(graphs=graphs, model=Model("mean", weighted, drops=3)) for graphs in (True, False)
    )
    mine, known = recorded.train(batches), launched.train(batches)
    assert all(map(same_bits, mine, known))
    assert not recorded.step.cuts and recorded.replays == 2
    ids = {f: torch.cat([one.sparse[f].values() for one in batches]) for f in ROWS}
    refused = {f: int((ids[f] >= rows - 3).sum()) for f, rows in ROWS.items()}
    assert min(refused.values()) > 0
    for trained in (recorded, launched):
        assert trained.tables[0].state.id_rules.changed == refused


@pytest.mark.full
def test_features_of_sequences_have_as_many_ids_as_the_recorded_batch(interpreted):
    numbers = [[n, 5, B] for n in (9, 4, 12, 10, 3)] + [[8, 5, 2 * B], [14, 5, B]]
    batches = [ragged(seed, per_F) for seed, per_F in enumerate(numbers)]
    recorded, launched = (Trained(graphs=graphs, model=WithSequence()) for graphs in (True, False))
    assert all(map(same_bits, recorded.train(batches), launched.train(batches)))
    assert len(recorded.captures) == 1 and recorded.replays == 2


@pytest.mark.full
def test_the_flat_ids_that_a_model_weighs_itself_are_those_of_the_batch(interpreted):
    batches = [ragged(seed, [5 + seed % 3, 4, 4]) for seed in range(8)]
    recorded, launched = (Trained(graphs=graphs, model=Weighs()) for graphs in (True, False))
    assert all(map(same_bits, recorded.train(batches), launched.train(batches)))
    assert not recorded.captures


@pytest.mark.full
def test_batches_that_do_not_fit_are_recorded_with_more_room(interpreted):
    one, two = [6, 6, 6], [40, 6, 6]
    numbers = [one] * (WARM_UP + 1) + [two] * (WARM_UP + 1) + [one, [41, 3, 6], [30, 0, 6]]
    batches = [ragged(seed, per_F) for seed, per_F in enumerate(numbers)]
    recorded, launched = Trained(), Trained(graphs=False)
    assert all(map(same_bits, recorded.train(batches), launched.train(batches)))
    assert [step.static.samples.sparse.length_per_key() for step in recorded.step._graphs] == [
        one,
        [48, 6, 6],
    ]
    assert recorded.replays == 3


@pytest.mark.parametrize("after", [1, WARM_UP + 2], ids=["launched", "recorded"])
@pytest.mark.parametrize("fault", ["id", "loss"])
def test_a_fault_stops_its_step_and_all_later_ones(interpreted, fault, after):
    trained = Trained()
    for seed in range(after):
        trained.step(batch(seed))
    before = [x.clone() for x in trained.tensors()[:-1]]
    bad = batch(50)
    if fault == "id":
        bad.sparse.values()[B + 2] = 9
        named = (
            rf"table b: feature b has the id 9 \(step {after + 1}\), which is outside its 9 rows"
        )
    else:
        bad.dense_BI[0, 0] = torch.inf
        named = f"step {after + 1}: the loss is not finite"
    with pytest.raises(IdError if fault == "id" else TrainingError, match=named):
        for seed in range(60, 64):
            trained.step(bad if seed == 60 else batch(seed))
    assert trained.step.steps <= after + 3  # not much later
    assert all(map(same_bits, before, trained.tensors()[:-1]))


@pytest.mark.full
def test_a_step_that_cannot_be_recorded_is_launched(interpreted, capsys):
    trained, known = Trained(), Trained(graphs=False)

    def fails(step):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    trained.step._capture = fails
    batches = [batch(seed) for seed in range(WARM_UP + 2)]
    assert all(map(same_bits, trained.train(batches), known.train(batches)))
    noted = "steps are launched one by one, without a CUDA graph: CUDA out of memory. Tried to"
    assert capsys.readouterr().err.count(noted) == 1


@pytest.mark.parametrize(
    ("rule", "fused", "why"),
    [
        (None, None, "Adam(fused=None) cannot be stopped by the device: make a torch.optim.Adam"),
        (adam(l2_all_rows=0.1), True, "the host takes part in the update of the tables"),
    ],
    ids=["optimiser", "rule"],
)
def test_what_the_device_cannot_stop_trains_as_an_ordinary_loop(
    interpreted, capsys, rule, fused, why
):
    trained = Trained(rule, fused=fused)
    assert why in trained.step.why_not and why in capsys.readouterr().err
    bad = batch(1)
    bad.sparse.values()[B + 2] = 9
    trained.step(batch(0))
    with pytest.raises(IdError, match="table b: feature b has the id 9, which is outside"):
        trained.step(bad)


def test_a_model_on_the_cpu_says_why_its_steps_are_launched(interpreted):
    trained = Trained()
    step = StepGraph(trained.model, loss, trained.dense)
    assert step.why_not == "the model is on the cpu"
    assert bool(step(batch(0)) > step(batch(0)))  # it trains


def test_what_a_schedule_changes_beside_the_rate_is_another_form(interpreted):
    trained = Trained()
    trained.train([batch(seed) for seed in range(WARM_UP + 2)])
    for setting in ({"weight_decay": 0.5}, {"betas": (0.5, 0.9)}):
        trained.dense.param_groups[0].update(setting)
        trained.train([batch(9)])
    assert trained.replays == 1
