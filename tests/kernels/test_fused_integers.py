"""On a GPU a few launches and a sort make the integers of all groups. They are those of the
reference, group by group. Kernels run in Triton's interpreter here.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from engine.engine_cases import batch_of, make_plan, make_tables, same_bits
from engine.test_side_stream import unordered

from recapp.benchmarks.kernel_costs import Mirror
from recapp.engine.fused_integers import FusedBatch, FusedIntegers
from recapp.engine.requests import Requests
from recapp.engine.sharded_collection import shard_bags
from recapp.engine.sharded_tables import ShardedTables
from recapp.engine.state import Member
from recapp.errors import IdError
from recapp.kernels.links import Links
from recapp.optim import rules
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING, MISSING_INT32
from recapp.tables.config import EmbeddingBagConfig, EmbeddingConfig, TableLookup, lookups_of
from recapp.transport.communicator import Comm

TESTS = Path(__file__).parents[1]
LINE = 8  # elements
FEATURES = ["a", "b", "c", "d"]
BAGS = {
    "t0": (131, 8, ["a", "b"], {}),
    "t1": (40, 16, ["b", "c"], {"id_rule": "hash"}),
    "t2": (7, 8, ["c"], {"id_rule": "clamp", "min_key": -2, "pooling": "mean"}),
    "t3": (1500, 4, ["d"], {"id_rule": "hash", "pooling": "mean"}),
    "t4": (900, 4, ["d", "c"], {"id_rule": "drop", "min_key": 3}),
}


def tables(plan="table_wise", row_order="natural", rule=None, comm=None, mode="unique"):
    bags = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=f, **more)
        for n, (rows, dim, f, more) in BAGS.items()
    ]
    places = TableLookup(bags[-1], "b", "places", "concat", 2, truncates=True)
    sequences = [EmbeddingConfig(90, 8, "s0", feature_names=["d", "a"], id_rule="clamp")]
    comm = comm or Comm()
    both = [*bags, *sequences]
    cut = make_plan(plan, both, comm.world, mode=mode, row_order=row_order, column_width=4)
    for name in ("t1", "t4", "s0") if mode == "pooled" else ():  # not for sums, or in both modes
        cut.tables[name] = replace(cut.tables[name], mode="unique")
    members = [Member((*lookups_of(bags), places)), Member(lookups_of(sequences))]
    return ShardedTables(
        both, cut, comm, rule or rules.sgd(), 1, "triton", None, True, None, members
    )


def batch(samples, seed, most=3, weighted=False, ids_dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(FEATURES), samples), generator=generator)
    total = int(lengths.sum())
    ids = torch.randint(-50, 4000, (total,), generator=generator)
    per_F = lengths.sum(1).tolist()
    ids[: per_F[0] + per_F[1]] %= 131  # the table of `a` and `b` has the rule `error`
    if total:
        missing = MISSING if ids_dtype is torch.int64 else MISSING_INT32
        ids[torch.randint(0, total, (3,), generator=generator)] = missing
        ids[-1] = torch.iinfo(ids_dtype).max
    ids = ids.to(ids_dtype)
    weights = torch.rand(total, generator=generator) if weighted else None
    return KeyedJaggedTensor(FEATURES, ids, weights, lengths.flatten())


def links_of(shared, features, own):
    with torch.enable_grad():
        requests = Requests(features, shared.state, None, own)
    requests.finish()
    requests.group()
    return requests


def assert_same_links(mine, known):
    bags = mine.bags if mine.used is None else int(mine.used)
    assert bags == known.bags
    if mine.offsets_M1 is not None and bags:
        assert torch.equal(mine.offsets_M1[: bags + 1], known.offsets_M1)
        assert max(known.offsets_M1.diff().tolist(), default=0) <= mine.longest
    entries = len(known.index_N)  # mine may have room for more
    assert mine.offsets_M1 is not None or mine.used is not None or len(mine.index_N) == entries
    assert torch.equal(mine.index_N[:entries].long(), known.index_N.long())
    assert (mine.weights_N is None) == (known.weights_N is None) or not entries
    assert known.weights_N is None or torch.equal(mine.weights_N[:entries], known.weights_N)
    assert (mine.at_M is None) == (known.at_M is None)
    assert mine.at_M is None or torch.equal(mine.at_M[:bags].long(), known.at_M.long())


def assert_same_integers(linked, reference):
    for mine, known in zip(linked.asked, reference.asked, strict=True):
        assert_same_links(mine.combine_links, known.combine_links)
        assert_same_links(mine.gradient_links, known.gradient_links)
    for mine, known in zip(linked.served, reference.served, strict=True):
        assert torch.equal(mine.row_U[: len(known.row_U)].long(), known.row_U.long())
        assert_same_links(mine.gradient_links, known.gradient_links)
        if len(linked.headers_W) > 1:
            assert_same_links(mine.answer_links, known.answer_links)
    for mine, known in zip(linked.row_gradients_G, reference.row_gradients_G, strict=True):
        assert (mine.pieces is None) == (known.pieces is None)
        if mine.pieces is not None:
            assert len(mine.row_U) == len(known.row_U) == mine.links.bags
            assert mine.pieces.rows_K.tolist() == known.pieces.rows_K.tolist()
            assert torch.equal(mine.pieces.piece_U, known.pieces.piece_U)
            assert torch.equal(mine.pieces.nth_U, known.pieces.nth_U)


@pytest.mark.parametrize(
    ("world", "samples", "most", "weighted", "plan", "order"),
    [
        (1, 5, 3, False, "table_wise", "natural"),
        (1, 100, 6, True, "table_wise", "mixed"),
        (2, 20, 3, True, "mixed", "mixed"),
        pytest.param(2, 80, 4, False, "random", "natural", marks=pytest.mark.full),
        pytest.param(2, 40, 4, False, "column_wise", "natural", marks=pytest.mark.full),
        pytest.param(2, 40, 4, True, "data_parallel", "natural", marks=pytest.mark.full),
        pytest.param(2, 0, 0, False, "row_wise", "natural", marks=pytest.mark.full),
        pytest.param(1, 40, 1, False, "column_wise", "natural", marks=pytest.mark.full),
        pytest.param(1, 2, 0, True, "row_wise", "natural", marks=pytest.mark.full),
        (1, 0, 0, False, "table_wise", "natural"),
    ],
)
def test_the_integers_of_all_groups_are_those_of_the_reference(
    interpreted, ranks, world, samples, most, weighted, plan, order
):
    if world == 1:
        compare(Comm(), samples, most, weighted, plan, order)
    else:
        ranks.run(compare, world, samples, most, weighted, plan, order)


def compare(comm, samples, most, weighted, plan, order, mode="unique"):
    shared = tables(plan, order, rules.rowwise_adagrad(), comm, mode)
    assert FusedIntegers.takes(shared.state)
    fused = FusedIntegers(shared.state)
    changed = shared.state.id_rules.changed
    for seed in range(2):  # the second batch finds the memory of the first
        ids_dtype = (torch.int64, torch.int32)[seed]
        features = batch(samples, seed + 2 * comm.rank, most, weighted, ids_dtype)
        if weighted and seed:
            features.weights().requires_grad_()
        linked = links_of(shared, features, fused)
        once = dict(changed)
        changed.update(dict.fromkeys(once, 0))
        reference = links_of(shared, features, None)
        assert isinstance(linked.integers, FusedBatch)
        assert changed == once and (samples < 40 or min(changed["t2"], changed["t4"]) > 0)
        changed.update(dict.fromkeys(once, 0))
        assert_same_integers(linked, reference)
        linked.release()
        reference.release()


@pytest.mark.parametrize(
    ("world", "samples", "most", "weighted", "plan", "order"),
    [
        (2, 20, 3, True, "mixed", "mixed"),
        pytest.param(2, 80, 4, False, "random", "natural", marks=pytest.mark.full),
        pytest.param(2, 40, 4, False, "column_wise", "natural", marks=pytest.mark.full),
        pytest.param(2, 40, 1, True, "row_wise", "natural", marks=pytest.mark.full),
        pytest.param(2, 0, 0, False, "row_wise", "natural", marks=pytest.mark.full),
        pytest.param(4, 30, 3, True, "row_wise", "mixed", marks=pytest.mark.full),
        pytest.param(4, 30, 3, False, "table_wise", "natural", marks=pytest.mark.full),
    ],
)
def test_owners_sum_bags_as_in_the_reference(
    interpreted, ranks, world, samples, most, weighted, plan, order
):
    ranks.run(compare, world, samples, most, weighted, plan, order, "pooled")


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_bags_of_single_ids_are_found_once(interpreted, ranks, world):
    if world == 1:
        compare_single(Comm())
    else:
        ranks.run(compare_single, world)


def compare_single(comm):
    names = ["t1", "t2", "t3"]  # their features are not in the order of a batch
    bags = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=f, **more)
        for n, (rows, dim, f, more) in BAGS.items()
        if n in names
    ]
    sequences = [EmbeddingConfig(90, 8, "s0", feature_names=["d", "a"], id_rule="clamp")]
    both = [*bags, *sequences]
    cut = make_plan("mixed" if comm.world > 1 else "table_wise", both, comm.world)
    members = [Member(lookups_of(bags)), Member(lookups_of(sequences))]
    shared = ShardedTables(both, cut, comm, rules.sgd(), 1, "triton", None, True, None, members)
    fused = FusedIntegers(shared.state)
    one = torch.ones(1, dtype=torch.int64)
    odd = torch.tensor([2, 0])  # as many ids as bags, too
    found = fused.kernels.bags_of
    with mock.patch.object(fused.kernels, "bags_of", side_effect=found) as calls:
        for seed, (samples, lengths) in enumerate(
            [(8, one), (8, odd), (8, one), (6, one), (8, one)]
        ):
            count = len(FEATURES) * samples
            drawn = torch.Generator().manual_seed(seed + 9 * comm.rank)
            ids = torch.randint(-50, 4000, (count,), generator=drawn)
            lengths = lengths.expand(count) if lengths is one else lengths.repeat(count // 2)
            features = KeyedJaggedTensor(FEATURES, ids, lengths=lengths)
            linked = links_of(shared, features, fused)
            assert_same_integers(linked, links_of(shared, features, None))
            linked.release()
    assert calls.call_count == 3  # the first, bags of other sizes, fewer samples


@pytest.mark.full
def test_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_integers"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {
        *(
            "ask",
            "bags",
            "count_heads",
            "find",
            "keep",
            "link",
            "mark",
            "place",
            "plan",
            "rows least",
            "serve",
            "write_heads",
        ),
    }


def test_an_id_outside_of_its_table_is_named(interpreted):
    shared = tables()
    features = batch(20, 1)
    features.values()[7] = 131
    features.values()[9] = -3
    with pytest.raises(IdError, match=r"table t0: .*feature a has the id 131, which is outside"):
        links_of(shared, features, FusedIntegers(shared.state))


def test_a_step_whose_sizes_the_host_reads_is_not_recorded_as_a_whole(interpreted):
    assert tables().needs_host()


@pytest.mark.parametrize(
    ("world", "learns"), [(1, True), pytest.param(2, False, marks=pytest.mark.full)]
)
def test_streams_touch_no_memory_unordered(interpreted, ranks, world, learns):
    kind = "mixed" if world > 1 else "table_wise"
    arguments = kind, 1, None, "unique", True, "triton", learns
    found = ranks.run(unordered, 2, *arguments) if world > 1 else [unordered(Comm(), *arguments)]
    assert found == [([], [])] * world


def trained(shared, weighted):
    """Train a few steps, and return the outputs and the rows with their state."""
    outputs = []
    for step in range(2):
        features = batch(30, step, weighted=weighted)
        if weighted:
            features.weights().requires_grad_()
        vectors = [v for member in range(2) for v in shared(features, member)[0]]
        sum((v * v).sum() for v in vectors).backward()
        outputs += [v.detach() for v in vectors]
        if weighted:
            outputs.append(features.weights().grad)
    shared.update.complete()
    with torch.no_grad():
        outputs += [v for member in range(2) for v in shared(batch(9, 5), member)[0]]
    return outputs + [b.data.clone() for store in shared.stores for b in store.blocks()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "weighted"),
    [
        (rules.rowwise_adagrad(0.5), True),
        (rules.adam(0.1), False),
        (rules.adam(0.1, l2_all_rows=0.1), False),
        (rules.lamb(0.1), True),
    ],
    ids=["rowwise_adagrad", "adam", "l2_all_rows", "lamb"],
)
def test_training_has_the_bits_of_groups_that_are_routed_one_by_one(
    interpreted, monkeypatch, rule, weighted
):
    at_once = trained(tables(rule=rule), weighted)
    monkeypatch.setattr(FusedIntegers, "takes", lambda state: False)
    one_by_one = trained(tables(rule=rule), weighted)
    assert all(map(same_bits, at_once, one_by_one)) and len(at_once) == len(one_by_one)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
@pytest.mark.parametrize("dims", [(16, 32, 16), (16, 8, 16)])
def test_offsets_are_multiples_of_a_line_where_the_engine_says_so(
    interpreted, monkeypatch, kind, dims
):
    comm = Comm() if kind == "table_wise" else Mirror(torch.device("cpu"))
    configs = make_tables(rows=(20, 30, 8), dims=dims)
    plan = make_plan(kind, configs, comm.world, mode="unique")
    collection = shard_bags(configs, plan, comm, rules.sgd(), backend="triton")
    backend = collection.shared.state.backend
    remainders = []

    def watch(name, reads_offsets):
        kernel = getattr(backend, name)

        def watched(*arguments, **more):
            if reads_offsets(arguments):
                (links,) = (x for x in arguments if isinstance(x, Links))
                remainders.extend((links.exact().index_N % LINE).tolist())
            kernel(*arguments, **more)

        monkeypatch.setattr(backend, name, watched)

    watch("pool", lambda arguments: arguments[1] == 1)  # the stride: others read rows of a store
    watch("update", lambda arguments: True)
    collection(batch_of(configs, 6, 1)).values().sum().backward()
    assert backend.in_lines == (8 not in dims)
    assert remainders and not (backend.in_lines and any(remainders))
