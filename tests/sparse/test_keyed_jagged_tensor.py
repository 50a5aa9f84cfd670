"""Keyed jagged tensors against bags in plain Python: making, taking apart, permuting, moving."""

import pickle
from itertools import pairwise

import pytest
import torch
from bags_by_hand import batches, build, expected, lengths, read, same
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from recapp.console import note_once
from recapp.errors import DataError
from recapp.sparse.bags import UnknownKeyError
from recapp.sparse.jagged_tensor import JaggedTensor
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor

KEYS = ["user_features", "item_features"]
VALUES = [101, 102, 201, 202, 203, 11, 21, 22]
LENGTHS = [2, 3, 1, 2]
WEIGHTED = st.booleans()


def two_keys(weights=None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(KEYS, torch.tensor(VALUES), weights, torch.tensor(LENGTHS))


def shares_memory(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_two_keys_get_their_two_bags_each():
    kjt = two_keys()
    assert kjt.keys() == KEYS and kjt.stride() == 2
    assert [b.tolist() for b in kjt["user_features"].to_dense()] == [[101, 102], [201, 202, 203]]
    assert [b.tolist() for b in kjt["item_features"].to_dense()] == [[11], [21, 22]]
    assert kjt.length_per_key() == [5, 3] and kjt.offset_per_key() == [0, 5, 8]
    assert kjt.offsets().tolist() == [0, 2, 5, 6, 8]
    assert kjt.index_of("item_features") == 1


@given(batches(), WEIGHTED)
def test_every_constructor_makes_the_same(plain, weighted):
    kjt = build(plain, weighted)
    values = kjt.values()
    weights = kjt.weights_or_none()
    offsets = kjt.offsets().tolist()
    stride = kjt.stride()
    made = [
        KeyedJaggedTensor(
            kjt.keys(),
            values.tolist(),
            None if weights is None else weights.tolist(),
            offsets=offsets,
        ),
        KeyedJaggedTensor(
            kjt.keys(), values, weights, None, torch.tensor(offsets[:-1], dtype=torch.int32), stride
        ),
        KeyedJaggedTensor(kjt.keys(), values, weights, kjt.lengths().double(), offsets, stride),
        KeyedJaggedTensor.from_lengths_sync(kjt.keys(), values, kjt.lengths(), weights, stride),
        KeyedJaggedTensor.from_offsets_sync(kjt.keys(), values, kjt.offsets(), weights),
    ]
    for other in made:
        assert same(other, kjt)
        assert read(other) == expected(plain, weighted)


@given(batches(min_keys=2))
def test_start_offsets_of_several_keys_need_no_stride(plain):
    """Also where the last bags are empty, so that the last start is the number of values."""
    kjt = build(plain, False)
    assert same(KeyedJaggedTensor(kjt.keys(), kjt.values(), offsets=kjt.offsets()[:-1]), kjt)


@given(batches(), WEIGHTED)
def test_to_dict_holds_each_keys_bags(plain, weighted):
    kjt = build(plain, weighted)
    parts = kjt.to_dict()
    assert list(parts) == list(plain)
    for key, bags in plain.items():
        assert read(parts[key]) == read(kjt[key]) == expected({key: bags}, weighted)
        assert kjt.length_per_key()[kjt.index_of(key)] == sum(len(bag) for bag in bags)


@given(batches(), WEIGHTED)
def test_from_jt_dict_undoes_to_dict(plain, weighted):
    kjt = build(plain, weighted)
    again = KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    if plain:
        assert same(again, kjt)
    assert read(again) == expected(plain, weighted)


@given(batches(), WEIGHTED, st.lists(st.floats(0, 1), max_size=4))
def test_concat_undoes_split(plain, weighted, cuts):
    stride = len(next(iter(plain.values()), []))
    kjt = build(plain, weighted, stride)
    edges = [0, *sorted(round(cut * len(plain)) for cut in cuts), len(plain)]
    segments = [end - begin for begin, end in pairwise(edges)]
    parts = kjt.split(segments)
    assert [len(part.keys()) for part in parts] == segments
    assert all(part.stride() == stride for part in parts)
    first = 0
    for part, count in zip(parts, segments, strict=True):
        own = {key: plain[key] for key in list(plain)[first : first + count]}
        assert part.keys() == list(own) and read(part) == expected(own, weighted)
        assert part.length_per_key() == [sum(map(len, bags)) for bags in own.values()]
        first += count
    if parts:
        assert same(KeyedJaggedTensor.concat(parts), kjt)


@given(st.lists(st.integers(0, 9), max_size=6), batches(min_keys=1), WEIGHTED)
def test_permute_takes_whole_keys_in_any_order_and_number(wanted, plain, weighted):
    kjt = build(plain, weighted)
    indices = [i % len(plain) for i in wanted]
    taken = kjt.permute(indices)
    keys = [list(plain)[i] for i in indices]
    assert taken.keys() == keys and taken.stride() == kjt.stride()
    assert read(taken) == [bag for key in keys for bag in expected({key: plain[key]}, weighted)]
    assert taken.length_per_key() == [kjt.length_per_key()[i] for i in indices]
    assert taken.offset_per_key()[-1] == len(taken.values())


def test_permute_takes_its_indices_as_a_tensor_too():
    kjt = two_keys(torch.rand(8))
    assert same(kjt.permute([1, 0], torch.tensor([1, 0])), kjt.permute([1, 0]))
    with pytest.raises(DataError, match=r"indices_tensor has the shape \[1\], but there are 2"):
        kjt.permute([1, 0], torch.tensor([1]))


def test_to_changes_the_dtype_of_weights_alone():
    moved = two_keys(torch.rand(8)).to(torch.device("cpu"), False, torch.float64)
    assert moved.weights().dtype == torch.float64
    assert moved.values().dtype == moved.lengths().dtype == torch.int64
    unweighted = two_keys()
    assert unweighted.to("cpu", dtype=torch.float64) is unweighted


def test_leaves_of_a_tree_are_named():
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(two_keys())[0]]
    assert paths == ["._values", "._weights", "._lengths"]


class Doubled(torch.nn.Module):
    def forward(self, kjt):
        return KeyedJaggedTensor.unchecked(
            list(kjt.keys()), kjt.values() * 2, None, kjt.lengths(), kjt.stride()
        )


def test_an_exported_program_takes_and_gives_one_also_from_a_file(tmp_path):
    exported = torch.export.export(Doubled(), (two_keys(),), strict=False)
    torch.export.save(exported, tmp_path / "doubled.pt2")
    loaded = torch.export.load(tmp_path / "doubled.pt2")
    for program in (exported, loaded):
        assert same(program.module()(two_keys()), Doubled()(two_keys()))


@given(batches(), WEIGHTED)
def test_trees_and_pickles_give_the_same_back(plain, weighted):
    kjt = build(plain, weighted)
    leaves, spec = pytree.tree_flatten(kjt)
    assert same(pytree.tree_unflatten(leaves, spec), kjt)
    assert same(pickle.loads(pickle.dumps(kjt)), kjt)
    kjt.offsets()
    assert pytree.tree_flatten(kjt)[1] == spec, "asking for offsets must not change the structure"


def test_a_tree_map_reaches_values_weights_and_lengths():
    kinds = pytree.tree_map(lambda t: t.dtype, two_keys(torch.rand(8)))
    assert (kinds.values(), kinds.weights_or_none(), kinds.lengths()) == (
        torch.int64,
        torch.float32,
        torch.int64,
    )


def test_taking_keys_apart_copies_nothing():
    kjt = two_keys(torch.rand(8))
    parts = [
        *kjt.split([1, 1]),
        kjt.permute([1]),
        kjt.permute([0, 1]),
        kjt["item_features"],
        *kjt.to_dict().values(),
    ]
    for part in parts:
        for whole, piece in (
            (kjt.values(), part.values()),
            (kjt.weights(), part.weights()),
            (kjt.lengths(), part.lengths()),
        ):
            assert shares_memory(piece, whole)
    assert not shares_memory(kjt.permute([1, 0]).values(), kjt.values())


def test_tensors_are_not_copied_by_the_constructor():
    values = torch.tensor(VALUES)
    weights = torch.rand(8)
    offsets = torch.tensor([0, 2, 5, 6, 8])
    kjt = KeyedJaggedTensor(KEYS, values, weights, offsets=offsets)
    assert kjt.values() is values and kjt.weights() is weights and kjt.offsets() is offsets


def test_gradients_of_weights_pass_through_permute_and_concat():
    weights = torch.ones(8, requires_grad=True)
    item, user = two_keys(weights).permute([1, 0]).split([1, 1])
    (KeyedJaggedTensor.concat([user, item]).weights() * torch.arange(8)).sum().backward()
    assert weights.grad.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("keys", "lengths", "stride"), [([], [], 0), (["a"], [], 0), (["a", "b"], [0, 0, 0, 0], 2)]
)
def test_no_keys_no_samples_and_no_values_are_ordinary(keys, lengths, stride):
    kjt = KeyedJaggedTensor(keys, [], [], lengths)
    assert (
        kjt.stride() == stride
        and kjt.length_per_key() == [0] * len(keys)
        and kjt.offset_per_key() == [0] * (len(keys) + 1)
    )
    assert set(kjt.to_dict()) == set(keys) and repr(kjt)
    assert kjt.permute(list(range(len(keys)))[::-1]).keys() == keys[::-1]
    assert all(jt.to_padded_dense().shape == (stride, 0) for jt in kjt.to_dict().values())


def test_an_empty_float_tensor_does_not_turn_ids_into_floats():
    parts = {
        "a": JaggedTensor(torch.tensor([2**60 + 1]), lengths=[1]),
        "b": JaggedTensor(torch.tensor([]), lengths=[0]),
    }
    kjt = KeyedJaggedTensor.from_jt_dict(parts)
    assert kjt.values().tolist() == [2**60 + 1] and kjt.stride() == 1


def test_ids_and_floats_are_not_mixed_silently():
    parts = {"a": JaggedTensor([1], lengths=[1]), "b": JaggedTensor([1.5], lengths=[1])}
    with pytest.raises(
        DataError,
        match=r"values are of the dtypes torch.float32, torch.int64: convert them to one first",
    ):
        KeyedJaggedTensor.from_jt_dict(parts)


def test_keys_without_bags_do_not_count_in_a_concat():
    kjt = two_keys()
    none = KeyedJaggedTensor([], [], lengths=[])
    assert same(KeyedJaggedTensor.concat([none, kjt, none]), kjt)
    assert KeyedJaggedTensor.concat([none]).keys() == []


def lengths_of(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: KeyedJaggedTensor(KEYS, VALUES, lengths=[2, 3, 3]),
            r"3 bags are no multiple of 2 keys \(user_features, item_features\)",
        ),
        (
            lambda: KeyedJaggedTensor(KEYS, VALUES, lengths=[2, 3, 1, 3]),
            "lengths sum to 9, but there are 8 values",
        ),
        (lambda: KeyedJaggedTensor(KEYS, VALUES), "neither lengths nor offsets are given"),
        (
            lambda: KeyedJaggedTensor(KEYS, VALUES, lengths=[2.0, 3.5, 1.0, 1.5]),
            r"lengths\[1\] is 3.5: give whole numbers",
        ),
        (
            lambda: KeyedJaggedTensor(KEYS, VALUES, offsets=[0, 2, 5, 6, 9]),
            "5 offsets run from 0 to 9, but there are 8 values",
        ),
        (
            lambda: KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS, stride=3),
            "there are 4 bags, but 2 keys of stride 3 have 6: give one length per key and sample",
        ),
        (lambda: KeyedJaggedTensor([], [], lengths=[0, 0]), "there are 2 bags but no keys"),
        (lambda: KeyedJaggedTensor(["a", "a"], [1, 2], lengths=[1, 1]), "key 'a' is given twice"),
        (
            lambda: KeyedJaggedTensor("ab", [1, 2], lengths=[1, 1]),
            "keys are the text 'ab': give a list of names",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], [1, 2], weights=[1.0], lengths=[2]),
            "there are 1 weights and 2 values in bags",
        ),
        (lambda: KeyedJaggedTensor.concat([]), "the list of tensors is empty"),
        (
            lambda: KeyedJaggedTensor.concat(
                [two_keys(), KeyedJaggedTensor(["a"], [1], lengths=[1])]
            ),
            r"strides differ: \[2, 1\]",
        ),
        (
            lambda: KeyedJaggedTensor.concat([two_keys(), two_keys()]),
            "key 'user_features' is given twice",
        ),
        (
            lambda: KeyedJaggedTensor.concat(
                [two_keys(torch.rand(8)), KeyedJaggedTensor(["a"], [1], lengths=[1, 0])]
            ),
            "user_features, item_features has weights, a has none",
        ),
        (
            lambda: KeyedJaggedTensor.from_jt_dict(
                {"a": JaggedTensor([1], [0.5], [1]), "b": JaggedTensor([1], lengths=[1])}
            ),
            "a has weights, b has none",
        ),
        (lambda: two_keys().split([1, 2]), r"segments \[1, 2\] sum to 3, but there are 2 keys"),
        (lambda: two_keys().split([3, -1]), r"segments \[3, -1\]"),
        (lambda: two_keys().permute([0, 2]), r"index 2 belongs to no key: there are 2 keys, 0..1"),
        (lambda: two_keys().permute([-1]), "index -1 belongs to no key"),
        (lambda: two_keys().weights(), "has no weights: make it with weights="),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(make, message):
    with pytest.raises(DataError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_an_unknown_key_names_the_close_ones():
    with pytest.raises(
        UnknownKeyError, match="unknown key 'user_feature': did you mean user_features"
    ) as caught:
        two_keys()["user_feature"]
    assert isinstance(caught.value, DataError) and isinstance(caught.value, KeyError)
    assert not str(caught.value).startswith("\"'"), "the plain text, not KeyError's quoted one"
    with pytest.raises(UnknownKeyError, match="unknown key 0: known: item_features, user_features"):
        two_keys()[0]
    with pytest.raises(UnknownKeyError):
        two_keys().index_of("x")


def test_repr_shows_each_keys_bags():
    assert repr(two_keys()) == (
        "KeyedJaggedTensor(2 keys, stride 2, 8 values int64 on cpu\n"
        "  user_features: [101 102] [201 202 203]\n"
        "  item_features: [11] [21 22]\n)"
    )
    many = KeyedJaggedTensor(
        [f"C{i}" for i in range(100)], torch.arange(10_000), lengths=torch.full((1000,), 10)
    )
    assert "... 70 more keys" in repr(many) and len(repr(many).splitlines()) == 33
    assert (
        repr(two_keys().to("meta")) == "KeyedJaggedTensor(2 keys, stride 2, 8 values int64 on meta)"
    )


def test_contents_on_an_accelerator_are_not_read_and_counts_come_along():
    """Reading a meta tensor raises, so what works there waits for no device."""
    there = two_keys(torch.rand(8)).to("meta", non_blocking=True)
    assert there.device() == torch.device("meta") and there.length_per_key() == [5, 3]
    assert there.permute([1, 0]).values().is_meta and there["item_features"].values().shape == (3,)
    assert KeyedJaggedTensor.concat(there.split([1, 1])).length_per_key() == [5, 3]
    made = KeyedJaggedTensor(KEYS, torch.empty(8, device="meta"), lengths=lengths_of(4).to("meta"))
    assert made.stride() == 2 and made.offsets().shape == (5,)
    for offsets in (4, 5):
        assert KeyedJaggedTensor(
            KEYS, torch.empty(8, device="meta"), offsets=lengths_of(offsets).to("meta")
        ).lengths().shape == (4,)
    assert (
        KeyedJaggedTensor(
            ["a"], torch.empty(8, device="meta"), offsets=lengths_of(4).to("meta"), stride=4
        ).stride()
        == 4
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_on_cuda_waits_for_nothing():
    pinned = two_keys(torch.rand(8)).pin_memory()
    assert pinned.values().is_pinned() and pinned.lengths().is_pinned()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = pinned.to("cuda", non_blocking=True)
        KeyedJaggedTensor(there.keys(), there.values(), there.weights(), there.lengths())
        parts = [there.permute([1, 0]), *there.split([1, 1]), *there.to_dict().values()]
        parts[-1].to_padded_dense(3)
        there.record_stream(torch.cuda.Stream())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same(there.to("cpu"), two_keys(pinned.weights()))


def test_record_stream_reaches_every_tensor():
    streams = []

    class Recorded(torch.Tensor):
        def record_stream(self, stream):
            streams.append((stream, tuple(self.shape)))

    kjt = KeyedJaggedTensor(
        KEYS, *(torch.tensor(x).as_subclass(Recorded) for x in (VALUES, [1.0] * 8, LENGTHS))
    )
    kjt.record_stream("s")
    assert streams == [("s", (8,)), ("s", (8,)), ("s", (4,))]


def test_the_oracle_tells_wrong_bags_apart():
    assert read(two_keys()) != expected({"a": [[(101, 1.0)]]}, False)
    assert lengths({"a": [[(1, 1.0)], []]}) == [1, 0]
    assert not same(two_keys(), two_keys(torch.rand(8)))


def test_offsets_of_one_key_that_end_early_are_full_and_noted_once(capsys):
    note_once.cache_clear()
    for _ in range(2):
        kjt = KeyedJaggedTensor(["a"], [1, 2, 3], offsets=[0, 2])
        assert kjt.lengths().tolist() == [2]
    assert capsys.readouterr().err.count("offsets end before the values do") == 1


def test_parts_have_their_offsets_unless_they_are_not_wanted():
    kjt = KeyedJaggedTensor(["a", "b"], [1, 2, 3], lengths=[2, 1])
    later = kjt.to_dict(compute_offsets=False)
    assert later["a"].offsets_or_none() is None and later["a"].offsets().tolist() == [0, 2]
    assert kjt.to_dict()["b"].offsets_or_none().tolist() == [0, 1]


def test_a_tensor_like_another_on_a_device_has_its_keys_and_shapes():
    kjt = KeyedJaggedTensor(["a", "b"], [1, 2, 3], lengths=[2, 1])
    target = KeyedJaggedTensor.empty_like(kjt, device="cpu")
    assert target.keys() == ["a", "b"] and target.values().shape == (3,)
    assert target.values().data_ptr() != kjt.values().data_ptr()
    assert kjt.size_in_bytes() == 3 * 8 + 2 * 8
