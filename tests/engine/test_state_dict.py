"""Tables in state dicts: saved as what a rank holds, gathered whole, loaded from either, never left
out in silence."""

import io

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables, whole_tensors
from torch import nn

from recapp.engine import sharded_state
from recapp.engine.sharded_collection import shard_model, sharded_collections, without_tables
from recapp.engine.sharded_state import TableStrips, gathered_state_dict
from recapp.optim.rules import rowwise_adagrad, sgd
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.communicator import Comm

pytestmark = pytest.mark.usefixtures("reference_kernels")
META = torch.device("meta")
CASES = [
    (1, "mixed"),
    (2, "random"),
    (4, "mixed"),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in ((2, "row_wise"), (4, "row_wise"), (4, "column_wise"), (4, "data_parallel"))
    ),
]


def parallel(comm, kind, seed=3, tables=None):
    tables = tables or make_tables()
    head = Head(EmbeddingBagCollection(tables=tables, device=META, seed=seed))
    plan = make_plan(kind, tables, comm.world)
    sharder = EmbeddingBagCollectionSharder(rowwise_adagrad(0.5))
    return DistributedModelParallel(head, comm.group, plan=plan, sharders=[sharder])


def trained(comm, kind):
    """A model with a step behind it: its tables are nobody's start values."""
    model = parallel(comm, kind)
    model(batch_of(make_tables(), 6, comm.rank)).sum().backward()
    return model


def unsharded():
    return Head(EmbeddingBagCollection(tables=make_tables(), seed=99))


def predictions(model):
    with torch.no_grad():
        return model(batch_of(make_tables(), 16, 77))


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def saved_and_loaded(comm, kind):
    model = trained(comm, kind)
    other = parallel(comm, kind, seed=8)
    assert list(model.state_dict()) == list(unsharded().state_dict())
    assert not torch.equal(predictions(model), predictions(other))
    assert (
        str(other.load_state_dict(through_a_file(model.state_dict())))
        == "<All keys matched successfully>"
    )
    model.load_state_dict(model.state_dict())
    return torch.equal(predictions(model), predictions(other))


@pytest.mark.parametrize(("world", "kind"), CASES)
def test_a_state_dict_has_the_unsharded_names_and_gives_the_same_predictions_once_loaded(
    ranks, world, kind
):
    assert ranks.run(saved_and_loaded, world, kind) == [True] * world


def strips(comm, kind):
    """Where what this rank holds of each table lies, and whether it is where the blocks are."""
    model = trained(comm, kind)
    (collection,) = sharded_collections(model)
    whole = whole_tensors(comm, collection)
    told = {}
    for t in make_tables():
        held = model.state_dict()[f"collection.embedding_bags.{t.name}.weight"]
        told[t.name] = [(rows, cols) for rows, cols, _ in held]
        assert all(
            torch.equal(data, whole[t.name, "weight"][slice(*rows), slice(*cols)])
            for rows, cols, data in held
        )
    return told


def test_a_table_is_the_strips_that_a_rank_holds(ranks):
    told = ranks.run(strips, 4, "row_wise")
    assert [of_rank["t0"] for of_rank in told] == [
        [((33 * r, min(33 * r + 33, 131)), (0, 16))] for r in range(4)
    ]
    told = ranks.run(strips, 2, "column_wise")  # strips of at most 5 columns: a rank has several
    assert sorted(strip for of_rank in told for strip in of_rank["t0"]) == [
        ((0, 131), (c, min(c + 5, 16))) for c in (0, 5, 10, 15)
    ]
    assert max(len(of_rank["t0"]) for of_rank in told) > 1
    told = ranks.run(strips, 2, "data_parallel")
    assert [of_rank["t2"] for of_rank in told] == [[((0, 7), (0, 12))]] * 2
    told = ranks.run(strips, 2, "table_wise")
    assert sorted(of_rank["t2"] for of_rank in told) == [[], [((0, 7), (0, 12))]]


def gathered(comm, kind, other_kind, part_bytes):
    sharded_state.PART_BYTES = part_bytes
    model = trained(comm, kind)
    sizes = []
    swap = model.comm.swap
    model.comm.swap = lambda buffer, *spans: sizes.append(buffer.nbytes) or swap(buffer, *spans)
    state = gathered_state_dict(model)
    model.comm.swap = swap
    assert max(sizes, default=0) <= max(part_bytes, 4 * 16)  # a row at least
    if comm.rank:
        assert state == {}
    else:
        alone = unsharded()
        assert list(state) == list(alone.state_dict())
        assert str(alone.load_state_dict(state)) == "<All keys matched successfully>"
        torch.testing.assert_close(
            predictions(alone), predictions_of_rank_0(model, comm), rtol=1e-5, atol=1e-6
        )
    if comm.rank:
        predictions_of_rank_0(model, comm)
    state = comm.broadcast(state)
    other = parallel(comm, other_kind, seed=8)
    other.load_state_dict(state)
    return torch.equal(predictions(model), predictions(other)), len(sizes)


def predictions_of_rank_0(model, comm):
    """Every rank has to take part in a lookup."""
    return predictions(model)


@pytest.mark.parametrize(("world", "kind"), CASES)
def test_gathered_tables_load_into_the_unsharded_model_and_under_any_plan(ranks, world, kind):
    told = ranks.run(gathered, world, kind, "random", 640)
    assert [same for same, _ in told] == [True] * world
    assert world == 1 or kind == "data_parallel" or sum(messages for _, messages in told) > 2


def test_gathered_replicas_are_not_sent(ranks):
    assert [
        messages for _, messages in ranks.run(gathered, 2, "data_parallel", "row_wise", 640)
    ] == [0, 0]


def strips_of_another_plan(comm):
    model = trained(comm, "row_wise")
    other = parallel(comm, "column_wise", seed=8)
    with pytest.raises(RuntimeError) as refused:
        other.load_state_dict(model.state_dict())
    held = [
        name
        for name, value in other.state_dict().items()
        if isinstance(value, TableStrips) and value.strips
    ]
    assert len(str(refused.value).splitlines()) == 1 + len(
        held
    )  # a line for each table that lies here
    told = (
        "(collection.embedding_bags.t0.weight): the stored strips do not cover rows 0 to 131, "
        "columns "
    )
    assert told in str(
        refused.value
    ) and "load the state of the same plan and rank, or whole tables" in str(refused.value)
    states = comm.all_gather(
        through_a_file(model.state_dict())
    )  # of all ranks together they cover everything
    merged = {
        name: [strip for s in states for strip in s[name]["strips"]] if name in held else value
        for name, value in states[0].items()
    }
    other.load_state_dict(merged)
    return torch.equal(predictions(other), predictions(model))


def test_strips_of_another_plan_are_refused_unless_they_cover_what_the_rank_holds(ranks):
    assert ranks.run(strips_of_another_plan, 2) == [True, True]


def lacking(comm):
    model = parallel(comm, "mixed")
    dense = {
        name: value
        for name, value in model.state_dict().items()
        if not isinstance(value, TableStrips)
    }
    with pytest.raises(
        RuntimeError,
        match=r"Missing key\(s\) in state_dict: \"collection.embedding_bags.t0.weight\"",
    ):
        model.load_state_dict(dense)
    found = model.load_state_dict(dense, strict=False)
    return found.missing_keys, found.unexpected_keys


def test_a_state_without_tables_is_refused(ranks):
    names = [f"collection.embedding_bags.t{k}.weight" for k in range(3)]
    assert ranks.run(lacking, 2) == [(names, [])] * 2


def alone():
    model = Head(EmbeddingBagCollection(tables=make_tables(), device=META, seed=4))
    shard_model(model, make_plan("table_wise", make_tables(), 1), Comm(), sgd(0.1))
    return model


T0 = "collection.embedding_bags.t0.weight"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(130, 16), "a tensor of shape (130, 16) is stored, the table is (131, 16)"),
        (
            torch.zeros(131, 16, dtype=torch.float64),
            "torch.float64 is stored, the table is torch.float32",
        ),
        (
            torch.zeros(131, 16, device="meta"),
            "a tensor on the meta device is stored, which has no values",
        ),
        (
            {"shape": (140, 16), "strips": [((0, 131), (0, 16), torch.zeros(131, 16))]},
            "a tensor of shape (140, 16) is stored, the table is (131, 16)",
        ),
        ({}, "a dict is stored, neither a whole tensor nor a list of (rows, cols, tensor)"),
        ("x", "a str is stored, neither a whole tensor nor a list of (rows, cols, tensor)"),
        (
            [],
            "the stored strips do not cover rows 0 to 131, columns 0 to 16, which are on this rank",
        ),
        (
            [torch.zeros(131, 16)],
            "entry 0 is no (rows, cols, tensor) of a table of shape (131, 16)",
        ),
        ([((0, 131), (0, 16), torch.zeros(131, 15))], "entry 0 is no (rows, cols, tensor)"),
        ([((0, 131), (1, 17), torch.zeros(131, 16))], "entry 0 is no (rows, cols, tensor)"),
        (
            [((0, 131), (0, 15), torch.zeros(131, 15))],
            "the stored strips do not cover rows 0 to 131, columns 0 to 16",
        ),
        (
            [((0, 99), (0, 16), torch.zeros(99, 16))] * 2,
            "the stored strips do not cover rows 0 to 131",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_named_in_one_line_and_left_as_it_was(value, told):
    model = alone()
    before = model.state_dict()[T0][0][2].clone()
    with pytest.raises(RuntimeError) as refused:
        model.load_state_dict(model.state_dict() | {T0: value})
    _, line = str(refused.value).splitlines()
    assert line.strip().startswith(f"table t0 ({T0}): ") and told in line
    assert torch.equal(before, model.state_dict()[T0][0][2])


def test_overlapping_strips_that_cover_a_table_load():
    model = alone()
    whole = torch.randn(131, 16)
    parts = [((0, 80), (0, 16)), ((60, 131), (0, 9)), ((70, 131), (8, 16))]
    cut = [(rows, cols, whole[slice(*rows), slice(*cols)]) for rows, cols in parts]
    model.load_state_dict(model.state_dict() | {T0: cut})
    assert torch.equal(model.state_dict()[T0][0][2], whole)


def test_unknown_names_below_a_collection_are_unexpected():
    model = alone()
    with pytest.raises(
        RuntimeError,
        match=r"Unexpected key\(s\) in state_dict: \"collection.embedding_bags.t9.weight\"",
    ):
        model.load_state_dict(
            model.state_dict() | {"collection.embedding_bags.t9.weight": torch.zeros(1)}
        )


def nested(comm):
    """A module around the parallel model, and a collection in two places: state dicts go through
    any module."""
    model, other = (
        nn.ModuleDict({"a": parallel(comm, "mixed", seed), "b": nn.Linear(2, 2)}) for seed in (3, 8)
    )
    names = list(nn.ModuleDict({"a": unsharded(), "b": nn.Linear(2, 2)}).state_dict())
    assert list(model.state_dict()) == names and list(gathered_state_dict(model)) == (
        [] if comm.rank else names
    )
    other.load_state_dict(through_a_file(model.state_dict()))
    with pytest.raises(RuntimeError, match="Missing"):
        other.load_state_dict({})
    return torch.equal(predictions(model["a"]), predictions(other["a"]))


def test_a_module_around_the_parallel_model_saves_and_loads_it(ranks):
    assert ranks.run(nested, 2) == [True, True]


def test_a_collection_in_two_places_and_a_table_with_a_dot_keep_their_names():
    tables = [
        EmbeddingBagConfig(name="user.id", num_embeddings=5, embedding_dim=4, feature_names=["u"])
    ]

    def make(device):
        model = nn.Module()
        model.first = EmbeddingBagCollection(tables, device=device, seed=2)
        model.again = model.first
        return model

    model = make(META)
    plain = make(None)
    shard_model(model, make_plan("table_wise", tables, 1), Comm(), sgd(0.1))
    assert (
        list(model.state_dict())
        == list(plain.state_dict())
        == [f"{p}.embedding_bags.user/id.weight" for p in ("first", "again")]
    )
    assert all(
        torch.equal(whole, plain.state_dict()[name])
        for name, whole in gathered_state_dict(model).items()
    )
    model.load_state_dict(plain.state_dict())


def test_state_is_dense_only_where_tables_are_stored_elsewhere():
    model = alone()
    with without_tables(sharded_collections(model)):
        dense = model.state_dict()
        assert [name for name in dense if "collection" in name] == [] and len(dense) == 4
        assert str(model.load_state_dict(dense)) == "<All keys matched successfully>"
    with pytest.raises(RuntimeError, match="Missing"):
        model.load_state_dict(dense)
