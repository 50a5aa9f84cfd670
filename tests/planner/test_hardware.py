"""Hardware files: what they mean, that shipped ones load, and what is said of wrong ones."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import yaml
from engine.test_step_budget import BARS

from recapp.errors import ConfigError
from recapp.optim.rules import rowwise_adagrad
from recapp.planner.cost import _calls
from recapp.planner.hardware import (
    DEFAULTS,
    KERNELS,
    Link,
    Work,
    default_hardware,
    hardware_from,
    read_hardware,
    read_machine,
    shipped_machines,
    write_hardware,
)
from recapp.planner.problem import PlanningProblem, Topology
from recapp.settings.records import to_plain
from recapp.tables.config import EmbeddingBagConfig, TableLookup

MACHINES = ["cpu_2core", "dgx1_v100", "dgx_a100", "dgx_h100", "dgx_h100_x2"]


def test_work_is_calls_and_items_and_bytes():
    work = Work(call_us=10, item_ns=2, gb_per_s=4)
    assert work.seconds(3, 1000, 8e9) == pytest.approx(30e-6 + 2e-6 + 2)
    assert work.seconds(
        np.array([0, 1]), np.array([1e9, 0]), np.array([0, 4e9])
    ).tolist() == pytest.approx([2, 1 + 1e-5])


def test_what_stands_around_calls_counts_once_a_step():
    work = Work(call_us=10, item_ns=1, step_us=5)
    assert work.seconds(3, 0) == pytest.approx(35e-6) and work.seconds(0, 1000) == pytest.approx(
        1e-6
    )
    assert work.seconds(np.array([0, 1]), np.zeros(2)).tolist() == pytest.approx([0, 15e-6])


def test_bytes_cost_nothing_where_items_say_it_all():
    assert Work(1, 1).seconds(0, 5, 10**12) == pytest.approx(5e-9)


def test_links_are_interpolated_in_the_logarithm_of_the_ranks_and_end_flat():
    link = Link({2: 10.0, 8: 30.0}, {2: 4.0, 8: 2.0})
    assert link.seconds(2, 4e9) == pytest.approx(10e-6 + 1)
    assert link.seconds(4, 3e9) == pytest.approx(20e-6 + 1)
    assert link.seconds(64, 2e9) == link.seconds(8, 2e9) == pytest.approx(30e-6 + 1)
    assert Link({4: 10.0}, {4: 4.0}).seconds(2, 0) == pytest.approx(10e-6)


def test_a_rank_alone_sends_nothing():
    assert Link({2: 10.0}, {2: 4.0}).seconds(1, 10**9) == 0


def test_links_count_arrays_element_by_element():
    link = Link({2: 10.0}, {2: 4.0})
    assert link.seconds(np.array([1, 2]), np.array([8e9, 8e9])).tolist() == pytest.approx(
        [0, 2 + 1e-5]
    )
    assert link.seconds(2, np.array([0.0, 4e9])).tolist() == pytest.approx([1e-5, 1 + 1e-5])


def test_these_machines_are_shipped():
    assert list(shipped_machines()) == MACHINES


@pytest.mark.parametrize("name", MACHINES)
def test_every_shipped_machine_loads_and_tells_its_source(name):
    hardware = read_hardware(name)
    assert set(hardware.kernels) == set(KERNELS) and len(hardware.source) > 60
    assert ("measured on" in hardware.source) == (hardware.compute_device == "cpu")
    assert ("data sheet" in hardware.source and "Assumed" in hardware.source) == (
        hardware.compute_device == "cuda"
    )
    assert hardware.memory_bytes and read_machine(name)["ranks"] % hardware.ranks_per_host == 0


@pytest.mark.parametrize("name", MACHINES)
def test_hydra_composes_a_shipped_machine_as_it_is_read_here(name):
    from omegaconf import OmegaConf

    from recapp.cli.compose import compose

    assert OmegaConf.to_container(compose("train", [f"topology={name}"]).topology) == read_machine(
        name
    )


def test_newer_machines_are_faster():
    old, middle, new = (read_hardware(name) for name in MACHINES[1:4])
    for kernel in KERNELS:
        times = [h.kernels[kernel].seconds(1, 10**6, 10**8) for h in (old, middle, new)]
        assert times == sorted(times, reverse=True)
    for link in ("all_to_all", "all_reduce"):
        for link_kind in ("host", "network"):
            times = [getattr(h, link)[link_kind].seconds(8, 10**9) for h in (old, middle, new)]
            assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", MACHINES[1:])
def test_the_calls_of_a_gpu_cost_45_us_for_each_thing_that_is_counted(name):
    machine = read_hardware(name)
    seen = set()
    for (part, mode, ranks, groups), (launches, _, _, copies, operations, *_) in BARS.items():
        here = PlanningProblem(
            [],
            Topology(ranks, hardware=machine),
            1,
            rowwise_adagrad(),
            graphs=mode == "recorded",
        )
        seconds = sum(seconds for _, seconds in _calls(here, groups))
        if part == "model":
            seconds += here.dense_us * 1e-6
        things = launches + copies + operations
        if part == "tables" or (part == "model" and (mode == "recorded" or groups == 1)):
            assert seconds == pytest.approx(45e-6 * things)
            seen.add((part, mode, ranks, groups))
    assert len(seen) == 11


def test_only_what_can_be_recorded_is_priced_as_a_graph():
    machine = read_hardware("dgx_h100")
    table = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    graph = PlanningProblem(
        [table], Topology(1, hardware=machine), 1, rowwise_adagrad(), graphs=True
    )
    assert graph.recorded == "step" and graph.dense_us == 0
    growing = replace(table, num_embeddings="dynamic", dynamic={"max_rows": 640})
    places = TableLookup(table, "f", "places", "concat", 2)
    several = {"topology": Topology(2, hardware=machine)}
    sequence = {"lookups": [TableLookup(table, "f", "f", "none")]}
    for change in (several, {"tables": [growing], "lookups": ()}, {"lookups": [places]}):
        cut = replace(graph, **change)
        assert cut.recorded == "dense" and cut.dense_us == machine.cut_us
    for change in ({"graphs": False}, {"rule": None}, {**several, **sequence}):
        launched = replace(graph, **change)
        assert launched.recorded == "" and launched.dense_us == machine.dense_us
    counts = {"seen": 2, "eviction": "ttl", "ttl_steps": 9}
    counted = replace(table, num_embeddings="dynamic", dynamic=counts)
    for change in (sequence, {"tables": [counted], "lookups": ()}):
        assert replace(graph, **change).recorded == "step"
    on_cpu = replace(graph, topology=Topology(1))
    assert on_cpu.recorded == "" and on_cpu.dense_us == 0


@pytest.mark.parametrize("device", DEFAULTS)
def test_something_is_assumed_of_every_device(device):
    assert default_hardware(device).compute_device == device


@pytest.mark.parametrize("name", MACHINES)
def test_a_written_file_reads_the_same(name, tmp_path):
    hardware = read_hardware(name)
    write_hardware(hardware, tmp_path / "hardware.yaml")
    assert (
        read_hardware(tmp_path / "hardware.yaml")
        == read_hardware(str(tmp_path / "hardware.yaml"))
        == hardware
    )
    assert hardware_from(to_plain(hardware)) == hardware


def test_a_file_of_settings_reads_as_the_hardware_in_it(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"ranks": 2, "hardware": to_plain(read_hardware("dgx_h100"))})
    )
    assert read_hardware(tmp_path / "mine.yaml") == read_hardware("dgx_h100")


def test_numbers_may_be_written_as_people_write_them():
    plain = to_plain(read_hardware("dgx_h100"))
    plain["flops_per_s"] = "1e12"
    plain["all_to_all"]["host"]["latency_us"] = {"2": "5e0"}
    read = hardware_from(plain)
    assert read.flops_per_s == 1e12 and read.all_to_all["host"].latency_us == {2: 5.0}


def _at(plain, path, value):
    *parents, last = path.split(".")
    for parent in parents:
        plain = plain[parent]
    if value is None:
        del plain[last]
    else:
        plain[last] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("flops", 1, "flops: did you mean flops_per_s"),
        ("overlap", None, "overlap must be given"),
        ("overlap", 1.5, "overlap=1.5: must be a number of at least 0 and at most 1"),
        ("flops_per_s", 0, "flops_per_s=0: must be a number above 0"),
        ("flops_per_s", "fast", "flops_per_s=fast: must be a number above 0"),
        ("step_overhead_us", None, "step_overhead_us must be given"),
        ("graph_us", -1, "graph_us=-1: must be a number of at least 0"),
        ("step_overhead_us", -1, "step_overhead_us=-1: must be a number of at least 0"),
        ("ranks_per_host", 0, "ranks_per_host=0: must be a whole number of at least 1"),
        ("ranks_per_host", 2.5, "ranks_per_host=2.5: must be a whole number"),
        ("memory_bytes", -1, "memory_bytes=-1: must be a whole number of at least 1"),
        ("compute_device", "cud", "compute_device=cud: did you mean cuda"),
        ("kernels", 3, "kernels=3: is a mapping of names"),
        (
            "kernels.anwser",
            {"call_us": 1, "item_ns": 1},
            "unknown entry anwser; did you mean answer",
        ),
        ("kernels.update", None, "kernels: update is missing"),
        ("kernels.update.gb_per_s", None, "kernels.update: gb_per_s is missing"),
        ("kernels.update.gb_per_s", 0, "kernels.update.gb_per_s=0: must be a number above 0"),
        ("kernels.update.call_us", -3, "kernels.update.call_us=-3: must be a number of at least 0"),
        ("kernels.update.step_us", -1, "kernels.update.step_us=-1: must be a number of at least 0"),
        ("kernels.update.call_us", True, "kernels.update.call_us=true: must be a number"),
        ("kernels.update.call_us", math.nan, "kernels.update.call_us=nan: must be a number"),
        ("kernels.route.gb_per_s", 3, "kernels.route: unknown entry gb_per_s"),
        ("all_to_all.rack", {"latency_us": {2: 1}, "gb_per_s": {2: 1}}, "unknown entry rack"),
        ("all_to_all.network", None, "all_to_all: network is missing"),
        ("all_reduce.host.latency_us", {}, "latency_us is empty"),
        (
            "all_reduce.host.latency_us",
            {1: 3.0},
            "latency_us: 1: the keys must be numbers of ranks, 2 or more",
        ),
        (
            "all_reduce.host.latency_us",
            {"two": 3.0},
            "latency_us: two: the keys must be numbers of ranks",
        ),
        (
            "all_reduce.host.gb_per_s",
            {2: -1.0},
            "all_reduce.host.gb_per_s={2: -1.0}: 2: -1.0: must be a number above 0",
        ),
    ],
)
def test_a_wrong_entry_is_named_in_one_line(path, value, said, tmp_path):
    plain = deepcopy(to_plain(read_hardware("dgx_h100")))
    _at(plain, path, value)
    (tmp_path / "h.yaml").write_text(yaml.safe_dump(plain))
    with pytest.raises(ConfigError) as error:
        read_hardware(tmp_path / "h.yaml")
    assert (
        said in str(error.value)
        and str(tmp_path / "h.yaml") in str(error.value)
        and "\n" not in str(error.value)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not YAML"),
        ("", "must be a mapping with name"),
        ("- 3", "must be a mapping with name"),
    ],
)
def test_a_file_without_hardware_is_refused_in_one_line(text, said, tmp_path):
    (tmp_path / "h.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        read_hardware(tmp_path / "h.yaml")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_says_how_to_get_one(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r'no such file; `python -m recapp.plan calibrate "?path=.*h\.yaml.*` writes one',
    ):
        read_hardware(tmp_path / "h.yaml")
    with pytest.raises(ConfigError, match="topology=dgx_a100 chooses a shipped machine"):
        read_hardware(tmp_path / "dgx_a100")


def test_an_unknown_machine_has_close_matches():
    with pytest.raises(
        ConfigError, match=r"topology=dgx_h10: unknown machine; did you mean dgx_h100"
    ):
        read_hardware("dgx_h10")


def test_a_directory_that_is_not_there_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_hardware(read_hardware("dgx_h100"), tmp_path / "none" / "h.yaml")
