"""What was saved under one tiling and number of ranks loads under any other, bit for bit."""

import json
import random
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import blank, block, edit, save, tilings, whole

from recapp.errors import CheckpointError
from recapp.sharding import layout
from recapp.sharding.layout import make_layout
from recapp.sharding.sharding_plan import ShardingPlan, tile
from recapp.sharding.sharding_types import CandidateRanks, ShardingType
from recapp.stored import block_files
from recapp.stored.stored_model import load_blocks, load_table, read_manifest, verify
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.positions import mixed_order


def values(rows, cols, dtype=torch.float32):
    return torch.arange(rows * cols).view(rows, cols).to(dtype)


@settings(max_examples=40)
@given(
    st.data(),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([8, 64, 2**26]),
    st.sampled_from([None, mixed_order]),
    st.sampled_from([None, mixed_order]),
)
def test_any_tiling_and_order_of_rows_loads_under_any_other(
    data, rows, cols, ranks_before, ranks_after, block_bytes, before_in, after_in
):
    table = values(rows, cols)
    stored, wanted_in = (made and made("A", rows) for made in (before_in, after_in))
    before = data.draw(tilings(rows, cols, ranks_before))
    after = data.draw(tilings(rows, cols, ranks_after))
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(block_files, "BLOCK_BYTES", block_bytes),
        mock.patch.object(block_files, "READ_BYTES", block_bytes),
        mock.patch.object(layout, "PART_ROWS", max(1, block_bytes // 16)),
    ):
        held = [
            [block("A", "weight", table, r, c, order=stored) for k, r, c in before if k == rank]
            for rank in range(ranks_before)
        ]
        assert save(f"{folder}/a.ckpt", held) == [None] * ranks_before
        for _, r, c in after:
            wanted = block("A", "weight", table, r, c, order=wanted_in)
            got = blank(wanted)
            assert not torch.equal(got.data, wanted.data)
            load_blocks(f"{folder}/a.ckpt", [got])
            assert torch.equal(got.data, wanted.data)
        assert torch.equal(load_table(f"{folder}/a.ckpt", "A"), table)


def held_by(table, kind, rank, world, states):
    """Return the blocks that a rank holds under a named type, row-wise state included."""
    ranks = CandidateRanks(list(range(world)), [list(range(world))])
    sharding = tile(table, kind, ranks, column_width=3)
    made = make_layout([table], ShardingPlan({table.name: sharding}, world))
    found = []
    for piece in (p for p in made.pieces if p.rank == rank):
        strip = made.strips[piece.strip]
        owner = kind is not ShardingType.DATA_PARALLEL or rank == 0
        found.append(block(table.name, "weight", states["weight"], piece.rows, strip.cols, owner))
        found.append(
            block(
                table.name,
                "sum",
                states["sum"],
                piece.rows,
                range(1),
                owner and strip.cols.start == 0,
            )
        )
    return found


@pytest.mark.parametrize("before", ShardingType)
@pytest.mark.parametrize("after", ShardingType)
def test_every_named_type_loads_under_every_other_with_its_row_state(tmp_path, before, after):
    table = EmbeddingBagConfig(name="A", num_embeddings=131, embedding_dim=7, feature_names=["a"])
    states = {"weight": values(131, 7), "sum": values(131, 1) + 5000}
    assert (
        save(tmp_path / "a.ckpt", [held_by(table, before, k, 4, states) for k in range(4)])
        == [None] * 4
    )
    loaded = 0
    for rank in range(2):
        wanted = held_by(table, after, rank, 2, states)
        got = [blank(b) for b in wanted]
        load_blocks(tmp_path / "a.ckpt", got)
        assert all(torch.equal(g.data, w.data) for g, w in zip(got, wanted, strict=True))
        loaded += sum(g.data.numel() for g in got if g.tensor == "weight")
    assert loaded == 131 * 7 * (2 if after is ShardingType.DATA_PARALLEL else 1)


def test_rows_that_change_their_order_are_read_and_moved_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "READ_BYTES", 1200)
    monkeypatch.setattr(layout, "PART_ROWS", 8)
    table = values(1000, 3)
    parts = []
    moved_rows = layout.moved_rows
    monkeypatch.setattr(layout, "moved_rows", lambda *p: parts.append(p[0]) or moved_rows(*p))
    path = tmp_path / "a.ckpt"
    save(path, [[block("A", "weight", table, range(1000), range(3), order=mixed_order("A", 1000))]])
    assert torch.equal(load_table(path, "A"), table)
    assert max(map(len, parts)) == 8 and [row for part in parts for row in part] == [*range(1000)]


def test_the_manifest_says_how_rows_are_mixed_for_programs_of_any_language(tmp_path):
    table = values(10, 3)
    path = tmp_path / "a.ckpt"
    save(
        path,
        [
            [whole("B", "weight", table)],
            [block("A", "weight", table, range(10), range(3), order=mixed_order("A", 10))],
        ],
    )
    plain = json.loads((path / "manifest.json").read_text())
    ((name, order),) = plain["row_orders"].items()
    assert name == "A" and order["order"] == "mixed"
    (stored,) = [s for s in read_manifest(path).blocks if s.table == "A"]
    raw = bytearray(Path(path, stored.file).read_bytes()[stored.begin : stored.end])
    found = torch.frombuffer(raw, dtype=torch.float32).view(10, 3)
    for row in range(10):
        position = (order["multiplier"] * row + order["shift"]) % 10
        assert found[position].tolist() == table[row].tolist()


@pytest.mark.parametrize(
    "orders",
    [
        {"A": {"order": "mixed", "multiplier": 2, "shift": 0}},  # no bijection of 4 rows
        {"A": {"order": "mixed", "multiplier": 3, "shift": 4}},
        {"A": {"order": "mixed", "multiplier": 3.0, "shift": 0}},
        {"A": {"order": "dealt", "multiplier": 3, "shift": 0}},
        {"A": {"multiplier": 3, "shift": 0}},
        {"B": {"order": "mixed", "multiplier": 3, "shift": 0}},
        ["A"],
        7,
    ],
)
def test_a_row_order_that_cannot_be_is_refused_in_one_line(tmp_path, orders):
    save(tmp_path / "a.ckpt", [[whole("A", "weight", values(4, 2))]])
    edit(tmp_path / "a.ckpt", row_orders=orders)
    with pytest.raises(CheckpointError, match=r"^the manifest of .* is damaged: row_orders is"):
        load_table(tmp_path / "a.ckpt", "A")


def test_copies_are_written_once_and_loaded_by_everybody(tmp_path):
    table = values(5, 2)
    save(tmp_path / "a.ckpt", [[whole("A", "weight", table, owner=rank == 1)] for rank in range(3)])
    assert {s.file for s in read_manifest(tmp_path / "a.ckpt").blocks} == {"rank-00001.safetensors"}
    got = blank(whole("A", "weight", table, owner=False))
    load_blocks(tmp_path / "a.ckpt", [got])
    assert torch.equal(got.data, table)


def test_loading_writes_through_to_the_store_that_a_block_is_a_view_of(tmp_path):
    table = values(6, 4)
    store = torch.zeros(9, 2)
    save(tmp_path / "a.ckpt", [[whole("A", "weight", table)]])
    load_blocks(
        tmp_path / "a.ckpt",
        [block("A", "weight", table, range(2, 5), range(1, 3))._replace(data=store[4:7])],
    )
    assert torch.equal(store[4:7], table[2:5, 1:3])
    assert store[:4].abs().sum() + store[7:].abs().sum() == 0


@pytest.mark.parametrize("dtype", list(block_files.DTYPES.values()))
def test_every_dtype_comes_back_as_it_was_beside_odd_sizes_of_others(tmp_path, dtype):
    odd = values(3, 1, torch.uint8)
    table = values(3, 5, dtype)
    half = whole("B", "weight", values(1, 3, torch.float16))
    save(tmp_path / "a.ckpt", [[whole("odd", "weight", odd), whole("A", "weight", table), half]])
    assert load_table(tmp_path / "a.ckpt", "A").dtype == dtype
    assert torch.equal(load_table(tmp_path / "a.ckpt", "A"), table)
    assert torch.equal(load_table(tmp_path / "a.ckpt", "odd"), odd)
    verify(tmp_path / "a.ckpt")


def test_floats_are_converted_to_the_dtype_that_is_held(tmp_path):
    table = torch.tensor([[0.1, 2.0], [3.0, -1.5]])
    save(tmp_path / "a.ckpt", [[whole("A", "weight", table)]])
    held = whole("A", "weight", table.to(torch.bfloat16))
    got = blank(held)
    load_blocks(tmp_path / "a.ckpt", [got])
    assert torch.equal(got.data, held.data)


def test_a_table_loads_whole_without_a_plan_optimiser_state_too(tmp_path):
    table = values(10, 4)
    state = values(10, 1)
    save(
        tmp_path / "a.ckpt",
        [
            [block("A", "weight", table, range(7), range(4)), whole("A", "sum", state)],
            [block("A", "weight", table, range(7, 10), range(4))],
        ],
    )
    assert torch.equal(load_table(tmp_path / "a.ckpt", "A"), table)
    assert torch.equal(load_table(tmp_path / "a.ckpt", "A", "sum"), state)


def test_ranks_and_blocks_without_a_value_leave_no_trace(tmp_path):
    table = values(4, 2)
    empty = block("A", "weight", table, range(4, 4), range(2))
    assert (
        save(tmp_path / "a.ckpt", [[whole("A", "weight", table), empty], [empty], []]) == [None] * 3
    )
    assert sorted(p.name for p in (tmp_path / "a.ckpt").iterdir()) == [
        "manifest.json",
        "meta.pt",
        "rank-00000.safetensors",
    ]
    load_blocks(tmp_path / "a.ckpt", [empty])


def test_a_stored_block_has_at_most_the_block_size_or_one_row(tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "BLOCK_BYTES", 40)
    save(
        tmp_path / "a.ckpt",
        [[whole("A", "weight", values(10, 3)), whole("wide", "weight", values(2, 30))]],
    )
    blocks = read_manifest(tmp_path / "a.ckpt").blocks
    assert [len(s.rows) for s in blocks] == [3, 3, 3, 1, 1, 1]
    assert torch.equal(load_table(tmp_path / "a.ckpt", "A"), values(10, 3))


def test_other_programs_find_a_block_by_the_manifest_alone(tmp_path):
    table = values(6, 3)
    save(tmp_path / "a.ckpt", [[whole("A", "weight", table)]])
    (stored,) = read_manifest(tmp_path / "a.ckpt").blocks
    raw = Path(tmp_path, "a.ckpt", stored.file).read_bytes()[stored.begin : stored.end]
    assert (
        torch.frombuffer(bytearray(raw), dtype=torch.float32).view(6, 3).tolist() == table.tolist()
    )


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (("C2", "weight", (4, 2)), "no table C2: known: C1"),
        (("C1", "exp_avg", (4, 2)), "no exp_avg of table C1, only sum, weight: set the optimizer"),
        (
            ("C1", "weight", (5, 2)),
            "table C1, weight is 4 x 2 in the checkpoint, but 5 x 2 in the model",
        ),
        (("C1", "sum", (4, 2)), "table C1, sum is 4 x 1 in the checkpoint, but 4 x 2 in the model"),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_named(tmp_path, wanted, said):
    save(
        tmp_path / "a.ckpt",
        [[whole("C1", "weight", values(4, 2)), whole("C1", "sum", values(4, 1))]],
    )
    table, tensor, shape = wanted
    with pytest.raises(CheckpointError) as error:
        load_blocks(tmp_path / "a.ckpt", [whole(table, tensor, values(*shape))])
    assert said in str(error.value)


def test_integers_do_not_become_floats_silently(tmp_path):
    save(tmp_path / "a.ckpt", [[whole("A", "weight", values(4, 2, torch.int8))]])
    with pytest.raises(CheckpointError, match=r"stored as int8 and cannot become torch\.float32"):
        load_blocks(tmp_path / "a.ckpt", [whole("A", "weight", values(4, 2))])


def stored(rows, cols, shape=(4, 2)):
    return block_files.StoredBlock(
        "A", "weight", shape, range(*rows), range(*cols), "float32", "f", 0, 0, 0
    )


@pytest.mark.parametrize(
    ("rectangles_of", "said"),
    [
        ([((0, 2), (0, 2))], "only 4 of 8 values"),
        ([((0, 4), (0, 1)), ((3, 4), (1, 2))], "only 5 of 8 values"),
        ([((0, 3), (0, 2)), ((2, 4), (1, 2))], "overlap"),
        ([((0, 4), (0, 3))], "does not lie in 4 x 2"),
        ([((0, 5), (0, 2))], "does not lie in 4 x 2"),
    ],
)
def test_rectangles_that_do_not_cover_a_tensor_once_are_refused(rectangles_of, said):
    with pytest.raises(CheckpointError) as error:
        block_files.check_tiling([stored(*r) for r in rectangles_of])
    assert said in str(error.value)


def test_a_pinwheel_of_rectangles_is_a_tiling():
    block_files.check_tiling(
        [
            stored(*r, shape=(3, 3))
            for r in (
                ((0, 1), (0, 2)),
                ((0, 2), (2, 3)),
                ((2, 3), (1, 3)),
                ((1, 3), (0, 1)),
                ((1, 2), (1, 2)),
            )
        ]
    )


def test_what_ranges_have_in_common_is_empty_or_inside_both():
    common = [
        list(block_files.overlap(range(2, 6), other))
        for other in (range(3), range(4, 9), range(2), range(7, 9), range(3, 4))
    ]
    assert common == [[2], [4, 5], [], [], [3]]


def test_a_hole_in_what_is_saved_leaves_no_checkpoint(tmp_path):
    (error,) = save(tmp_path / "a.ckpt", [[block("A", "weight", values(4, 2), range(3), range(2))]])
    assert isinstance(error, CheckpointError) and "only 6 of 8 values (4 x 2) are stored" in str(
        error
    )
    assert list(tmp_path.iterdir()) == []


def test_a_hole_in_a_manifest_is_found_when_loading(tmp_path):
    table = values(4, 2)
    manifest = tmp_path / "a.ckpt" / "manifest.json"
    with mock.patch.object(block_files, "BLOCK_BYTES", 16):
        save(tmp_path / "a.ckpt", [[whole("A", "weight", table)]])
    kept = [
        entry for entry in json.loads(manifest.read_text())["blocks"] if entry["rows"] != [0, 2]
    ]
    edit(tmp_path / "a.ckpt", blocks=kept)
    with pytest.raises(CheckpointError, match="only 4 of 8 values"):
        load_blocks(tmp_path / "a.ckpt", [whole("A", "weight", table)])


def test_rectangles_are_a_tiling_if_they_cover_each_value_once():
    rng = random.Random("tilings")
    tilings = 0
    for _ in range(3000):
        shape = (rng.randint(1, 3), rng.randint(1, 3))
        sides = [
            [sorted(rng.sample(range(n + 1), 2)) for n in shape] for _ in range(rng.randint(1, 4))
        ]
        rectangles = [stored(*each, shape=shape) for each in sides]
        counts = [
            sum(row in s.rows and col in s.cols for s in rectangles)
            for row in range(shape[0])
            for col in range(shape[1])
        ]
        is_tiling = set(counts) == {1}
        tilings += is_tiling
        with nullcontext() if is_tiling else pytest.raises(CheckpointError):
            block_files.check_tiling(rectangles)
    assert tilings > 100
