"""Raw ids to rows: one rule per table, applied in one function."""

import pytest
import torch

from recapp.errors import ConfigError, DataError, IdError
from recapp.kernels.backend import backend
from recapp.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING, MISSING_INT32
from recapp.tables.config import EmbeddingBagConfig, TableLookup, check_max_key, lookups_of
from recapp.tables.ids import IdRules

BIG = 2**62 + 7


def rules_of(tables):
    """Return the id rules that tables declare; a fixture replaces this function in every test."""
    raise NotImplementedError


@pytest.fixture(params=["torch", "numba"], autouse=True)
def implementation(request, monkeypatch):
    """Run each test with torch's operations and with the compiled pass."""
    kernel = backend(request.param, torch.device("cpu")).rows_of_ids
    monkeypatch.setitem(globals(), "rules_of", lambda tables: IdRules(lookups_of(tables), kernel))


def table(rule, rows=10, name="t", features=("f",)):
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=2, feature_names=features, id_rule=rule
    )


def rows_of(rule, ids, rows=10):
    rules = rules_of([table(rule, rows)])
    found = rules(KeyedJaggedTensor(["f"], torch.tensor(ids), None, torch.tensor([len(ids)])))
    return found.rows_L.tolist(), found.lengths_FB.tolist(), rules.changed


@pytest.mark.parametrize(
    ("rule", "ids", "rows", "changed"),
    [
        ("error", [0, 9, MISSING, 3], [0, 9, 0, 3], 0),
        ("clamp", [0, 9, 10, BIG, -1, MISSING], [0, 9, 9, 9, 0, 0], 3),
        ("drop", [0, 9, 10, BIG, -1, MISSING], [0, 9, 0], 3),
        ("hash", [0, 9, 10, BIG, -1, MISSING], [1, 1, 2, 1 + BIG % 9, 1 + -1 % 9, 0], 0),
    ],
)
def test_a_rule_makes_rows_of_ids_and_counts_what_it_changed(rule, ids, rows, changed):
    assert rows_of(rule, ids) == (rows, [[len(rows)]], {"t": changed})


@pytest.mark.parametrize("rule", ["hash", "clamp", "drop"])
def test_rows_are_always_inside_the_table(rule):
    ids = [*range(-40, 40), BIG, -BIG, 2**63 - 1, MISSING, MISSING + 1]
    rows, _, _ = rows_of(rule, ids, rows=2)
    assert set(rows) == {0, 1}


def test_hashing_gives_row_0_to_missing_ids_alone():
    rows, _, _ = rows_of("hash", [*range(100), MISSING])
    assert 0 not in rows[:100] and rows[100] == 0
    assert set(rows[:100]) == set(range(1, 10))


@pytest.mark.parametrize("outside", [10, -1, BIG])
def test_an_id_outside_its_table_names_table_feature_id_and_what_to_change(outside):
    with pytest.raises(
        IdError,
        match=(
            rf"table t: feature f has the id {outside}, .* outside its 10 rows .*id_rule to hash, "
            r"clamp or drop"
        ),
    ):
        rows_of("error", [0, outside])


def test_the_guilty_pair_is_named_among_many_tables_and_rules():
    tables = [
        table("clamp", name="a"),
        table("error", name="b", features=("g", "h")),
        table("error", 5, "c"),
        table("drop", name="d"),
    ]
    kjt = KeyedJaggedTensor(["f", "g", "h"], [7, 1, 2], None, [1, 1, 1])
    with pytest.raises(
        IdError, match="table c: feature f has the id 7, which is outside its 5 rows"
    ):
        rules_of(tables)(kjt)


def test_each_table_counts_its_own_changes_over_batches():
    rules = rules_of(
        [
            table("clamp", 3, "a"),
            table("clamp", 100, "b"),
            table("drop", 3, "c"),
            table("hash", 3, "d"),
        ]
    )
    for _ in range(2):
        rules(KeyedJaggedTensor(["f"], [1, 5, 200, 300], None, [4]))
    assert rules.changed == {"a": 6, "b": 4, "c": 6, "d": 0}


def test_dropped_ids_leave_their_bags_with_their_weights():
    rules = rules_of([table("drop"), table("error", 1000, "u", ("g",))])
    found = rules(
        KeyedJaggedTensor(
            ["f", "g"], [1, 99, 2, 98, 97, 5], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [2, 1, 2, 0, 1, 0]
        )
    )
    assert found.lengths_FB.tolist() == [[1, 1, 0], [0, 1, 0]]
    assert found.rows_L.tolist() == [1, 2, 5] and found.per_F == [2, 1]
    torch.testing.assert_close(found.weights_L, torch.tensor([0.1, 0.3, 0.6]))


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 2.0], dtype=torch.float16),
        torch.tensor([True, False]),
    ],
)
def test_ids_that_are_no_integers_are_refused_with_what_is_wanted(values):
    with pytest.raises(
        ConfigError, match=r"ids are torch\.\w+: a lookup needs integer ids \(int32 or int64\)"
    ):
        rules_of([table("error")])(KeyedJaggedTensor(["f"], values, None, [2]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_type_will_do(dtype):
    found = rules_of([table("error")])(
        KeyedJaggedTensor(["f"], torch.tensor([1, 9], dtype=dtype), None, [2])
    )
    assert found.rows_L.tolist() == [1, 9] and found.rows_L.dtype in (torch.int32, torch.int64)


@pytest.mark.parametrize("rule", ["error", "hash", "clamp", "drop"])
def test_ids_of_32_bits_have_the_rows_of_their_numbers(rule):
    ids = [3, 9, 0] if rule == "error" else [3, 10, -1, 2**31 - 1, -(2**31) + 1]
    found = [
        rules_of([table(rule)])(KeyedJaggedTensor(["f"], numbers, None, [len(ids) + 1]))
        for numbers in (
            torch.tensor([*ids, MISSING]),
            torch.tensor([*ids, MISSING_INT32], dtype=torch.int32),
        )
    ]
    assert found[0].rows_L.tolist() == found[1].rows_L.tolist()
    assert found[1].rows_L[-1] == 0 and found[0].per_F == found[1].per_F


def test_a_missing_feature_is_refused_with_the_close_matches():
    with pytest.raises(DataError, match="unknown key 'user_id': did you mean user_ids"):
        rules_of([table("error", features=("user_id",))])(
            KeyedJaggedTensor(["user_ids", "x"], [1], None, [1, 0])
        )


def test_features_are_found_by_name_among_others_in_any_order():
    rules = rules_of(
        [table("error", name="t", features=("b", "a")), table("error", name="u", features=("a",))]
    )
    found = rules(
        KeyedJaggedTensor(["x", "a", "y", "b"], [9, 1, 2, 8, 3], None, [1, 0, 2, 0, 0, 1, 1, 0])
    )
    assert found.rows_L.tolist() == [3, 1, 2, 1, 2]
    assert found.lengths_FB.tolist() == [[1, 0], [2, 0], [2, 0]]


@pytest.mark.parametrize("rule", ["error", "hash", "clamp", "drop"])
def test_a_batch_without_samples_or_without_ids_has_no_rows(rule):
    rules = rules_of([table(rule), table("error", name="u", features=("g",))])
    for bags in (0, 3):
        found = rules(
            KeyedJaggedTensor(
                ["f", "g"],
                torch.zeros(0, dtype=torch.int64),
                None,
                torch.zeros(2 * bags, dtype=torch.int64),
            )
        )
        assert (
            found.lengths_FB.shape == (2, bags) and len(found.rows_L) == 0 and found.per_F == [0, 0]
        )


# ---- keys that do not begin at 0


def keyed(rule, first, name="t", features=("f",), rows=10):
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=2,
        feature_names=features,
        id_rule=rule,
        min_key=first,
    )


@pytest.mark.parametrize(
    ("rule", "ids", "rows", "changed"),
    [
        ("error", [100, 109, MISSING, 103], [0, 9, 0, 3], 0),
        ("clamp", [100, 110, 99, BIG, -BIG, MISSING], [0, 9, 0, 9, 0, 0], 4),
        ("drop", [109, 110, 99, BIG, -BIG, MISSING, 100], [9, 0, 0], 4),
    ],
)
def test_rows_are_counted_from_the_first_key(rule, ids, rows, changed):
    rules = rules_of([keyed(rule, 100)])
    found = rules(KeyedJaggedTensor(["f"], torch.tensor(ids), None, torch.tensor([len(ids)])))
    assert (found.rows_L.tolist(), rules.changed) == (rows, {"t": changed})


@pytest.mark.parametrize("first", [-(2**63) + 1, 2**63 - 11, -5, 7])
def test_keys_at_the_ends_of_the_integers_are_their_rows_and_no_others_are(first):
    own = [first + k for k in range(10)]
    others = [n for n in (MISSING + 1, 2**63 - 1, first - 1, first + 10) if n not in own]
    others = [n for n in others if n != MISSING]
    rules = rules_of([keyed("error", first)])
    of_one = torch.tensor([10])
    assert rules(KeyedJaggedTensor(["f"], torch.tensor(own), None, of_one)).rows_L.tolist() == [
        *range(10)
    ]
    for other in others:
        with pytest.raises(IdError, match=f"feature f has the id {other}, which is outside"):
            rules(KeyedJaggedTensor(["f"], torch.tensor([other]), None, torch.tensor([1])))


def test_tables_with_other_first_keys_and_rules_stand_side_by_side():
    tables = [
        keyed("error", 100, "a", ["x"]),
        table("hash", name="b", features=["y"]),
        keyed("clamp", -3, "c", ["z"]),
        table("error", name="d", features=["w"]),
    ]
    ids = torch.tensor([105, BIG, -3, 7, MISSING, 9])
    found = rules_of(tables)(
        KeyedJaggedTensor(["x", "y", "z", "w"], ids, None, torch.tensor([1, 1, 2, 2]))
    )
    assert found.rows_L.tolist() == [5, 1 + BIG % 9, 0, 9, 0, 9]


@pytest.mark.parametrize("key", [110, 99])
def test_a_key_beyond_its_table_names_table_lookup_and_key(key):
    config = keyed("error", 100)
    rules = IdRules([TableLookup(config, "f", "vectors", config.pooling)])
    says = (
        f"table t: lookup vectors: feature f has the id {key}, which is outside its 10 rows "
        r"\(100..109\): give"
    )
    with pytest.raises(IdError, match=says):
        rules(KeyedJaggedTensor(["f"], torch.tensor([101, key]), None, torch.tensor([2])))


@pytest.mark.parametrize(
    ("rule", "first", "says"),
    [
        ("hash", 5, "tables.t.min_key=5: a hashed table takes any id; leave min_key out"),
        ("error", 2**63 - 1, "tables.t.min_key=.*: ids .* must fit into 64 bits"),
        ("error", 0.5, "tables.t.min_key=0.5: must be a whole number"),
    ],
)
def test_a_first_key_that_cannot_be_is_refused(rule, first, says):
    with pytest.raises(ConfigError, match=says):
        keyed(rule, first)


def test_a_largest_key_may_be_the_last_row_or_one_more_and_must_fit():
    for most in (109, 110):
        check_max_key(keyed("error", 100), most)
    for most in (111, 99):
        with pytest.raises(
            ConfigError,
            match=f"tables.t.max_key={most}: 10 rows from min_key=100 on hold the keys 100..109",
        ):
            check_max_key(keyed("error", 100), most)
