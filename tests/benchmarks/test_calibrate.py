"""Calibration: coefficients are fitted to times, a mirror is as good as a peer, and what is
measured becomes a hardware file.
"""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_cases import TinyModel
from jobs import recipe

from recapp.benchmarks import calibrate as calibration
from recapp.benchmarks import kernel_costs, session
from recapp.benchmarks.calibrate import (
    measure_hardware,
    measure_link,
    measured_world_sizes,
    reducer,
)
from recapp.benchmarks.kernel_costs import (
    Case,
    KernelSteps,
    KernelTime,
    Mirror,
    fit,
    fit_kernels,
    measure_kernels,
    typical,
)
from recapp.benchmarks.session import rule
from recapp.calibration import file_of
from recapp.engine.sharded_collection import shard_bags
from recapp.errors import ConfigError
from recapp.planner.hardware import KERNELS, read_hardware, write_hardware
from recapp.planner.plan_rules import plan_by_rules
from recapp.planner.planner_settings import PlanRule
from recapp.planner.problem import Topology, dense_of
from recapp.reporting.phases import PHASES
from recapp.settings.records import to_plain
from recapp.transport.communicator import Comm
from recapp.transport.join_ranks import make_comm

CPU = torch.device("cpu")
MODEL = TinyModel("small", 32, 4, (8,), (8, 1))
ROWS = (300, 7, 50)
TINY = (
    Case((4,), "row_wise", "unique", ((4, 1), (16, 3)), ROWS),
    Case((4, 8), "row_wise", "pooled", ((8, 3),), ROWS),
    Case((4,), "data_parallel", "unique", ((8, 1),), ROWS),
)


def collection_of(case, comm, shape=(16, 3)):
    tables = case.workload(*shape).tables()
    plan = plan_by_rules(tables, Topology(2), [PlanRule(case.type)], name="test", mode=case.mode)
    return shard_bags(tables, plan, comm, rule(), backend="torch")


# ---- lines through times


def test_a_line_is_found_again():
    rng = np.random.default_rng(0)
    counts = np.stack([np.ones(30), rng.uniform(1, 1e5, 30), rng.uniform(1, 1e8, 30)], 1)
    found, error = fit(counts.tolist(), (counts @ [5e-5, 2e-8, 1e-10]).tolist())
    assert found == pytest.approx([5e-5, 2e-8, 1e-10]) and error < 1e-9


def test_no_coefficient_is_negative():
    found, _ = fit([[1, 0], [1, 10], [1, 20]], [3.0, 2.0, 1.0])
    assert found[1] == 0 and 1 < found[0] < 3


def test_small_times_weigh_as_much_as_large_ones():
    (latency, rate), _ = fit([[1, 0], [1, 1e9]], [1e-5, 1.3])
    assert latency == pytest.approx(1e-5) and rate == pytest.approx(1.3e-9, rel=1e-3)


def test_twice_as_long_is_as_bad_as_half_as_long():
    (found,), error = fit([[1]] * 2, [1.0, 4.0])
    assert found == pytest.approx(2.0) and error == pytest.approx(0.75)


def test_what_was_never_counted_costs_nothing():
    assert fit([[1, 0], [2, 0]], [1.0, 2.0])[0] == pytest.approx([1.0, 0.0])


def test_disturbed_rounds_have_no_say():
    assert typical([1.0, 1.1, 9.0, 50.0, 70.0]) == pytest.approx(1.1)


def test_kernels_of_known_cost_are_read_off():
    rng = np.random.default_rng(1)

    def sample(calls, items, size, whole):
        return KernelTime(
            (4,),
            calls,
            items,
            size,
            2e-4 + 1e-4 * calls + 3e-9 * items + (0 if whole else 1e-9 * size),
        )

    timed = {
        k: [
            sample(1 + n % 2, float(rng.uniform(10, 1e5)), float(rng.uniform(10, 1e7)), i < 4)
            for n in range(20)
        ]
        for i, k in enumerate(KERNELS)
    }
    kernels, errors = fit_kernels(timed)
    for i, kernel in enumerate(KERNELS):
        work = kernels[kernel]
        assert (work.step_us, work.call_us, work.item_ns) == pytest.approx((200, 100, 3))
        assert work.gb_per_s == pytest.approx(1 if i > 3 else math.inf)
        assert errors[kernel] < 1e-9


# ---- what is counted


def _asked(comm, case):
    """Return the counts of one batch, which both ranks of a real pair ask for."""
    collection = collection_of(case, comm)
    workload = case.workload(16, 3)
    (batch,) = workload.features_of(workload.draw(0, 1))
    request = collection.shared.input_dist(batch)
    request.finish()
    counts = request.in_WG3.sum(1).tolist()
    request.release()
    return counts


@pytest.mark.full
@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.type}-{case.mode}")
def test_a_mirror_asks_as_much_as_a_peer_with_the_same_batch(case, ranks):
    one, other = ranks.run(_asked, 2, case)
    mirrored = _asked(Mirror(CPU), case)
    assert one[0] == one[1] and other[0] == other[1] and sum(one[0]) > 0
    # of its own rows what either rank asks of them, of the peer's what comes back
    assert mirrored == [one[0], other[0]]


def test_counts_are_those_of_the_batch():
    case = TINY[0]
    workload = case.workload(16, 3)
    steps = KernelSteps(collection_of(case, Mirror(CPU)), case.widths, workload, 0)
    ids = workload.ids
    bags = 16 * len(workload.rows_F)
    assert steps.counts["route"] == steps.counts["link"] == [1, ids, 0]
    assert steps.counts["combine"] == [1, ids, 4 * 4 * (ids + bags)]
    rows, read = steps.counts["answer"][1:]
    assert (
        read == pytest.approx(2 * 4 * 4 * rows)
        and steps.counts["serve"][1] == steps.counts["group"][1] == rows < 2 * ids
    )
    touched, moved = steps.counts["update"][1:]
    assert touched <= rows and moved == pytest.approx(4 * 4 * rows + 2 * touched * (4 * 4 + 4))


def test_groups_are_calls_and_replicas_are_not_answered():
    mixed = TINY[1]
    copies = TINY[2]
    assert (
        KernelSteps(
            collection_of(mixed, Mirror(CPU)), mixed.widths, mixed.workload(8, 3), 0
        ).counts["answer"][0]
        == 2
    )
    found = KernelSteps(
        collection_of(copies, Mirror(CPU)), copies.widths, copies.workload(8, 1), 0
    ).counts
    assert found["answer"] == [0, 0, 0] and found["combine"][0] == 1


def test_every_kernel_of_every_case_is_timed():
    found = measure_kernels(Comm(), CPU, "torch", cases=TINY, rounds=2, steps=2)
    assert set(found) == set(KERNELS)
    assert all(s.seconds > 0 and s.items > 0 for samples in found.values() for s in samples)
    assert len(found["route"]) == 4 and len(found["answer"]) == 3  # replicas are not answered


def test_rows_and_messages_have_left_the_caches_when_they_are_needed_again():
    case = TINY[0]
    steps = KernelSteps(collection_of(case, Mirror(CPU)), case.widths, case.workload(16, 3), 0)
    seen = []
    forward = steps.collection.shared.input_dist
    steps.collection.shared.input_dist = lambda batch, *member: (
        seen.append((batch.values().data_ptr(), float(steps.other[0]))) or forward(batch, *member)
    )
    steps.run(4)
    assert len({batch for batch, _ in seen}) == 5 and [written for _, written in seen] == [
        1,
        3,
        5,
        7,
        9,
    ]
    assert steps.other.nbytes == kernel_costs.OTHER_BYTES >= 1 << 26 and float(steps.other[-1]) == 5
    steps.run(1)
    assert len({batch for batch, _ in seen}) == kernel_costs.BATCHES


# ---- messages


@pytest.mark.parametrize(
    ("local", "world", "numbers"),
    [
        (1, 1, []),
        (2, 2, [2]),
        (4, 4, [2, 4]),
        (6, 6, [2, 4, 6]),
        (8, 32, [2, 4, 8, 16, 32]),
        (1, 4, [2, 4]),
    ],
)
def test_numbers_of_ranks_double_up_to_all(local, world, numbers):
    assert measured_world_sizes(local, world) == numbers


def _links(comm, transport):
    return [
        measure_link(kind, comm, CPU, world, transport, sizes=(64, 65536), rounds=1)
        for kind in ("all_to_all", "all_reduce")
        for world in (2, 4)
    ]


@pytest.mark.full
@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_messages_are_timed_among_the_first_ranks(ranks, transport):
    costs, *_, costs_of_last = ranks.run(_links, 4, transport)
    assert [cost.ranks for cost in costs] == [2, 4, 2, 4]
    assert [cost and cost.ranks for cost in costs_of_last] == [None, 4, None, 4]
    assert all(cost.latency_us >= 0 and 0 < cost.gb_per_s < 1e7 for cost in costs)


def _reduced(comm, transport):
    numbers = torch.tensor([comm.rank, 1.0, 2.0 * comm.rank])
    reducer(make_comm(comm.group, CPU, transport))(numbers)()
    return numbers.tolist()


@pytest.mark.parametrize(
    "transport", [pytest.param("gloo", marks=pytest.mark.full), "shared_memory"]
)
def test_what_is_timed_adds_up_as_training_does_it(ranks, transport):
    assert ranks.run(_reduced, 2, transport) == [[0.5, 1.0, 1.0]] * 2


# ---- the whole


def _whole(comm):
    hardware, rows = measure_hardware(
        comm, CPU, "gloo", "torch", rounds=1, cases=TINY, sizes=(64, 65536), model=MODEL
    )
    return hardware, [row["name"] for row in rows]


@pytest.mark.full
def test_ranks_find_the_same_hardware(ranks):
    of_ranks = ranks.run(_whole, 4)
    hardware, names = of_ranks[0]
    assert all(found == (hardware, names) for found in of_ranks)
    assert hardware.ranks_per_host == 4 and sorted(hardware.all_to_all["host"].gb_per_s) == [2, 4]
    assert "measured on" in hardware.source and "between hosts were not measured" in hardware.source
    assert {
        *KERNELS,
        "copy",
        "dense part",
        "overlap",
        "all_to_all, 4 ranks",
        "all_reduce, 2 ranks",
    } <= set(names)


def test_a_steps_overhead_is_what_a_run_takes_beside_what_its_file_explains(tmp_path):
    path = tmp_path / "mine.yaml"
    source = f"measured on a day{calibration._assumed_overhead('cpu')}"
    write_hardware(
        replace(read_hardware("cpu_2core"), source=source, step_overhead_us=1000.0), path
    )
    phases = dict.fromkeys(PHASES, 0.0)
    measured = SimpleNamespace(
        steps=9, batch_per_rank=64, mean_phases=lambda: phases | {"dense": 8.0}
    )
    row = calibration.with_overhead(path, measured, SimpleNamespace(mean_ms=lambda phase: 5.5))
    hardware = read_hardware(path)
    assert hardware.step_overhead_us == row["us"] == 3500.0 and row["name"] == "step overhead"
    assert (
        "9 steps of recapp.train on 64 samples" in hardware.source
        and "assumed" not in hardware.source
    )
    calibration.with_overhead(path, measured, SimpleNamespace(mean_ms=lambda phase: 50.0))
    assert read_hardware(path).step_overhead_us == 0.0


def test_the_rate_of_the_dense_part_is_that_of_further_samples():
    dense = dense_of(calibration._dlrm(MODEL, 1, CPU))
    flops = dense.flops
    moving = 3 * dense.vector_bytes * 24 / 1e9
    assert calibration._flops_per_s(MODEL, 1.0, 1.5, 1e9) == pytest.approx(flops * 24 / 0.5)
    assert calibration._flops_per_s(MODEL, 0.0, 1000 * moving, 1.0) == pytest.approx(
        flops * 24 / (999 * moving)
    )
    # chance: a quarter at most is not its own
    assert calibration._flops_per_s(MODEL, 1.0, 0.9, 1e9) == pytest.approx(flops * 24 / 0.225)


@pytest.fixture
def config():
    return recipe("plan", ["engine.backend=torch", "engine.keep_freed_memory=false"])


@pytest.fixture
def tiny(monkeypatch):
    """Make calibration run few small steps."""
    monkeypatch.setattr(
        calibration,
        "measure_hardware",
        lambda *a: measure_hardware(*a, cases=TINY, rounds=1, model=MODEL),
    )


def test_a_run_leaves_a_file_that_the_planner_reads_and_records(config, tiny, tmp_path):
    config = replace(config, path=str(tmp_path / "mine.yaml"))
    measure = {"command": "plan", "measure": "recapp.benchmarks.calibrate.calibrate"}
    session.run(to_plain(config) | measure, tmp_path)
    hardware = read_hardware(tmp_path / "mine.yaml")
    assert (
        "messages within a host and between hosts were not measured" in hardware.source
        and hardware.flops_per_s > 0
    )
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert [row["name"] for row in rows][: len(KERNELS)] == list(KERNELS)
    assert {"name", "us", "items_per_second", "gb_per_s", "gflop_per_s", "share", "error"} == set(
        rows[0]
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none/hardware.yaml", "cannot be written: name a file in a directory that exists"),
        (".", "is a directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    path, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        file_of(path)


@pytest.mark.parametrize(("key", "value"), [("transport", "glo"), ("backend", "nmba")])
def test_names_are_checked_before_anything_is_measured(key, value):
    with pytest.raises(ConfigError, match=f"engine.{key}={value}: .*did you mean"):
        recipe("plan", [f"engine.{key}={value}"])


def test_the_cases_of_the_product_cover_modes_and_widths():
    kinds = {(case.type, case.mode) for case in kernel_costs.CASES}
    assert kinds == {("row_wise", "unique"), ("row_wise", "pooled"), ("data_parallel", "unique")}
    assert {w for case in kernel_costs.CASES for w in case.widths} == set(kernel_costs.WIDTHS)
