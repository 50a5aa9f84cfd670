"""The measured workloads, and that a rival gets the very same ids."""

from dataclasses import replace

import pytest
import torch
from bench_cases import BAGS, TINY

from recapp.benchmarks import torchrec_worker
from recapp.benchmarks.bench_settings import BenchSettings
from recapp.benchmarks.embedding_step import EmbeddingStep, shard_workload
from recapp.benchmarks.kernels import floor_of
from recapp.benchmarks.session import WHOLE, Session, make_plan
from recapp.benchmarks.whole_step import dense_flops, matrix_products
from recapp.benchmarks.workloads import MLPERF_BAGS, MODELS, WORKLOADS, Workload
from recapp.tables.config import PoolingType
from recapp.transport.communicator import Comm


def test_the_workloads_are_those_that_were_agreed_on():
    shapes = {
        name: (w.batch_size, w.dim_F[0], len(w.rows_F), sum(w.rows_F), sum(w.bag_F))
        for name, w in WORKLOADS.items()
    }
    assert shapes == {
        "W1": (4096, 64, 26, 1_221_286, 26),
        "W1d": (4096, 128, 26, 1_221_286, 26),
        "W2": (4096, 128, 26, 1_221_286, 260),
        "W2m": (1024, 128, 26, 1_221_286, 214),
        "W3": (8192, 16, 26, 1_221_286, 26),
        "W4": (256, 16, 26, 1_221_286, 26),
        "W1s": (4096, 64, 26, 1_221_286, 26),
        "W2s": (512, 128, 26, 1_221_286, 260),
        "W2c": (512, 128, 26, 1_221_286, 260),
    }
    assert sum(MLPERF_BAGS) == 214


def test_ids_lie_in_their_tables_and_are_the_same_every_time_and_others_on_another_rank():
    ids_NL = TINY.draw(0, 2)
    assert ids_NL.shape == (2, TINY.ids) and ids_NL.dtype == torch.int64
    for ids, rows in zip(
        torch.split(ids_NL, [16 * b for b in TINY.bag_F], 1), TINY.rows_F, strict=True
    ):
        assert int(ids.min()) >= 0 and int(ids.max()) < rows
    assert torch.equal(ids_NL, TINY.draw(0, 2)) and not torch.equal(ids_NL, TINY.draw(1, 2))


def test_ids_are_skewed_as_zipf_says_and_their_row_numbers_are_shuffled():
    rows = 1000
    count = 50_000
    counts = torch.bincount(
        Workload("z", count, (rows,), (1,), (1,)).draw(0, 1)[0], minlength=rows
    ).double()
    share = 1 / torch.arange(1, rows + 1, dtype=torch.float64) ** 1.05
    expected = count * share / share.sum()
    popular = counts.sort(descending=True)
    assert popular.values[:5] == pytest.approx(expected[:5].numpy(), rel=0.1)
    assert popular.indices[:10].diff().abs().min() > 1
    uniform = torch.bincount(
        Workload("u", count, (rows,), (1,), (1,), zipf=False).draw(0, 1)[0], minlength=rows
    )
    assert int(uniform.max()) < 100


def test_a_rival_reads_the_ids_that_recapp_looks_up(tmp_path):
    session = Session(BenchSettings(verb="step"), Comm(), tmp_path, tmp_path)
    batches = session.batches(TINY)
    (spec,) = session.specs("step", TINY)
    ids_NL, lengths_FB = torchrec_worker.load_ids(spec)
    assert len(ids_NL) == len(batches)
    for ids_L, batch in zip(ids_NL, batches, strict=True):
        assert (
            torch.equal(ids_L, batch.values()) and lengths_FB.tolist() == batch.lengths().tolist()
        )
    assert [tuple(t) for t in spec["tables"]] == [("C1", 50, 8), ("C2", 7, 8), ("C3", 300, 8)]


@pytest.mark.parametrize("pooling", PoolingType)
def test_a_workload_says_what_is_made_of_the_rows_of_a_bag(pooling, tmp_path):
    workload = replace(TINY, pooling=pooling)
    session = Session(BenchSettings(verb="step"), Comm(), tmp_path, tmp_path)
    (batch,) = workload.features_of(workload.draw(0, 1))
    plan = make_plan("whole", WHOLE, workload.tables(), Comm(), [batch], workload.lookups())
    collection = shard_workload(workload, plan, Comm(), "torch")
    step = EmbeddingStep(collection, [batch], Comm())
    vectors = {"sum": 3, "mean": 3, "concat": sum(BAGS), "none": sum(BAGS)}[pooling]
    assert sum(g.numel() for g in step.gradients) == 16 * 8 * vectors
    assert (len(step.gradients) == 3) is (pooling is PoolingType.NONE)
    before = [b.data.clone() for b in collection.blocks() if b.tensor == "weight"]
    step.step()
    after = [b.data for b in collection.blocks() if b.tensor == "weight"]
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    (spec,) = session.specs("step", workload)
    assert spec["pooled"] is (pooling is PoolingType.SUM)


def test_the_floor_counts_what_must_move():
    workload = Workload("f", 2, (10, 10), (4, 4), (2, 1))
    (features,) = workload.features_of(torch.tensor([[1, 1, 1, 5, 3, 3]]))
    floor = floor_of(workload, features)
    output = 2 * 8 * 4
    distinct = 3 * 16
    ids = 6 * 8
    assert floor.forward == 2 * output + distinct + ids
    assert floor.backward == output + 2 * distinct + 2 * 3 * 64 + ids


@pytest.mark.parametrize("name", MODELS)
def test_the_products_of_a_model_are_those_of_its_layers(name, monkeypatch):
    """Counted by torch itself."""
    from torch.utils.flop_counter import FlopCounterMode

    model = MODELS[name].__class__(name, 4, MODELS[name].dim, MODELS[name].bottom, MODELS[name].top)
    products = matrix_products(model, Comm())
    with FlopCounterMode(display=False) as counter:
        products.run(1)
    assert counter.get_total_flops() == dense_flops(model)


def test_named_models_are_those_of_the_notebook():
    assert [(m.dim, m.batch_size, m.bottom_layers, list(m.top)) for m in MODELS.values()] == [
        (128, 8192, [512, 256, 128], [1024, 1024, 512, 256, 1]),
        (64, 4096, [512, 256, 64], [1024, 1024, 512, 256, 1]),
        (16, 1024, [512, 256, 64, 16], [512, 256, 1]),
    ]
