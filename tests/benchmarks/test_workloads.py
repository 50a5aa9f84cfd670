"""The measured workloads."""

from dataclasses import replace

import pytest
import torch
from bench_cases import BAGS, TINY

from recapp.benchmarks.session import make_plan
from recapp.benchmarks.steps import EmbeddingStep, shard_workload
from recapp.benchmarks.workloads import MLPERF_BAGS, MODELS, WORKLOADS, Workload
from recapp.planner.planner_settings import PlanRule, PlanSettings
from recapp.tables.config import PoolingType
from recapp.transport.communicator import Comm

WHOLE = PlanSettings(rules=(PlanRule("table_wise"),))


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


@pytest.mark.parametrize("pooling", PoolingType)
def test_a_workload_says_what_is_made_of_the_rows_of_a_bag(pooling):
    workload = replace(TINY, pooling=pooling)
    (batch,) = workload.features_of(workload.draw(0, 1))
    plan = make_plan("whole", WHOLE, workload.tables(), Comm(), [batch], workload.lookups())
    collection = shard_workload(workload, plan, Comm(), "torch")
    step = EmbeddingStep(collection, [batch], Comm())
    vectors = {"sum": 3, "mean": 3, "concat": sum(BAGS), "none": sum(BAGS)}[pooling]
    assert sum(g.numel() for g in step.gradients) == 16 * 8 * vectors
    assert (len(step.gradients) == 3) is (pooling is PoolingType.NONE)
    before = [b.data.clone() for b in collection.blocks() if b.tensor == "weight"]
    step.run(1)
    after = [b.data for b in collection.blocks() if b.tensor == "weight"]
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_named_models_are_those_of_the_notebook():
    assert [(m.dim, m.batch_size, m.bottom_layers, list(m.top)) for m in MODELS.values()] == [
        (128, 8192, [512, 256, 128], [1024, 1024, 512, 256, 1]),
        (64, 4096, [512, 256, 64], [1024, 1024, 512, 256, 1]),
        (16, 1024, [512, 256, 64, 16], [512, 256, 1]),
    ]
