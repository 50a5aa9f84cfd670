"""Models whose forward and backward are recorded, in a loop of the user's. As in
`test_step_graph.py`, a recorder stands for a CUDA graph and Triton's interpreter for a GPU.
"""

import pytest
import torch
from engine.engine_cases import same_bits
from gpu_first.recorder import captured
from kernels.test_step_graph import (
    ROWS,
    B,
    GradientNodes,
    Model,
    WithSequence,
    around,
    batch,
    loss,
    ragged,
)
from torch.nn.functional import binary_cross_entropy_with_logits, dropout

from recapp.compat.torchrec import models as torchrecs
from recapp.compat.torchrec.batches import Batch as TorchRecsBatch
from recapp.engine.sharded_collection import shard_model, sharded_tables
from recapp.errors import IdError, TrainingError
from recapp.graphs.module_graph import ModuleGraph
from recapp.graphs.recorded_batch import WARM_UP
from recapp.graphs.step_graph import StepGraph
from recapp.models import linear_stack
from recapp.models.published_dlrm import DLRM
from recapp.optim.optimizer import hybrid
from recapp.optim.rules import adam, rowwise_adagrad
from recapp.parallel import DistributedModelParallel
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.communicator import Comm

CPU = torch.device("cpu")
RECORDED = WARM_UP + 1  # calls before a form is recorded


class Parts(WithSequence):
    """A model of a user: it takes tensors, ids and a number, and returns several outputs, one of
    which the loss does not read. It draws random numbers, and has a layer with running values.
    """

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.spare = torch.nn.Linear(8, 2)

    def forward(self, dense, ids, scale=1.0):
        vectors = dropout(self.norm(self.bags(ids).values()), 0.25, self.training)
        sequence = self.sequence(ids)["c"].values().view(B, -1).sum(1)
        logits = self.top(torch.cat([dense, vectors], 1)).squeeze(1) * scale + sequence
        return {"logits": logits, "others": [self.spare(vectors), vectors.detach()], "none": None}


def logits_of(made):
    return made["logits"] if isinstance(made, dict) else made


class Loop:
    """A loop of a user. `captures` has the recorded graphs, two for each recorded call; those of a
    GPU are CUDA graphs.
    """

    def __init__(self, graphs=True, model=None, rule=None, device=CPU, **settings):
        self.model = model or Model()
        collections = [m for m in self.model.modules() if hasattr(m, "tables")]
        tables = [t for one in collections for t in one.tables()]
        places = CandidateRanks([0], [[0]])
        plan = ShardingPlan({t.name: tile(t, "table_wise", places) for t in tables}, 1)
        comm = Comm(None, device)
        shard_model(self.model, plan, comm, rule or rowwise_adagrad(0.1), "triton")
        self.model.to(device)
        self.tables = sharded_tables(self.model)
        self.dense = torch.optim.Adam(self.model.parameters(), fused=True, **settings)
        self.optimizer = hybrid(self.dense, self.tables)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.captures = []
        self.nodes = GradientNodes(self.model)
        self.replays = 0
        capture = self.capture if device == CPU else None
        self.graph = ModuleGraph(self.model, device, capture) if graphs else None

    def __call__(self, *args, **kwargs):
        self.poison()
        return (self.graph or self.model)(*args, **kwargs)

    def capture(self, work):
        self.nodes.check_new()
        with torch.random.fork_rng([]):
            value, recorder = captured(work, [*self.tensors(), self.graph._verdict.stopped])
        counts = recorder.counts()
        assert counts["waits"] == counts["pins"] == counts["messages"] == 0
        self.captures.append(recorder)

        def replay():
            self.replays += 1
            recorder.replay()

        return value, replay

    def poison(self):
        """Spoil what recorded calls must not read before they write it."""
        for step in self.graph._steps if self.graph else ():
            static = step.static
            scratch = [x for lease in static.leases for one in lease for x in one.tensors()]
            made = [x for x in (*step.outputs, *step.gradients) if step.forward and x is not None]
            with torch.no_grad():
                for x in (*static._packed.nested, *scratch, *made):
                    x.fill_(torch.nan if x.is_floating_point() else 3)
                static.samples.sparse.values().fill_(10**6)

    def tensors(self):
        rows = [b.data for t in self.tables for store in t.stores for b in store.blocks()]
        dense = [*(p.data for p in self.model.parameters()), *self.model.buffers()]
        state = [x for s in self.dense.state.values() for x in s.values()]
        return [*dense, *rows, *state]

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def train(self, batches, call=None):
        torch.manual_seed(5)
        outputs = []
        for one in batches:
            made = call(self, one) if call else self(one)
            binary_cross_entropy_with_logits(logits_of(made), one.labels_B).backward()
            self.step()
            outputs.append(logits_of(made).detach().clone())
        if self.graph:
            self.graph.finish()
        return [*outputs, *(x.clone() for x in self.tensors())]


def equal(recorded, launched, batches, call=None):
    mine, known = recorded.train(batches, call), launched.train(batches, call)
    updates = [[t.update.updates for t in loop.tables] for loop in (recorded, launched)]
    return all(map(same_bits, mine, known)) and updates[0] == updates[1]


def test_around_the_graphs_of_a_call_is_a_copy_in_and_a_copy_out_of_each(interpreted):
    loop = Loop(model=Parts())
    for seed in range(RECORDED + 1):
        one = batch(seed)
        loop(one.dense_BI, one.sparse)["logits"].square().sum().backward()
        loop.optimizer.zero_grad()
    made = {}
    one = batch(9)
    forward = around(lambda: made.update(loop.graph(one.dense_BI, one.sparse)))
    assert forward == [*["_foreach_copy_"] * 2, "graph", "_foreach_copy_"]
    gradient_B = torch.ones(B)
    made["others"][1].mul_(2)  # outputs are no views of one another
    backward = around(lambda: made["logits"].backward(gradient_B))
    assert backward == ["_foreach_copy_", "graph", "clone", "start_to_host"]


@pytest.mark.full
@pytest.mark.parametrize("rule", [rowwise_adagrad(0.1), adam(0.1)], ids=lambda r: r.name)
def test_recorded_calls_have_the_bits_of_the_ordinary_loop(interpreted, rule):
    forms = [1] * (RECORDED + 2) + [2, 1]  # a batch of another form comes between
    batches = [batch(seed, hot) for seed, hot in enumerate(forms)]
    recorded = Loop(rule=rule)
    assert equal(recorded, Loop(False, rule=rule), batches)
    assert len(recorded.captures) == 2 and recorded.replays == 2 * 3


@pytest.mark.full
def test_a_call_with_fewer_ids_runs_as_the_recorded_one(interpreted):
    before = [[9, 6, 4], [0, 6, 7], [12, 6, 5], [10, 6, 1]]  # b always has as many ids
    later = [[3, 5, 8], [14, 6, 8], [14, 7, 8], [1, 6, 2]]  # one has more ids
    batches = [ragged(seed, per_F) for seed, per_F in enumerate([*before, *later])]
    recorded = Loop()
    assert equal(recorded, Loop(False), batches)
    assert recorded.replays == 2 * 3


def test_a_model_takes_and_returns_what_it_likes(interpreted):
    def call(loop, one):
        made = loop(one.dense_BI, ids=one.sparse, scale=0.5)
        assert isinstance(made["others"], list) and made["none"] is None
        assert not made["others"][1].requires_grad
        return made

    batches = [batch(seed) for seed in range(RECORDED + 3)]
    recorded = Loop(model=Parts())
    assert equal(recorded, Loop(False, Parts()), batches, call)
    assert recorded.replays == 2 * 3
    assert recorded.model.spare.weight.grad is None  # the loss does not read its output


@pytest.mark.full
@pytest.mark.parametrize("kind", ["own", "torchrecs"])
def test_a_dlrm_trains_as_without_graphs(interpreted, monkeypatch, kind):
    monkeypatch.setattr(linear_stack, "on_gpu", lambda tensor: True)  # as the recorder has it

    def made():
        torch.manual_seed(1)
        tables = [EmbeddingBagConfig(n, 4, f, feature_names=[f]) for f, n in ROWS.items()]
        bags = EmbeddingBagCollection(tables, seed=2)
        if kind == "own":
            return DLRM(bags, 3, [4], [4, 1])
        return torchrecs.DLRMTrain(torchrecs.DLRM(bags, 3, [4], [4, 1]))

    def call(loop, one):
        if kind == "own":
            return loop(one)
        loss, (detached, logits, _) = loop(TorchRecsBatch(one.dense_BI, one.sparse, one.labels_B))
        assert same_bits(loss.detach(), detached) and not logits.requires_grad
        return logits + (loss - detached)  # has no gradient but that of the loss

    batches = [ragged(seed, [5 + seed % 3, 4, 4]) for seed in range(RECORDED + 2)]
    recorded = Loop(model=made())
    assert equal(recorded, Loop(False, made()), batches, call)
    assert recorded.replays == 4


@pytest.mark.parametrize("fault", ["id", pytest.param("loss", marks=pytest.mark.full)])
def test_a_fault_stops_the_tables_and_after_its_error_training_goes_on(interpreted, fault):
    recorded, launched = Loop(), Loop(False)
    assert equal(recorded, launched, [batch(seed) for seed in range(RECORDED + 1)])
    before = [x.clone() for x in recorded.tensors()]
    bad = batch(50)
    named = f"step {RECORDED + 2}: the gradient of an output is not finite; the tables are those"
    if fault == "id":
        bad.sparse.values()[B + 2] = 9
        named = rf"table b: feature b has the id 9 \(step {RECORDED + 2}\), which is outside"
    with pytest.raises(IdError if fault == "id" else TrainingError, match=named):
        for one in (bad, batch(60), batch(61)):
            scale = torch.inf if one is bad and fault == "loss" else 1
            (recorded(one).sum() * scale).backward()
            assert recorded.graph.found_inf == 1
            assert not any(p.grad.any() for p in recorded.model.parameters())
    assert recorded.graph.calls <= RECORDED + 4  # not much later
    assert all(map(same_bits, before, recorded.tensors()))
    recorded.optimizer.zero_grad()
    assert equal(recorded, launched, [batch(70), batch(71)])  # as if the others had not been


@pytest.mark.full
def test_an_id_that_is_an_error_is_one_at_once_where_a_call_is_launched(interpreted):
    bad = batch(50)
    bad.sparse.values()[B + 2] = 9
    with pytest.raises(IdError, match="table b: feature b has the id 9, which is outside"):
        Loop()(bad)


@pytest.mark.full
@pytest.mark.parametrize("ask", ["finish", "eval", "no_grad"])
def test_an_error_comes_when_the_model_is_asked_for_something_else(interpreted, ask):
    loop = Loop()
    loop.train([batch(seed) for seed in range(RECORDED + 1)])
    bad = batch(50)
    bad.sparse.values()[B + 2] = 9
    loop(bad)  # without backward
    loop(batch(51)).sum().backward()
    loop.model.train(ask != "eval")
    with pytest.raises(IdError, match=r"feature b has the id 9 \(step 6\)"):
        if ask == "finish":
            loop.graph.finish()
        with torch.set_grad_enabled(ask != "no_grad"):
            loop(batch(1))
    loop.model.train()
    loop(batch(1)).sum().backward()
    loop.graph.finish()


@pytest.mark.full
def test_gradients_of_several_backwards_add_up_as_without_graphs(interpreted):
    found = []
    for graphs in (True, False):
        loop = Loop(graphs)
        torch.manual_seed(5)
        for seed in range(0, RECORDED + 2, 2):
            for one in (batch(seed), batch(seed + 1)):
                binary_cross_entropy_with_logits(loop(one), one.labels_B).backward()
            kept = [p.grad for p in loop.model.parameters()]
            before = [x.clone() for x in kept]
            loop.step()
        loop(batch(seed)).sum().backward()
        assert all(map(same_bits, kept, before))  # nobody overwrites them
        found.append([x.clone() for x in loop.tensors()])
    assert all(map(same_bits, *found))


@pytest.mark.full
@pytest.mark.parametrize("again", ["twice", "late"])
def test_a_backward_that_cannot_be_right_is_refused(interpreted, again):
    loop = Loop()
    loop.train([batch(seed) for seed in range(RECORDED + 1)])
    first = loop(batch(20)).sum()
    if again == "late":
        loop(batch(21))
    else:
        first.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward of training call 6 of the model came twice"):
        first.backward()
    loop(batch(22)).sum().backward()
    loop.graph.finish()


@pytest.mark.full
def test_a_loop_with_several_calls_for_a_step_is_not_recorded(interpreted):
    found = []
    for graphs in (True, False):
        loop = Loop(graphs)
        for seed in range(0, 2 * RECORDED + 2, 2):
            (loop(batch(seed)).sum() + loop(batch(seed + 1)).square().sum()).backward()
            loop.step()
        assert not loop.captures
        found.append([x.clone() for x in loop.tensors()])
    assert all(map(same_bits, *found))


@pytest.mark.full
def test_what_is_frozen_on_the_way_is_another_form(interpreted):
    def freeze(loop, seed):
        loop.model.top.requires_grad_(seed != RECORDED + 1)
        loop.model.bags.requires_grad_(seed != RECORDED + 2)

    found = []
    for graphs in (True, False):
        loop = Loop(graphs)
        made = []
        for seed in range(RECORDED + 4):
            freeze(loop, seed)
            made += loop.train([batch(seed)])
        found.append(made)
    assert all(map(same_bits, *found))
    step = StepGraph(Loop(False).model, loss, Loop(False).dense, lambda work: None)
    forms = [step._forms.of(batch(1))]
    freeze(step, RECORDED + 1)
    forms.append(step._forms.of(batch(1)))
    freeze(step, RECORDED + 2)
    assert len({*forms, step._forms.of(batch(1))}) == 3


@pytest.mark.full
def test_inputs_get_their_gradients(interpreted):
    found = []
    for graphs in (True, False):
        loop = Loop(graphs)
        for seed in range(RECORDED + 3):
            one = batch(seed)
            one.dense_BI.requires_grad_()
            loop(one).square().sum().backward()
            found.append(one.dense_BI.grad)
    assert loop.replays == 0 and all(
        map(same_bits, found[: len(found) // 2], found[len(found) // 2 :])
    )


@pytest.mark.full
def test_a_loss_that_reads_other_outputs_is_refused(interpreted):
    loop = Loop(model=Parts())
    batches = [batch(seed) for seed in range(RECORDED + 1)]
    loop.train(batches, lambda loop, one: loop(one.dense_BI, one.sparse))
    made = loop(batches[0].dense_BI, batches[0].sparse)
    with pytest.raises(RuntimeError, match="the loss reads other outputs of the model than when"):
        made["others"][0].sum().backward()


class Odd:
    def __init__(self, made):
        self.made = made


class ReturnsOdd(Model):
    def forward(self, batch):
        return Odd(super().forward(batch))


class TakesOdd(Model):
    def forward(self, batch, ids=None):
        return super().forward(getattr(batch, "made", batch))


class Hooked(Model):
    def __init__(self):
        super().__init__()
        self.top.weight.register_hook(lambda gradient: gradient / 2)


class Weighted(Model):
    def __init__(self):
        super().__init__(is_weighted=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("why", "model", "given"),
    [
        ("the model returns a Odd: return tensors", ReturnsOdd, lambda one: (one,)),
        (
            "the model gets a Odd: it takes tensors, and one Keyed",
            TakesOdd,
            lambda one: (Odd(one),),
        ),
        ("the model gets a 2 KeyedJaggedTensors", TakesOdd, lambda one: (one, one.sparse)),
        ("parameters have hooks", Hooked, lambda one: (one,)),
        ("the sample weights need a gradient", Weighted, lambda one: (one,)),
    ],
    ids=["output", "input", "ids", "hooks", "weights"],
)
def test_what_cannot_be_recorded_is_launched_and_says_why(interpreted, capsys, why, model, given):
    loop = Loop(model=model())
    for seed in range(RECORDED + 2):
        one = ragged(seed, [4, 4, 4], weighted=True) if model is Weighted else batch(seed)
        if model is Weighted:
            one.sparse.weights().requires_grad_()
        made = loop(*given(one))
        getattr(made, "made", made).sum().backward()
        loop.step()
    assert not loop.captures
    noted = "graph=True: steps are launched one by one, without a CUDA graph: " + why
    assert capsys.readouterr().err.count(noted) == 1


@pytest.mark.full
def test_a_call_that_cannot_be_recorded_is_launched(interpreted, capsys):
    def fails(work):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    loop = Loop()
    loop.graph._capture = fails
    assert equal(loop, Loop(False), [batch(seed) for seed in range(RECORDED + 2)])
    noted = "graph=True: steps are launched one by one, without a CUDA graph: CUDA out of memory."
    assert capsys.readouterr().err.count(noted) == 1


def test_a_model_on_the_cpu_trains_as_ever_and_says_why(capsys):
    found = []
    for graph in (True, False):
        model = DistributedModelParallel(Model(), graph=graph)
        for seed in range(3):
            loss(model, batch(seed)).backward()
        assert isinstance(model.state_dict(), dict)
        found.append([b.data for t in sharded_tables(model) for b in t.blocks()])
    assert all(map(same_bits, *found))
    noted = "graph=True: steps are launched one by one, without a CUDA graph: the model is on the"
    assert capsys.readouterr().err.count(noted) == 1


@pytest.mark.full
def test_a_state_dict_is_that_of_a_model_without_faults(interpreted, monkeypatch):
    model = DistributedModelParallel(Model())
    loop = Loop()
    model.graph = loop.graph
    loop.train([batch(seed) for seed in range(RECORDED + 1)])
    loop(batch(2)).mul(torch.nan).sum().backward()
    with pytest.raises(TrainingError, match="step 6: the gradient of an output is not finite"):
        model.state_dict()
    model.state_dict()
