"""Hosts are ranks in equal blocks."""

import pytest

from recapp.errors import ConfigError
from recapp.planner.topology import Topology, hosts_in_blocks


@pytest.mark.parametrize(("hosts", "count"), [("a", 1), ("aa", 1), ("ab", 2), ("aabb", 2), ("bbaa", 2), ("aabbcc", 3),
                                              ("abab", 1), ("aaab", 1), ("aab", 1), ("abba", 1)])
def test_hosts_count_where_each_has_its_equal_block_of_ranks(hosts, count):
    assert hosts_in_blocks(list(hosts)) == count


def test_the_ranks_of_each_host_are_neighbours():
    assert Topology(4, hosts=2).host_ranks() == [[0, 1], [2, 3]]


def test_hosts_that_cannot_have_equal_shares_are_refused_with_those_that_can():
    with pytest.raises(ConfigError, match=r"topology.hosts=4: 6 ranks must spread equally; use one of \[1, 2, 3, 6\]"):
        Topology(6, hosts=4)
