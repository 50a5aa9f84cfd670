"""Lists that are filled up to a length, and lists in text, give the batches of ragged lists."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recapp.dataset.click_rows import first_outside, open_rows
from recapp.dataset.collate import RawRows
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import schema_of
from recapp.dataset.sequential_rows import table_rows
from recapp.dataset.source import open_files
from recapp.errors import CheckpointError, ConfigError, DataError
from recapp.serving.json_rows import read_rows
from recapp.serving.limits import Limits, Refused
from recapp.sparse.missing_ids import MISSING
from recapp.tables.table_settings import TablesOfDataset

LISTS = [[3, 17], [], [4, 5, 6], [5], [], [17, 4]]
BEHIND = [row + [0] * (3 - len(row)) for row in LISTS]
TEXTS = [" ".join(map(str, row)) for row in LISTS]
FORMS = {  # settings, and the column
    "behind": ({"padding": 0}, BEHIND),
    "before": (
        {"padding": {"seen": 0}},
        [row[len(old) :] + old for row, old in zip(BEHIND, LISTS, strict=True)],
    ),
    "-1, fixed size": (
        {"padding": {"seen": -1}},
        pa.array([row + [-1] * (3 - len(row)) for row in LISTS], pa.list_(pa.int64(), 3)),
    ),
    "text": (
        {"padding": "<pad>"},
        pa.array([[str(i) for i in row] + ["<pad>"] * (3 - len(row)) for row in LISTS]),
    ),
    "hex": ({"padding": "0", "hex": ("seen",)}, [[f"{i:x}" for i in row] for row in BEHIND]),
    "bars": ({"separator": {"seen": "|"}}, [text.replace(" ", "|") for text in TEXTS]),
    "colons, null": (
        {"separator": {"seen": "::"}},
        [text.replace(" ", "::") or None for text in TEXTS],
    ),
    "bytes": ({"separator": {"seen": ","}}, [text.replace(" ", ",").encode() for text in TEXTS]),
    "dictionary": ({"separator": {"seen": " "}}, pa.array(TEXTS).dictionary_encode()),
    "bars, padded": (
        {"separator": {"seen": "|"}, "padding": 0},
        ["|".join(map(str, row)) for row in BEHIND],
    ),
}


def schema(path="logs", **changed):
    settings = DataSettings(
        path=str(path), sparse=("user", "seen"), lanes=1, batch_size=6, **changed
    )
    return settings, schema_of(settings, TablesOfDataset(source="from_dataset"))


def written(path, column):
    rows = len(LISTS)
    labels = [n % 2 for n in range(rows)]
    table = {"label": labels, "user": [0, 1, 2, 0, 4, 5], "seen": column}
    pq.write_table(pa.table(table), path)
    return path


def bags(batch, feature="seen"):
    return [ids.tolist() for ids in batch.sparse[feature].to_dense()]


@pytest.mark.parametrize("name", FORMS)
def test_a_filled_list_and_a_text_train_and_score_as_the_ragged_list(tmp_path, name):
    changed, column = FORMS[name]
    path = written(tmp_path / "rows.parquet", column)
    settings, columns = schema(path, val_share=0, shuffle_rows=0, **changed)
    rows = open_rows(settings, columns)
    (batch,) = rows.training_stream()
    ragged = written(tmp_path / "ragged.parquet", LISTS)
    settings, columns = schema(ragged, val_share=0, shuffle_rows=0)
    (wanted,) = open_rows(settings, columns).training_stream()
    assert bags(batch) == bags(wanted)
    assert torch.equal(batch.sparse.values(), wanted.sparse.values())
    # a model reads rows of any form as its training did
    scored = RawRows(rows.schema, "none").batch(pq.read_table(path))
    assert bags(scored) == LISTS
    assert bags(scored, "user") == [[0], [1], [2], [0], [4], [5]]
    assert table_rows(rows.train, rows.schema, None)[1] == 32  # five ids


def test_requests_are_read_as_training_was():
    _, columns = schema(separator={"seen": "|"}, padding=0)
    scorer = SimpleNamespace(schema=columns, example=None)
    served = SimpleNamespace(scorer=scorer, features=columns.inputs, outputs=("score",))

    def found(*seen, **bounds):
        body = memoryview(json.dumps({"rows": [{"user": 0, "seen": s} for s in seen]}).encode())
        return bags(
            RawRows(columns, "none").batch(read_rows(body, {}, served, Limits(**bounds)).table)
        )

    assert found("3|17|0", "", None, "4") == [[3, 17], [], [], [4]]
    assert found([3, 0, 17], [0], []) == [[3, 17], [], []]
    assert found(7, 0) == [[7], []]
    with pytest.raises(Refused, match="5 ids"):
        found("1|2|3|4", max_ids=4)


def test_padding_of_single_ids_and_what_is_no_id_are_refused(tmp_path):
    path = written(tmp_path / "rows.parquet", LISTS)
    settings, columns = schema(path, val_share=0, padding={"user": 0})
    with pytest.raises(DataError, match=r"dataset\.padding: column user holds one id a row, and"):
        next(iter(open_rows(settings, columns).training_stream()))
    for changed, said in (
        ({"padding": {"sen": 0}}, r"dataset\.padding names sen, .* did you mean seen"),
        ({"separator": {"sen": "|"}}, r"dataset\.separator names sen, .* did you mean seen"),
        ({"separator": {"seen": ""}}, r"dataset\.separator={seen: ''}: must be at least one sign"),
    ):
        with pytest.raises(ConfigError, match=said):
            schema(**changed)
    _, columns = schema(padding=-1, hex=("seen",))
    with pytest.raises(ConfigError, match=r"dataset\.padding=-1 of seen: holds '-1'; an id of a"):
        RawRows(columns, "none").batch(pa.table({"user": [1], "seen": [[1]]}))


@pytest.mark.parametrize(
    "changed", [{"padding": 0}, {"padding": {"seen": "x"}}, {"separator": {"seen": "|"}}]
)
def test_a_checkpoint_of_other_padding_or_separators_is_refused(changed):
    _, plain = schema()
    _, columns = schema(**changed)
    stored = json.loads(json.dumps(columns.id_encoding()))
    columns.check_id_encoding(stored, "c")
    ((key, _),) = changed.items()
    with pytest.raises(CheckpointError, match=rf"c was trained with dataset\.{key}=.*: set it as"):
        plain.check_id_encoding(stored, "c")
    with pytest.raises(CheckpointError, match=rf"c was trained with dataset\.{key}=null: set it"):
        columns.check_id_encoding(plain.id_encoding(), "c")


def test_a_missing_single_id_stays_missing():
    _, columns = schema(padding=0)
    batch = RawRows(columns, "none").batch(pa.table({"user": [None, 0], "seen": [[0], None]}))
    assert (bags(batch, "user"), bags(batch)) == ([[MISSING], [0]], [[], []])


@pytest.mark.parametrize("padding", [-1, {"seen": -1}])
def test_padding_is_no_id_outside_of_its_table(tmp_path, padding):
    rows = pa.table({"label": [1], "user": [3], "seen": [[5, -1, -1]]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    limits = {"user": range(4), "seen": range(9)}
    source = open_files([str(tmp_path / "rows.parquet")], schema()[1])
    assert first_outside(source, schema()[1], limits) == ("seen", -1)
    assert first_outside(source, schema(padding=padding)[1], limits) is None
