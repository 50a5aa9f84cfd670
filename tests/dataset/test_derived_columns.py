"""Columns that are computed from the columns of the logs: the published rules, what is fitted on
training rows, and what a stored model keeps.
"""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import recipe

from recapp.dataset.click_rows import open_rows
from recapp.dataset.collate import Collate, RawRows
from recapp.dataset.data_settings import LOG_EDGES, DataSettings, columns_of, derived_from
from recapp.dataset.decode import decode_ids, ids_of_text
from recapp.dataset.rows import bucket_ids, crossed, log_edges, places, way_gone
from recapp.dataset.schema import Schema, TextIds, check_sizes, schema_of
from recapp.dataset.sequential_rows import (
    ValueCounts,
    ends_of_pieces,
    fitted,
    frequent_values,
    quantile_edges,
    table_rows,
)
from recapp.dataset.source import open_source
from recapp.errors import CheckpointError, ConfigError, DataError
from recapp.run.model_tables import tables_of_model
from recapp.run.run_rows import sized_on_paper
from recapp.settings.records import Constructor
from recapp.sparse.missing_ids import MISSING
from recapp.stored.plain_parts import plain_values, read_values, values_in, written_values
from recapp.tables.table_settings import ListedTable, ListedTables, TablesOfDataset
from recapp.trainer.datamodule import ClickData

NUMBERS = ("a", "b")
IDS = ("x", "y", "many")


def settings(**changed):
    return DataSettings(path="logs", dense=NUMBERS, sparse=IDS, **changed)


def schema(**changed):
    return schema_of(settings(**changed), TablesOfDataset(source="dataset"))


@pytest.fixture
def logs(tmp_path):
    """Eight rows; x=7 occurs three times in the first six, y is missing twice."""
    pq.write_table(
        pa.table(
            {
                "label": [0, 1, 0, 1, 0, 1, 0, 1],
                "a": [None, 1.0, 2.0, 3.0, 4.0, 5.0, 100.0, None],
                "b": pa.array([0, 0, 0, 0, 0, 9, 9, 9]),
                "x": [7, 7, 7, 8, 9, 9, 1, 1],
                "y": ["u", None, "", "v", "v", "w", "u", "u"],
                "many": [[1, 2], [2], [], None, [3], [2], [4, 4], [5]],
            }
        ),
        tmp_path / "rows.parquet",
    )
    return str(tmp_path)


def batch_of(of, logs):
    """All rows, decoded."""
    source = open_source(logs, of)
    return RawRows(of, "none").batch(pq.read_table(source.files[0].path))


def ids_of(batch, feature):
    return batch.sparse[feature].values().tolist()


# ---- the rules


def test_the_rule_log_is_that_of_2014_with_buckets_for_small_numbers_and_for_missing_ones():
    edges = log_edges()
    assert len(edges) == LOG_EDGES and bool((np.diff(edges) > 0).all())
    numbers = [*range(3, 5000), 10**6, 2**31, 2**62]
    slow = [math.floor(math.log(x) ** 2) for x in numbers]
    made = bucket_ids(np.array(numbers, np.float32), edges)
    assert (made - made[0]).tolist() == [level - slow[0] for level in slow]
    small = bucket_ids(np.array([-1e9, -8, -2, -1.5, -1, 0, 1, 2, 2.5], np.float32), edges)
    assert small.tolist() == [1, 1, 7, 7, 8, 9, 10, 11, 12]
    assert bucket_ids(np.array([np.nan], np.float32), edges).tolist() == [MISSING]


def test_no_edge_of_the_rule_log_depends_on_the_last_bits_of_an_exponential():
    """The float32 below an edge stays below sqrt(level) by more than any library errs."""
    for level, edge in enumerate(log_edges()[11:].tolist(), start=1):
        exact = math.exp(math.sqrt(level))
        below = float(np.nextafter(np.float32(edge), np.float32(0)))
        assert below < exact * (1 - 1e-13) and exact * (1 + 1e-13) < edge


def test_quantiles_hold_equal_shares_and_a_frequent_value_fills_several():
    values, counts = np.unique(np.arange(100, dtype=np.float32), return_counts=True)
    edges = quantile_edges(values, counts, 4)
    assert edges.tolist() == [25, 50, 75]
    ids = bucket_ids(values, edges)
    assert np.bincount(ids)[1:].tolist() == [25, 25, 25, 25]
    skewed = quantile_edges(np.array([0, 1], np.float32), np.array([98, 2]), 8)
    assert skewed.tolist() == [1]
    counts = np.array([50, 1, 1, 1, 1, 40, 1, 1])
    assert quantile_edges(np.arange(8, dtype=np.float32), counts, 4).tolist() == [1, 5]
    assert quantile_edges(np.zeros(0, np.float32), np.zeros(0, np.int64), 8).tolist() == []


def test_pieces_lie_between_quantiles_and_hold_a_number_between_0_and_1():
    values = np.array([1, 2, 3, 5, 9], np.float32)
    ends = ends_of_pieces(values, np.array([1, 1, 1, 1, 1]), 4)
    assert ends.tolist() == [1, 2, 3, 5, 9]
    numbers = np.array([-1e38, 1, 2.5, 4, 7, 9, 3e38, np.nan], np.float32)
    pieces = [way_gone(numbers, ends[n : n + 2]) for n in range(4)]
    assert pieces[1].tolist() == [0, 0, 0.5, 1, 1, 1, 1, 0]
    assert pieces[3].tolist() == [0, 0, 0, 0, 0.5, 1, 1, 0]
    assert ends_of_pieces(values, np.array([90, 1, 1, 1, 1]), 4).tolist() == [1, 9]
    assert way_gone(numbers, ends[:0]).tolist() == [0] * 8
    far = np.array([-3e38, 3e38], np.float32)  # the difference is no float32
    assert way_gone(np.array([-3e38, 0, 3e38], np.float32), far).tolist() == [0, 0.5, 1]


def test_a_cross_is_the_xxh64_of_its_ids():
    rng = np.random.default_rng(1)
    for columns in (2, 3):
        ids = [rng.integers(-(2**63), 2**63, 50) for _ in range(columns)]
        raw = [
            b"".join(int(i[n]).to_bytes(8, "little", signed=True) for i in ids) for n in range(50)
        ]
        assert crossed(ids).tolist() == ids_of_text(pa.array(raw), TextIds.HASHED).tolist()


def test_ids_that_are_not_in_a_vocabulary_are_missing():
    known = np.array([MISSING, -3, 8])
    assert places(np.array([8, MISSING, 7, -3, 9]), known).tolist() == [3, 1, MISSING, 2, MISSING]
    assert places(np.array([8]), np.zeros(0, np.int64)).tolist() == [MISSING]


def test_counts_do_not_depend_on_how_values_arrive(monkeypatch):
    monkeypatch.setattr("recapp.dataset.sequential_rows.AT_ONCE", 4)
    values = np.random.default_rng(0).integers(0, 9, 100)
    counts = ValueCounts()
    for part in np.split(values, 10):
        counts.add(part)
    wanted = np.unique(values, return_counts=True)
    assert all(map(np.array_equal, counts.result(), wanted))


# ---- batches


def test_derived_columns_stand_behind_those_of_the_logs(logs):
    made = fitted(
        schema(
            buckets={"a": "log", "b": 2},
            missing_flags=("a",),
            piecewise={"b": 2},
            crosses=(("x", "y"), ("x", "a_bucket")),
            min_frequency={"x": 2, "many": 2, "x_x_y": 2},
        ),
        open_source(logs, schema()),
    )
    assert made.features == ("x", "y", "many", "a_bucket", "b_bucket", "x_x_y", "x_x_a_bucket")
    assert made.numbers == ("a", "b", "a_missing", "b_piece1", "b_piece2")
    batch = batch_of(made, logs)
    assert batch.sparse.keys() == list(made.features)
    assert batch.dense_BI.T.tolist() == [
        [0, 1, 2, 3, 4, 5, 100, 0],
        [0, 0, 0, 0, 0, 9, 9, 9],
        [1, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 1, 1, 1],
        [0] * 8,
    ]
    # 1, 7 and 9 are frequent; 8 shares the row of missing ids
    assert ids_of(batch, "x") == [2, 2, 2, MISSING, 3, 3, 1, 1]
    assert ids_of(batch, "many") == [MISSING, 1, 1, MISSING, 1, 2, 2, MISSING]
    assert batch.sparse["many"].lengths().tolist() == [2, 1, 0, 0, 1, 1, 2, 1]
    assert ids_of(batch, "b_bucket") == [1] * 5 + [2] * 3
    assert ids_of(batch, "a_bucket")[0] == MISSING
    # crosses read ids before vocabularies: only (7, missing) and (1, u) occur twice
    assert (
        ids_of(batch, "x_x_y")
        == [MISSING, *[ids_of(batch, "x_x_y")[1]] * 2]
        + [MISSING] * 3
        + [ids_of(batch, "x_x_y")[6]] * 2
    )
    columns = [made.id_column(name) for name in made.features]
    assert [one and one.rows for one in columns] == [4, None, 3, LOG_EDGES + 2, 3, 3, None]
    none = Collate(made, frozenset({"many"}), "none").batch([])
    assert none.sparse.keys() == list(made.features) and none.dense_BI.shape == (0, 5)


def test_only_training_rows_are_fitted(logs):
    of = schema(buckets=2, min_frequency=2)
    rows = open_rows(replace(settings(buckets=2, min_frequency=2), path=logs, val_share="1/4"), of)
    known = {c.key: c.values.tolist() for c in rows.fitted().schema.derived}
    assert known["x.vocabulary"] == [7, 9]
    assert known["a_bucket.buckets"] == [3]
    assert known["y.vocabulary"][0] == MISSING
    sizes = table_rows(rows.train, rows.fitted().schema, 1000)
    assert sizes == [3, 3, 2, 3, 2] and len(sizes) == len(of.features)
    assert Fraction(1, 4) == rows.settings.share_that_validates


def test_without_derived_columns_nothing_changes(logs):
    plain = schema()
    assert plain.derived == () and plain.features == plain.sparse
    assert "derived" not in plain.id_encoding() and not plain.fits
    source = open_source(logs, plain)
    assert fitted(plain, source) == plain


# ---- stored models


def test_fitted_values_return_from_checkpoints_and_artefacts(logs):
    of = fitted(
        schema(buckets={"a": 3, "b": "log"}, piecewise=3, min_frequency=2),
        open_source(logs, schema()),
    )
    from_checkpoint = values_in(
        {"derived_values": plain_values(of.values)}, of.derived, "best.ckpt"
    )
    from_artefact = read_values(*written_values(of.derived), of.derived)
    for found in (from_checkpoint, from_artefact):
        assert found.keys() == of.values.keys()
        for key, values in found.items():
            assert values.dtype == of.values[key].dtype and np.array_equal(values, of.values[key])
    assert [derived_from(c.plain()) for c in of.derived] == list(of.derived)
    of.check_id_encoding(of.id_encoding(), "best.ckpt")


def test_a_checkpoint_of_other_derived_columns_is_refused():
    stored = schema(buckets="log").id_encoding()
    with pytest.raises(
        CheckpointError, match=r"was trained with a_bucket \(buckets log of a\): se"
    ):
        schema(buckets=16).check_id_encoding(stored, "best.ckpt")
    with pytest.raises(CheckpointError, match=r"was trained without x \(vocabulary 2 of x\)"):
        schema(buckets="log", min_frequency=2).check_id_encoding(stored, "best.ckpt")
    with pytest.raises(CheckpointError, match=r"damaged: ids=.*'derived': 7"):
        schema(buckets="log").check_id_encoding({**stored, "derived": 7}, "best.ckpt")


@pytest.mark.parametrize(
    "meta",
    [{}, {"derived_values": 3}, {"derived_values": {"x.vocabulary": 3}}],
    ids=["none", "no mapping", "no tensor"],
)
def test_a_checkpoint_without_whole_values_is_refused(meta):
    with pytest.raises(
        CheckpointError, match=r"no values of derived columns|is damaged: derived_v"
    ):
        values_in(meta, schema(min_frequency={"x": 1}).derived, "best.ckpt")


def test_stored_values_that_no_fit_gives_are_refused_wherever_they_lie(logs):
    chosen = {"buckets": {"a": 3, "b": "log"}, "piecewise": {"a": 1}, "periodic": {"b": 24}}
    of = fitted(schema(**chosen, min_frequency=2), open_source(logs, schema()))
    vocabulary = np.array([7, 9])
    for key, values in (
        ("a_bucket.buckets", [0, 1, 2]),  # two edges make three buckets
        ("a_bucket.buckets", [0, math.nan]),
        ("a_bucket.buckets", [0, math.inf]),
        ("a_bucket.buckets", np.array([0, 1])),  # whole numbers
        ("b_bucket.buckets", [0, 1]),
        ("a_piece1.piecewise", [1]),
        ("a_piece1.piecewise", [1, 2, 3]),
        ("b_cos.cosine", [25]),
        ("b_cos.cosine", []),
        ("x.vocabulary", vocabulary[::-1].copy()),
        ("x.vocabulary", vocabulary.astype(np.float32)),
        ("x.vocabulary", vocabulary[None]),
    ):
        values = np.array(values, np.float32) if isinstance(values, list) else values
        name = key.partition(".")[0]
        with pytest.raises(
            CheckpointError, match=rf"damaged: derived_values: the values of {name}"
        ):
            values_in(
                {"derived_values": plain_values({**of.values, key: values})}, of.derived, "b.ckpt"
            )
        odd = [replace(c, values=values) if c.key == key else c for c in of.derived]
        if values.ndim == 1 and values.dtype == of.values[key].dtype:
            with pytest.raises(ValueError, match=f"the values of {name}"):
                read_values(*written_values(odd), of.derived)


@pytest.mark.parametrize(
    "line",
    [
        3,
        {"name": "y"},
        {"first": 1},
        {"count": 9},
        {"kind": "wavelet"},
        {"first": -1},
        {"count": 0.5},
    ],
)
def test_an_artefact_with_damaged_lines_is_refused(logs, line):
    of = fitted(schema(min_frequency={"x": 1}), open_source(logs, schema()))
    raw, (known,) = written_values(of.derived)
    damaged = [{**known, **line}] if isinstance(line, dict) else line
    for lines in (damaged, [], [known, known], [{**known, "more": 1}], ["x"]):
        with pytest.raises(ValueError):
            read_values(raw, lines, of.derived)
    with pytest.raises(ValueError, match="not finite and ascending"):
        read_values(raw[::-1], [known], of.derived)


def test_the_frequent_values_of_a_vocabulary_have_the_ids_of_batches(logs):
    source = open_source(logs, schema())
    of = fitted(schema(min_frequency={"x": 2, "y": 3}), source)
    batch = batch_of(of, logs)
    found = dict(frequent_values(source, of, "x", 4))
    assert found == {"7": 2, "9": 3, "1": 1}
    assert [found.get(value, MISSING) for value in "77789911"] == ids_of(batch, "x")
    assert dict(frequent_values(source, of, "y", 9)) == {"u": ids_of(batch, "y")[0]}


@pytest.mark.parametrize(
    ("values", "hex", "wanted"),
    [
        (pa.array([-5, -5, 7], pa.int32()), ("x",), {"-5": 2**32 - 5, "7": 7}),
        (pa.array([2**63 + 1, 2**63 + 1, None], pa.uint64()), (), None),
    ],
    ids=["hexadecimal int32", "uint64"],
)
def test_the_frequent_values_of_a_column_have_the_ids_of_its_type(tmp_path, values, hex, wanted):
    pq.write_table(pa.table({"x": values, "y": [0, 1, 1]}), tmp_path / "part.parquet")
    of = Schema(label="y", dense=(), sparse=("x",), hex=hex)
    found = dict(frequent_values(open_source(str(tmp_path), of), of, "x", 4))
    large = int(decode_ids(values)[0])
    assert found == (wanted or {str(2**63 + 1): large, "missing": MISSING})


def test_a_column_of_lists_has_no_slices(logs):
    with pytest.raises(DataError, match=r"metrics.by=many: has lists of ids"):
        frequent_values(open_source(logs, schema()), schema(), "many", 4)


# ---- bad input


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"buckets": {"c": "log"}}, "dataset.buckets names c, which is no dense column"),
        ({"missing_flags": ("x",)}, "dataset.missing_flags names x, which is no dense column"),
        ({"piecewise": {"x": 4}}, "dataset.piecewise names x, which is no dense column"),
        ({"crosses": (("x", "z"),)}, "dataset.crosses names z, which is no column of ids"),
        ({"crosses": (("x", "a_bucket"),)}, "dataset.crosses names a_bucket, which is no column"),
        ({"crosses": (("x",),)}, r"dataset.crosses: \[x\] must be 2 or 3 different columns"),
        ({"crosses": (("x", "x"),)}, r"dataset.crosses: \[x, x\] must be 2 or 3 different colu"),
        ({"crosses": (("x", "y"), ("x", "y"))}, "dataset.crosses makes x_x_y twice"),
        ({"min_frequency": {"z": 2}}, "dataset.min_frequency names z, which is no column of ids"),
    ],
)
def test_settings_that_name_no_column_are_refused(changed, said):
    with pytest.raises(ConfigError, match=said):
        schema(**changed)


def test_a_derived_column_with_the_name_of_another_is_refused():
    named = DataSettings(path="logs", dense=("a",), sparse=("a_bucket",), buckets="log")
    with pytest.raises(ConfigError, match="the derived column a_bucket has the name of a column"):
        columns_of(named, named.dense, named.sparse)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"buckets": "log"}, "dataset.buckets=log"),
        ({"piecewise": 16}, "dataset.piecewise=16"),
        ({"missing_flags": True}, "dataset.missing_flags=true"),
    ],
)
def test_columns_of_numbers_need_numbers(given, said):
    without = DataSettings(path="logs", sparse=("x",), **given)
    with pytest.raises(ConfigError, match=f"{said}: there are no dense columns"):
        columns_of(without, (), without.sparse)


def test_a_cross_of_lists_is_refused(logs):
    of = schema(crosses=(("x", "many"),))
    with pytest.raises(DataError, match=r"dataset\.crosses: column many holds a list a row"):
        batch_of(of, logs)


def test_sizes_are_those_of_the_columns_or_of_all_features():
    of = schema(buckets="log")
    for sizes in ((5, 5, 5), (5, 5, 5, 9, 9)):
        check_sizes(settings(buckets="log", table_rows=sizes), of)
    with pytest.raises(ConfigError, match="has 4 of the 3 numbers needed"):
        check_sizes(settings(buckets="log", table_rows=(5, 5, 5, 5)), of)


def test_an_unlabelled_schema_keeps_its_derived_columns():
    assert schema(buckets="log").unlabelled().derived == schema(buckets="log").derived
    assert isinstance(schema(), Schema)


LISTED = ListedTables(
    source="list",
    tables=(
        ListedTable(name="one", num_embeddings=9, embedding_dim=4, feature_names=("x", "many")),
        ListedTable(name="two", num_embeddings=9, embedding_dim=4, feature_names=("many", "y")),
    ),
)


@pytest.mark.parametrize(
    ("tables", "least", "reads"),
    [
        (TablesOfDataset(shared={"many": "x"}), {"x": 3}, {"x": ("x", "many")}),
        (TablesOfDataset(shared={"many": "x"}), {"y": 3}, {}),
        (TablesOfDataset(shared={"many": "y", "x": "y"}), 3, {"y": IDS, "x": IDS}),
        (LISTED, {"y": 3}, {"x": IDS, "y": IDS}),
    ],
)
def test_features_that_read_one_table_have_one_vocabulary(logs, tables, least, reads):
    of = schema_of(settings(min_frequency=least), tables)
    own = {c.name: c for c in of.derived}
    assert {name: own[name].reads for name in reads} == reads
    assert own.keys() == {"y"} if not reads else "many" in own
    if "x" in reads and "y" not in reads:
        made = fitted(of, open_source(logs, of))
        # 7 three times in x; 2 in lists alone; 1 twice in x and once in a list
        assert [c.values.tolist() for c in made.derived] == [[1, 2, 7]] * 2
        batch = batch_of(made, logs)
        assert ids_of(batch, "x") == [3, 3, 3, *[MISSING] * 3, 1, 1]
        assert ids_of(batch, "many")[:3] == [1, 2, 2]
        model = Constructor("recapp.models.published_dlrm.DLRM")
        (one, _) = tables_of_model(tables, settings(min_frequency=least), made, model).tables
        assert one.num_embeddings == 4 and one.feature_names == ("x", "many")


def test_features_of_one_table_need_one_frequency():
    shared = TablesOfDataset(shared={"many": "x"})
    with pytest.raises(ConfigError, match="x and many read one table, which has one vocabulary: g"):
        schema_of(settings(min_frequency={"x": 2, "many": 3}), shared)


@pytest.mark.parametrize(
    ("own", "sizes"),
    [
        (["dataset.id_rule=clamp"], [3, 200_000]),
        (["dataset.id_rule=hash", "tables.max_rows=10"], [3, 10]),
        (["dataset.id_rule=hash", "tables.max_rows=null"], [3, 16]),
        (["dataset.id_rule=error", "dataset.table_rows=[70,60]"], [3, 60]),
    ],
)
def test_a_vocabulary_sizes_its_own_table_only(logs, own, sizes):
    named = ["dataset=custom", f"dataset.path={logs}", "dataset.sparse=[x,many]"]
    of = recipe("plan", [*named, "dataset.val_share=1/4", "dataset.min_frequency={x: 2}", *own])
    assert [t.name for t in of.model_tables.tables] == ["x", "many"]  # before any row is read
    made = sized_on_paper(of)
    assert [table.num_embeddings for table in made.model_tables.tables] == sizes
    assert made.dataset.table_rows == of.dataset.table_rows or of.counts_ids


def test_a_vocabulary_leaves_generated_data_as_they_are(tmp_path):
    of = recipe("train", [f"dataset.path={tmp_path}/new", "dataset.min_frequency=2"])
    known = {c.key: np.arange(5) for c in of.schema.derived}
    sized = of.sized(None, known)
    assert not of.counts_ids and sized.dataset.table_rows == of.dataset.table_rows
    assert {table.num_embeddings for table in sized.model_tables.tables} == {6}


def test_on_paper_without_rows_derived_columns_are_assumed(logs, capsys):
    named = ["dataset=custom", "dataset.sparse=[x]", "dataset.dense=[a]", "dataset.buckets=2"]
    named += ["dataset.id_rule=error", "dataset.cardinality=[9]", f"dataset.path={logs}"]
    rows = [t.num_embeddings for t in sized_on_paper(recipe("plan", named)).model_tables.tables]
    of = recipe("plan", [*named, "statistics=assumed"])
    assert sized_on_paper(of) is of and rows == [10, 3]
    assert (
        "tables of derived columns have the rows that settings say: st" in capsys.readouterr().err
    )


def test_a_table_that_a_cross_reads_is_hashed():
    shared = TablesOfDataset(shared={"x_x_y": "x"})
    of = settings(crosses=(("x", "y"),), id_rule="error", cardinality=(9, 9, 9))
    model = Constructor("recapp.models.published_dlrm.DLRM")
    made = tables_of_model(shared, of, schema_of(of, shared), model)
    assert [str(t.id_rule) for t in made.tables] == ["hash", "error", "error"]


def test_data_without_a_trained_model_are_only_fitted_by_training(logs):
    of = replace(settings(buckets="log"), path=logs)
    data = ClickData(of, schema(buckets="log"))
    data.setup("validate")
    with pytest.raises(ConfigError, match=r"belong to a trained model: name it, ckpt_path="):
        data.val_dataloader()
    data = ClickData(of, schema(buckets="log"))
    data.setup("fit")
    assert not data.schema.fits and len(data.schema.values) == 2
