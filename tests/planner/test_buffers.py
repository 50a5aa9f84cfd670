"""What the exchange keeps beside the tables: counted by hand, and as runs really hold it."""

import json

import pytest
from jobs import recipe, small

from recapp.optim.rules import sgd
from recapp.planner.pricing import buffer_bytes
from recapp.planner.problem import PlanningProblem, Topology
from recapp.run.plan_of_run import problem_of_run
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.statistics import TableStatistics

TABLE = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["f"])
KNOWN = TableStatistics(100, 1.0, 1.0, ((1.0, 1.0), (10.0, 8.0), (20.0, 12.0), (40.0, 20.0)))


def held(kind, world=2, rule=sgd, **more):
    """Of 10 samples a rank, which ask for 8 distinct rows; of 20 samples, 12."""
    problem = PlanningProblem(
        [TABLE], Topology(world), 10, rule() if rule else None, {"t": KNOWN}, **more
    )
    ranks = CandidateRanks(list(range(world)), problem.topology.host_ranks())
    plan = ShardingPlan({"t": tile(TABLE, kind, ranks)}, world)
    return buffer_bytes(plan, problem).tolist()


OFFSETS = 4 * 10
HOME = 4 * 9 * 10


def test_one_message_of_vectors_and_the_notes_of_two_batches_are_held():
    """Of ids, 9 integers each at home, and at the owner 7 for each of the 16 rows that two ranks
    ask for; a fifth more than is asked."""
    owner = (8 * 16 + 8 * 16) + 2 * (8 * 4 + 8 * 4 + HOME + 4 * 7 * 16)
    other = 8 * 16 + 2 * (8 * 4 + HOME)
    assert held("table_wise") == pytest.approx([1.2 * owner + OFFSETS, 1.2 * other + OFFSETS])
    copies = 3 * 8 * 16 + 2 * (
        3 * 8 * 4 + HOME + 4 * 7 * 16
    )  # gradients from the other rank, to both
    assert held("data_parallel") == pytest.approx([1.2 * copies + OFFSETS] * 2)


def test_without_look_ahead_one_batch_is_noted_and_serving_notes_no_update():
    owner = (8 * 16 + 8 * 16) + (8 * 4 + 8 * 4 + HOME + 4 * 7 * 16)
    assert held("table_wise", look_ahead=0)[0] == pytest.approx(1.2 * owner + OFFSETS)
    assert held("table_wise", look_ahead=0, rule=None)[0] == pytest.approx(
        1.2 * (owner - 4 * 5 * 16) + OFFSETS
    )


def test_a_validation_batch_is_noted_beside_them_and_may_have_the_largest_message():
    owner = 2 * 12 * 16 + 2 * (2 * 8 * 4 + HOME + 4 * 7 * 16) + (2 * 12 * 4 + 2 * HOME + 4 * 2 * 24)
    assert held("table_wise", val_batch_per_rank=20)[0] == pytest.approx(1.2 * owner + 3 * OFFSETS)
    equal = 2 * 8 * 16 + 2 * (2 * 8 * 4 + HOME + 4 * 7 * 16) + (2 * 8 * 4 + HOME + 4 * 2 * 16)
    assert held("table_wise", val_batch_per_rank=10)[0] == pytest.approx(1.2 * equal + OFFSETS)


def test_a_rank_alone_asks_nobody():
    assert held("table_wise", world=1) == [0.0]


@pytest.mark.parametrize(
    ("dataset", "trainer", "rows", "expected"),
    [
        ({"val_batch_size": 4096}, {}, None, 1024),
        ({"val_batch_size": None}, {}, None, 256),
        ({"val_batch_size": 4096}, {}, 900, 225),
        ({"val_batch_size": 4096}, {}, 0, 0),
        ({"val_batch_size": 4096}, {"limit_val_batches": 0}, None, 0),
    ],
)
def test_the_validation_batch_is_that_of_the_settings_and_no_larger_than_the_data(
    dataset, trainer, rows, expected
):
    chosen = {f"dataset.{name}": value for name, value in dataset.items()}
    chosen |= {f"trainer.{name}": value for name, value in trainer.items()}
    more = ["engine.payload=bf16", "engine.look_ahead=3", "topology.reserve_bytes=0"]
    said = [f"{name}={'null' if value is None else value}" for name, value in chosen.items()]
    settings = recipe("train", [*more, *said])
    problem = problem_of_run(settings, PlanningProblem([], Topology(4)), val_rows=rows)
    assert problem.payload_bytes == 2
    assert (problem.batch_per_rank, problem.val_batch_per_rank, problem.look_ahead) == (
        256,
        expected,
        3,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("val_batch", "extra"),
    [
        (1024, ["trainer.val_check_interval=7"]),
        pytest.param(256, [], marks=pytest.mark.full),
        pytest.param(1024, ["trainer.limit_val_batches=0"], marks=pytest.mark.full),
    ],
)
def test_what_was_predicted_is_what_a_run_holds(jobs, tmp_path, val_batch, extra):
    overrides = small(tmp_path / "logs", val_batch_size=val_batch)
    jobs.train(tmp_path / "run", *overrides, "+plan=mixed", "trainer.max_steps=20", *extra)
    predicted = json.loads((tmp_path / "run" / "predicted.json").read_text())["ranks"]
    measured = json.loads((tmp_path / "run" / "performance.json").read_text())["memory"]
    for ours, theirs in zip(predicted, measured, strict=True):
        assert ours["buffers"] == pytest.approx(theirs["buffers"], rel=0.1)
