"""Hosts are ranks in equal blocks."""

from dataclasses import replace

import pytest

from recapp.errors import ConfigError
from recapp.planner.hardware import default_hardware, read_hardware, read_machine, write_hardware
from recapp.planner.planner_settings import Machines
from recapp.planner.problem import Topology, hosts_in_blocks, machine, topology_of
from recapp.settings.records import record


@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        ("a", 1),
        ("aa", 1),
        ("ab", 2),
        ("aabb", 2),
        ("bbaa", 2),
        ("aabbcc", 3),
        ("abab", 1),
        ("aaab", 1),
        ("aab", 1),
        ("abba", 1),
    ],
)
def test_hosts_count_where_each_has_its_equal_block_of_ranks(hosts, count):
    assert hosts_in_blocks(list(hosts)) == count


def test_the_ranks_of_each_host_are_neighbours():
    assert Topology(4, hosts=2).host_ranks() == [[0, 1], [2, 3]]


def test_hosts_that_cannot_have_equal_shares_are_refused_with_those_that_can():
    with pytest.raises(
        ConfigError,
        match=r"topology.hosts=4: 6 ranks must spread equally; use one of \[1, 2, 3, 6\]",
    ):
        Topology(6, hosts=4)


def test_hosts_may_be_given_by_their_ranks():
    topology = Topology(world_size=16, local_world_size=8, compute_device="cuda")
    assert topology.hosts == 2 and topology.ranks_per_host == 8 and topology.host_ranks()[1][0] == 8
    assert Topology(8).ranks_per_host == 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"world_size": 6, "local_world_size": 4},
            "local_world_size=4: 6 ranks must spread equally over the hosts, so many on each",
        ),
        (
            {"world_size": 8, "local_world_size": 2, "hosts": 2},
            "local_world_size=2: 8 ranks must spread equally over .* of which there are 2",
        ),
        ({"world_size": 8, "compute_device": "gpu"}, "compute_device=gpu"),
        ({"world_size": 2, "memory_bytes": [1]}, "memory_bytes has 1 numbers for 2 ranks"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Topology(**arguments)


def test_a_topology_without_hardware_costs_what_is_assumed_of_its_device():
    assert Topology(2).costs == default_hardware("cpu")
    assert Topology(8, compute_device="cuda").costs == default_hardware("cuda")
    assert (
        Topology(2, hardware=read_hardware("dgx_h100")).costs.name == read_hardware("dgx_h100").name
    )


@pytest.mark.parametrize(
    ("name", "ranks", "hosts"),
    [("dgx_h100", None, 1), ("dgx_h100_x2", None, 2), ("dgx_h100", 32, 4), ("dgx_h100", 4, 1)],
)
def test_a_shipped_machine_has_memory_hosts_and_hardware(name, ranks, hosts):
    topology = machine(name, ranks)
    assert (
        topology.hosts == hosts
        and topology.compute_device == "cuda"
        and topology.costs == read_hardware(name)
    )
    assert (
        topology.memory_bytes == [80_000_000_000] * topology.world_size
        and topology.reserve_bytes == 128 << 20
    )


def test_ranks_that_leave_a_host_half_empty_are_refused():
    with pytest.raises(ConfigError, match="12 ranks do not fill hosts of 8 ranks"):
        machine("dgx_h100", 12)


def test_settings_say_more_than_the_machine():
    settings = read_machine("dgx_h100") | {"hosts": 4, "memory_bytes": 7, "reserve_bytes": 1}
    topology = topology_of(record(Machines, settings), 2)
    assert (topology.world_size, topology.hosts, topology.memory_bytes, topology.reserve_bytes) == (
        8,
        4,
        [7] * 8,
        1,
    )


def test_ranks_are_the_trainers_where_the_settings_name_none(tmp_path):
    write_hardware(read_hardware("dgx_a100"), tmp_path / "h.yaml")
    settings = Machines(reserve_bytes=5)
    assert topology_of(settings, 8, "cuda") == Topology(8, 1, "cuda", None, 5)
    found = topology_of(replace(settings, hardware=str(tmp_path / "h.yaml")), 8)
    assert (
        found.compute_device == "cuda"
        and found.hardware == read_hardware("dgx_a100")
        and found.world_size == 8
    )


def test_an_unknown_machine_has_close_matches():
    with pytest.raises(ConfigError, match="did you mean dgx_a100"):
        machine("dgx_a10")
