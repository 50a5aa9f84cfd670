"""What a state dict holds of a table answers as ShardedTensor does in memory, and is plain in a
file."""

import copy
import io
import pickletools
import zipfile
from collections import OrderedDict

import pytest
import torch
from engine.engine_cases import Head, batch_of, make_plan, make_tables
from lightning.fabric.utilities.apply_func import apply_to_collection

from recapp.engine.sharded_state import TableStrips, gathered_state_dict
from recapp.errors import ConfigError
from recapp.optim.rules import rowwise_adagrad
from recapp.parallel import DistributedModelParallel, EmbeddingBagCollectionSharder
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig
from recapp.transport.communicator import Comm

pytestmark = pytest.mark.usefixtures("reference_kernels")


def parallel(comm, kind, tables=None, seed=3, **options):
    tables = tables or make_tables()
    head = Head(EmbeddingBagCollection(tables=tables, device="meta", seed=seed))
    plan = make_plan(kind, tables, comm.world, **options)
    sharder = EmbeddingBagCollectionSharder(rowwise_adagrad(0.5))
    return DistributedModelParallel(head, comm.group, plan=plan, sharders=[sharder])


def entries(model):
    state = model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, TableStrips)}


def file_of(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file


def filled(comm, kind):
    """Fill every shard from whole tables by its metadata, as a TorchRec program does."""
    model = parallel(comm, kind)
    whole = {}
    for name, entry in model.state_dict().items():
        if not isinstance(entry, TableStrips):
            continue
        rows, columns = entry.metadata().size
        whole[name] = torch.arange(rows * columns).view(rows, columns) / 7
        for shard in entry.local_shards():
            first = shard.metadata.shard_offsets
            size = shard.metadata.shard_sizes
            part = whole[name][first[0] : first[0] + size[0], first[1] : first[1] + size[1]]
            shard.tensor.copy_(part)
            assert shard.metadata.placement.rank() == comm.rank
    expected = comm.broadcast(whole)
    found = gathered_state_dict(model)
    return all(torch.equal(found[name], table) for name, table in expected.items() if found)


@pytest.mark.parametrize(
    ("world", "kind"), [(1, "mixed"), (2, "row_wise"), (2, "column_wise"), (4, "mixed")]
)
def test_shards_of_a_state_dict_are_filled_in_the_tables_themselves(ranks, world, kind):
    assert ranks.run(filled, world, kind) == [True] * world


def told_by(comm, kind):
    told = {}
    for name, entry in entries(parallel(comm, kind)).items():
        metadata = entry.metadata()
        shards = [
            (m.placement.rank(), *m.shard_offsets, *m.shard_sizes) for m in metadata.shards_metadata
        ]
        told[name] = (tuple(metadata.size), tuple(entry.size()), sorted(shards))
    return told


def test_metadata_has_the_shards_of_all_ranks(ranks):
    first, second = ranks.run(told_by, 2, "row_wise")
    assert first == second
    name = "collection.embedding_bags.t0.weight"
    assert first[name] == ((131, 16), (131, 16), [(0, 0, 0, 66, 16), (1, 66, 0, 65, 16)])
    copies, _ = ranks.run(told_by, 2, "data_parallel")
    assert copies[name][2] == [(0, 0, 0, 131, 16), (1, 0, 0, 131, 16)]


def test_a_file_has_nothing_but_what_torch_reads_itself():
    state = parallel(Comm(), "table_wise").state_dict()
    file = file_of(state)
    with zipfile.ZipFile(file) as parts:
        (name,) = [n for n in parts.namelist() if n.endswith("data.pkl")]
        named = [
            arg for code, arg, _ in pickletools.genops(parts.read(name)) if "GLOBAL" in code.name
        ]
    assert {each.split(" ")[0].split(".")[0] for each in named} == {"collections", "torch"}
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    entry = loaded["collection.embedding_bags.t0.weight"]
    assert type(entry) is OrderedDict and entry["shape"] == (131, 16)
    ((rows, cols, values),) = entry["strips"]
    assert (rows, cols) == ((0, 131), (0, 16)) and values.shape == (131, 16)


def loads_every_form(comm):
    model = parallel(comm, "column_wise")
    model(batch_of(make_tables(), 6, comm.rank)).sum().backward()
    state = model.state_dict()
    file = file_of(state)
    file.seek(0)
    forms = [
        state,
        copy.deepcopy(state),
        torch.load(file, weights_only=True),
        {k: list(v) if isinstance(v, TableStrips) else v for k, v in state.items()},
    ]
    same = []
    for form in forms:
        other = parallel(comm, "column_wise", seed=8)
        other.load_state_dict(form)
        same.append(
            all(
                torch.equal(a[2], b[2])
                for name, entry in entries(other).items()
                for a, b in zip(entry, state[name], strict=True)
            )
        )
    return same


def test_live_entries_copies_files_and_lists_load(ranks):
    assert ranks.run(loads_every_form, 2) == [[True] * 4] * 2


def test_a_copy_is_an_entry_that_is_no_view():
    model = parallel(Comm(), "mixed")
    before = entries(model)
    copied = copy.deepcopy(before)
    moved = apply_to_collection(before, torch.Tensor, torch.clone)  # as Lightning walks a state
    for name, entry in before.items():
        for other in (copied[name], moved[name]):
            assert isinstance(other, TableStrips) and other.size() == entry.size()
            assert torch.equal(other[0][2], entry[0][2])
            assert other[0][2].data_ptr() != entry[0][2].data_ptr()
    assert copy.copy(entry)[0][2].data_ptr() == entry[0][2].data_ptr()


def test_the_state_of_the_fused_optimiser_has_the_same_form(ranks):
    assert ranks.run(optimiser_forms, 2) == [True, True]


def optimiser_forms(comm):
    model = parallel(comm, "row_wise")
    model(batch_of(make_tables(), 6, comm.rank)).sum().backward()
    state = model.fused_optimizer.state_dict()
    for of_table in state["state"].values():
        for entry in of_table.values():
            if not isinstance(entry, TableStrips):
                continue
            assert entry.size()[1] == 1
            (shard,) = entry.local_shards()
            assert shard.metadata in entry.metadata().shards_metadata
    file = file_of(state)
    file.seek(0)
    other = parallel(comm, "row_wise", seed=8)
    other.fused_optimizer.load_state_dict(torch.load(file, weights_only=True))
    mine, theirs = (m.fused_optimizer.state_dict()["state"] for m in (model, other))
    return all(
        torch.equal(a[2], b[2])
        for table, parts in mine.items()
        for part, entry in parts.items()
        if isinstance(entry, TableStrips)
        for a, b in zip(entry, theirs[table][part], strict=True)
    )


@pytest.mark.parametrize("asked", ["local_shards", "metadata"])
def test_shards_of_mixed_rows_and_of_dynamic_tables_are_refused(asked):
    dynamic = EmbeddingBagConfig(
        name="d", num_embeddings="dynamic", embedding_dim=4, feature_names=["f0"]
    )
    strip = ((0, 2), (0, 4), torch.zeros(2, 4))
    entry = TableStrips("users", [(*strip, (3, 1))], (2, 4), 0, [])
    with pytest.raises(ConfigError, match=rf"table users: {asked}: its plan mixes rows"):
        getattr(entry, asked)()
    for held in entries(parallel(Comm(), "table_wise", [dynamic])).values():
        with pytest.raises(ConfigError, match=rf"table d: {asked}: the table is dynamic"):
            getattr(held, asked)()
        with pytest.raises(ConfigError, match="table d: size: the table is dynamic"):
            held.size()


def test_an_unsharded_model_says_what_it_takes_instead_of_strips():
    saved = file_of(parallel(Comm(), "table_wise").state_dict())
    saved.seek(0)
    head = Head(EmbeddingBagCollection(tables=make_tables()))
    expected = r"table \w+: load_state_dict: .* a OrderedDict, not a tensor.*gathered_state_dict"
    with pytest.raises(ConfigError, match=expected) as refused:
        head.load_state_dict(torch.load(saved, weights_only=True))
    assert "\n" not in str(refused.value)


def test_a_sharded_collection_takes_no_ids_without_values_and_makes_no_program():
    model = parallel(Comm(), "table_wise")
    features = batch_of(make_tables(), 4, 1)
    with pytest.raises(ConfigError, match="ids are on the meta device, where they have no values"):
        model(features.to(torch.device("meta")))
    with pytest.raises(ConfigError, match=r"torch\.export: a sharded collection sends messages"):
        torch.export.export(model.module, (features,), strict=False)
