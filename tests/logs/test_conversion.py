"""`recapp.data convert`: rows, types, splits and vocabularies against Python's own; a conversion
that was ended; the same training batches from text and from its conversion.
"""

import csv
import gzip
import hashlib
import json
import threading
from collections import Counter
from functools import partial
from random import Random
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from trainer.runs import compose, fit, make_logs

import recapp
from recapp.data import main
from recapp.dataset import text_rows
from recapp.dataset.schema import Schema
from recapp.dataset.source import Segment, Source, open_source
from recapp.dataset.stream import BatchStream
from recapp.errors import RecappError
from recapp.logs import conversion, fitting, histories, log_parts, orders
from recapp.run.recipe import Convert

ROWS = 3000


def clicks():
    random = Random(5)
    return {
        "click": [int(random.random() < 0.3) for _ in range(ROWS)],
        "user": [f"u{int(random.paretovariate(0.7))}" for _ in range(ROWS)],
        "zip": [f"{random.randrange(1000):05}" for _ in range(ROWS)],
        "shop": [random.randrange(40) if random.random() < 0.8 else "" for _ in range(ROWS)],
        "price": [round(random.random() * 9, 2) for _ in range(ROWS)],
        "tags": ["|".join(map(str, random.sample(range(9), n % 4))) for n in range(ROWS)],
        "ts": [1_600_000_000 + random.randrange(500) for _ in range(ROWS)],
        "hex": [f"{random.randrange(2**32):08x}" for _ in range(ROWS)],
    }


@pytest.fixture
def logs(tmp_path, monkeypatch):
    """Six files of text, in three parts."""
    monkeypatch.setattr(log_parts, "PART_ROWS", 1000)
    table = clicks()
    (tmp_path / "logs").mkdir()
    for number in range(6):
        with open(tmp_path / "logs" / f"{number}.csv", "w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(table)
            rows = list(zip(*table.values(), strict=True))
            lines.writerows(rows[number * ROWS // 6 : (number + 1) * ROWS // 6])
    return tmp_path / "logs"


def convert(logs, out, **settings):
    conversion.convert(Convert(path=str(logs), out=str(out), **settings))
    return json.loads((out / conversion.CONVERSION).read_text())


def rows_of(folder):
    files = sorted(folder.glob("*.parquet"))
    return pa.concat_tables(pq.read_table(file) for file in files).to_pydict()


def test_types_are_those_of_all_values_and_rows_keep_their_order(logs, tmp_path):
    manifest = convert(
        logs, tmp_path / "out", separator={"tags": "|"}, types={"hex": "hex", "shop": "text"}
    )
    schema = pq.read_schema(tmp_path / "out/train/part-00000.parquet")
    assert {field.name: str(field.type) for field in schema} == {
        "click": "int64",
        "user": "string",
        "zip": "string",  # 00042 is no number
        "shop": "string",
        "price": "double",
        "tags": "list<element: int64>",
        "ts": "int64",
        "hex": "int64",
    }
    wanted = clicks()
    wanted["shop"] = [str(one) if one != "" else None for one in wanted["shop"]]
    wanted["tags"] = [[*map(int, one.split("|"))] if one else None for one in wanted["tags"]]
    wanted["hex"] = [int(one, 16) for one in wanted["hex"]]
    assert rows_of(tmp_path / "out/train") == wanted
    assert manifest["splits"][0]["rows"] == ROWS and manifest["splits"][0]["files"] == 3
    for file in manifest["files"]:
        written = (tmp_path / "out" / file["split"] / file["name"]).read_bytes()
        assert (len(written), hashlib.md5(written).hexdigest()) == (file["bytes"], file["md5"])
    assert not (tmp_path / "out/state").exists() and not (tmp_path / "out.parts").exists()


def test_uuids_become_text(tmp_path):
    uuids = [UUID(int=n % 3 << 100) for n in range(50)]
    stored = pa.array([one.bytes for one in uuids], pa.binary(16))
    user = pa.ExtensionArray.from_storage(pa.uuid(), stored)
    seen = pa.ListArray.from_arrays(pa.array(range(51), pa.int32()), user)
    pq.write_table(pa.table({"user": user, "id": user, "seen": seen}), tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", tmp_path / "out", val_share=0, vocabularies={"user": 1})
    texts = [str(one) for one in uuids]
    assert rows_of(tmp_path / "out/train") == {
        "user": [1 + n % 3 for n in range(50)],
        "id": texts,
        "seen": [[one] for one in texts],
    }


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        ("1.5", "double"),
        ("0042", "string"),
        ("x", "string"),
        ("-0", "double"),
        ("18446744073709551615", "string"),  # an id, which a float would round
    ],
)
def test_types_hold_for_the_last_value_too(tmp_path, monkeypatch, capsys, last, kind):
    monkeypatch.setattr(log_parts, "PART_ROWS", 10)
    monkeypatch.setattr(fitting, "LOOKS", 1)
    for number in range(3):
        values = ["7"] * 10 if number < 2 else ["8"] * 9 + [last]
        (tmp_path / f"{number}.csv").write_text("a,b\n" + "".join(f"1,{v}\n" for v in values))
    convert(tmp_path / "*.csv", tmp_path / "out", val_share=0.5)
    assert str(pq.read_schema(tmp_path / "out/train/part-00000.parquet").field("b").type) == kind
    assert f"row 29 of the logs, column b: holds '{last}'" in capsys.readouterr().err
    written = rows_of(tmp_path / "out/train")["b"] + rows_of(tmp_path / "out/val")["b"]
    assert written == [
        {"double": float, "string": str}[kind](v) for v in ["7"] * 20 + ["8"] * 9 + [last]
    ]


@pytest.mark.parametrize(("groups", "largest"), [(1, 1), (19, 3), (100, 4)])
def test_the_last_parts_are_small_so_that_all_threads_end_together(groups, largest):
    segments = tuple(Segment(0, group, 0, 1 << 16) for group in range(groups))
    parts = log_parts.parts_of(Source((), segments, frozenset()))
    assert sum((part.source.segments for part in parts), ()) == segments
    assert [part.first for part in parts] == [
        part.source.segments[0].row_group << 16 for part in parts
    ]
    sizes = [len(part.source.segments) for part in parts]
    assert max(sizes) == sizes[0] == largest and sizes[-1] == 1


def test_another_thread_writes_what_one_compressed_file_holds(logs, tmp_path, monkeypatch):
    (tmp_path / "one.csv.gz").write_bytes(gzip.compress((logs / "0.csv").read_bytes()))
    monkeypatch.setattr(text_rows, "BATCH_ROWS", 64)
    monkeypatch.setattr(conversion, "GROUP_ROWS", 128)
    write = pq.ParquetWriter.write_table
    threads = []

    def seen(*arguments, **named):
        threads.append(threading.current_thread().name.partition("-")[0])
        write(*arguments, **named)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", seen)
    alone, beside = (
        convert(tmp_path / "one.csv.gz", tmp_path / f"out{n}", num_threads=n) for n in (1, 2)
    )
    assert alone["files"] == beside["files"]
    assert threads == ["recapp"] * 4 + ["ThreadPoolExecutor"] * 4


def test_large_whole_numbers_beside_fractions_stay_text(tmp_path):
    for name, value in (("0", "1234567890123456789"), ("1", "1.5")):
        (tmp_path / f"{name}.csv").write_text(f"a,b\n1,{value}\n")
    convert(tmp_path / "*.csv", tmp_path / "out")
    assert rows_of(tmp_path / "out/train")["b"] == ["1234567890123456789", "1.5"]


def test_a_column_without_a_value_in_the_first_rows_gets_the_type_of_the_others(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(log_parts, "PART_ROWS", 10)
    for number in range(2):
        lines = [f"1,{'' if number == 0 else n}\n" for n in range(10)]
        (tmp_path / f"{number}.csv").write_text("a,b\n" + "".join(lines))
    convert(tmp_path / "*.csv", tmp_path / "out")
    assert rows_of(tmp_path / "out/train")["b"] == [None] * 10 + list(range(10))


def test_a_bad_item_of_a_list_is_named_by_its_row(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,1|2\n2,\n3,4|x|5\n4,6\n")
    with pytest.raises(RecappError, match="row 2 of the logs, column b: holds 'x'"):
        convert(tmp_path / "a.csv", tmp_path / "out", separator={"b": "|"}, types={"b": "int64"})


def test_types_that_parquet_lacks_are_named_by_their_columns(tmp_path):
    runs = pc.run_end_encode(pa.array([n // 4 for n in range(12)]))
    with pa.ipc.new_file(
        tmp_path / "a.arrow", pa.schema({"u": runs.type, "i": pa.int64()})
    ) as file:
        file.write(pa.record_batch({"u": runs, "i": range(12)}))
    with pytest.raises(RecappError, match=r"column u: Parquet has no such type .*columns=\[...\]"):
        convert(tmp_path / "a.arrow", tmp_path / "out")
    convert(tmp_path / "a.arrow", tmp_path / "out", columns=["i"])
    assert rows_of(tmp_path / "out/train") == {"i": list(range(12))}


def test_directories_of_others_are_neither_replaced_nor_cleared(logs, tmp_path):
    for name in ("out", "other.parts"):
        (tmp_path / name / "precious").mkdir(parents=True)
    for out in ("out", "other"):
        with pytest.raises(RecappError, match="no conversion has made it"):
            convert(logs, tmp_path / out, overwrite=True)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(RecappError, match="no conversion has made it"):
        convert(logs, tmp_path / "file", overwrite=True)
    assert (tmp_path / "out/precious").exists() and (tmp_path / "other.parts/precious").exists()


def test_splits_by_order_are_the_last_rows(logs, tmp_path):
    convert(logs, tmp_path / "out", val_share=0.1, test_share=0.25)
    users = clicks()["user"]
    cuts = [0, round(0.65 * ROWS), round(0.75 * ROWS), ROWS]
    for name, first, end in zip(("train", "val", "test"), cuts, cuts[1:], strict=False):
        assert rows_of(tmp_path / "out" / name)["user"] == users[first:end]


def test_splits_by_time_share_no_time(logs, tmp_path):
    convert(logs, tmp_path / "out", split="time", time="ts", val_share=0.2, test_share=0.1)
    times = [rows_of(tmp_path / "out" / name)["ts"] for name in ("train", "val", "test")]
    assert max(times[0]) < min(times[1]) <= max(times[1]) < min(times[2])
    assert [len(one) / ROWS for one in times] == pytest.approx([0.7, 0.2, 0.1], abs=0.01)


def test_splits_by_user_share_no_user_and_follow_the_seed(logs, tmp_path):
    found = []
    for seed in (1, 2):
        out = tmp_path / f"out{seed}"
        convert(logs, out, split="user", user="user", val_share=0.3, seed=seed)
        users = [set(rows_of(out / name)["user"]) for name in ("train", "val")]
        assert not users[0] & users[1] and users[0] | users[1] == set(clicks()["user"])
        assert len(users[1]) / len(users[0] | users[1]) == pytest.approx(0.3, abs=0.1)
        found.append(users[1])
    assert found[0] != found[1]


def test_vocabularies_count_training_rows_from_the_most_frequent_on(logs, tmp_path):
    convert(
        logs,
        tmp_path / "out",
        separator={"tags": "|"},
        vocabularies={"user": 3, "shop": 1, "tags": 2},
        val_share=0.5,
    )
    schema = pq.read_schema(tmp_path / "out/train/part-00000.parquet")
    types = [str(schema.field(name).type) for name in ("user", "tags")]
    assert types == ["int32", "list<element: int32>"]
    table = clicks()
    train = ROWS // 2
    for name in ("user", "shop", "tags"):
        values = [one for one in table[name][:train] if one != ""]
        if name == "tags":
            values = [int(each) for one in values for each in one.split("|")]
        counts = Counter(values)
        least = {"user": 3, "shop": 1, "tags": 2}[name]
        order = sorted(
            (one for one in counts if counts[one] >= least), key=lambda one: (-counts[one], one)
        )
        stored = pq.read_table(tmp_path / "out/vocabularies" / f"{name}.parquet").to_pydict()
        assert stored == {"value": order, "count": [counts[one] for one in order]}
        ids = {one: number for number, one in enumerate(order, 1)}
        for split, rows in (("train", table[name][:train]), ("val", table[name][train:])):
            wanted = [
                None
                if one == ""
                else [ids.get(int(each), 0) for each in one.split("|")]
                if name == "tags"
                else ids.get(one, 0)
                for one in rows
            ]
            assert rows_of(tmp_path / "out" / split)[name] == wanted


@pytest.mark.parametrize("liked", [None, {"price": 4}])
@pytest.mark.parametrize("vocabulary", [False, True])
def test_histories_are_earlier_items_of_the_user(logs, tmp_path, monkeypatch, liked, vocabulary):
    monkeypatch.setattr(histories, "EVENTS", 700)  # users in five shards
    out = tmp_path / "out"
    convert(
        logs,
        out,
        history=3,
        user="user",
        item="zip",
        time="ts",
        liked=liked,
        split="time",
        val_share=0.2,
        vocabularies={"zip": 2} if vocabulary else None,
    )
    table = clicks()
    values = (
        pq.read_table(out / "vocabularies/zip.parquet")["value"].to_pylist() if vocabulary else []
    )
    ids = {one: number for number, one in enumerate(values, 1)}
    events = list(
        zip(table["user"], table["ts"], range(ROWS), table["zip"], table["price"], strict=True)
    )
    wanted = {}
    for user, time, row, *_ in events:
        seen = sorted(
            e for e in events if e[0] == user and e[1] < time and (not liked or e[4] >= 4)
        )
        wanted[row] = [ids.get(e[3], 0) if vocabulary else e[3] for e in seen[-3:]]
    cut = min(rows_of(out / "val")["ts"])
    for split, rows in (
        ("train", [e[2] for e in events if e[1] < cut]),
        ("val", [e[2] for e in events if e[1] >= cut]),
    ):
        found = rows_of(out / split)
        assert found["history"] == [wanted[row] for row in rows]
        if liked:
            assert found["liked"] == [int(table["price"][row] >= 4) for row in rows]


@pytest.mark.parametrize("vocabulary", [False, True])
def test_negatives_are_items_that_the_user_does_not_have(logs, tmp_path, monkeypatch, vocabulary):
    monkeypatch.setattr(histories, "EVENTS", 700)
    table = clicks()
    vocabularies = {"shop": 1} if vocabulary else None
    settings = {"user": "user", "item": "shop", "negatives": 2, "liked": {"price": 4}}
    settings |= {"vocabularies": vocabularies, "val_share": 0.1}
    for threads in (1, 3):
        convert(logs, tmp_path / f"out{threads}", num_threads=threads, **settings)
    out = tmp_path / "out1"
    both = [rows_of(out / split) for split in ("train", "val")]
    assert both == [rows_of(tmp_path / "out3" / split) for split in ("train", "val")]
    names = [None, *range(40)]
    if vocabulary:
        names = [None, *pq.read_table(out / "vocabularies/shop.parquet")["value"].to_pylist()]
    owned = {}
    for user, shop in zip(table["user"], table["shop"], strict=True):
        owned.setdefault(user, set()).add(shop)
    columns = {name: both[0][name] + both[1][name] for name in both[0]}
    found = list(zip(*(columns[name] for name in table), columns["liked"], strict=True))
    shop_at = [*table].index("shop")
    for row in zip(*table.values(), strict=True):
        user, shop, price = row[1], row[shop_at], row[4]
        values = (names.index(shop) if vocabulary else shop) if shop != "" else None
        first, *found = found
        tags = row[5] or None
        assert first == (*row[:3], values, price, tags, *row[6:], int(price >= 4))
        drawn = 0
        while found and found[0][-1] == 0 and found[0][:3] == row[:3] and drawn < 2 and price >= 4:
            other, *found = found
            assert other[:3] == row[:3] and other[4:-1] == first[4:-1]
            assert (names[other[shop_at]] if vocabulary else other[shop_at]) not in owned[user]
            drawn += 1
        if len(owned[user]) < 20:  # who has nearly all items gets fewer
            assert drawn == (2 if price >= 4 else 0)
    assert not found


@pytest.mark.parametrize("order", ["time", "user"])
@pytest.mark.parametrize("negatives", [None, 2])
def test_rows_are_sorted_by_event_time(logs, tmp_path, monkeypatch, order, negatives):
    monkeypatch.setattr(orders, "ROWS", 700)
    settings = {"split": "time", "time": "ts", "user": "user", "item": "shop", "val_share": 0.2}
    settings |= {"negatives": negatives, "history": 2}
    convert(logs, tmp_path / "plain", **settings)
    write = conversion._write
    monkeypatch.setattr(conversion, "_write", partial(stops_at_1, write))
    with pytest.raises(KeyboardInterrupt):
        convert(logs, tmp_path / "out", order=order, num_threads=1, **settings)
    monkeypatch.setattr(conversion, "_write", write)
    monkeypatch.setattr(conversion, "_rows_of", None)  # all rows are dealt already
    manifest = convert(logs, tmp_path / "out", order=order, **settings)
    assert sum(file["split"] == "train" for file in manifest["files"]) > 2
    for split in ("train", "val"):
        plain = rows_of(tmp_path / "plain" / split)
        found = rows_of(tmp_path / "out" / split)
        rows = list(zip(*plain.values(), strict=True))
        user, ts = [*plain].index("user"), [*plain].index("ts")
        here = list(zip(*found.values(), strict=True))
        if order == "time":
            assert here == sorted(rows, key=lambda row: row[ts])
            continue
        users = list(dict.fromkeys(row[user] for row in here))
        place = {one: number for number, one in enumerate(users)}
        assert here == sorted(rows, key=lambda row: (place[row[user]], row[ts]))


def stops_at_1(write, number, *others, **named):
    if number == 1:
        raise KeyboardInterrupt
    return write(number, *others, **named)


def test_a_conversion_that_was_ended_goes_on(logs, tmp_path, monkeypatch, capsys):
    settings = {"val_share": 0.4, "vocabularies": {"user": 2}, "num_threads": 1}
    whole = convert(logs, tmp_path / "whole", **settings)
    write = conversion._write
    monkeypatch.setattr(conversion, "_write", partial(stops_at_1, write))
    with pytest.raises(KeyboardInterrupt):
        convert(logs, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
    looked = []
    monkeypatch.setattr(conversion, "_write", write)
    monkeypatch.setattr("recapp.logs.fitting._kinds", lambda *arguments: looked.append(1) or {})
    capsys.readouterr()
    again = convert(logs, tmp_path / "out", **settings)
    assert "goes on after 1 part(s)" in capsys.readouterr().err and not looked
    assert again["files"] == whole["files"]
    assert rows_of(tmp_path / "out/val") == rows_of(tmp_path / "whole/val")


def test_another_recipe_does_not_go_on_from_old_parts(logs, tmp_path, monkeypatch):
    write = conversion._write
    monkeypatch.setattr(conversion, "_write", partial(stops_at_1, write))
    with pytest.raises(KeyboardInterrupt):
        convert(logs, tmp_path / "out", num_threads=1)
    monkeypatch.setattr(conversion, "_write", write)
    convert(logs, tmp_path / "out", columns=("user", "click"))
    assert [*rows_of(tmp_path / "out/train")] == ["user", "click"]


def test_text_and_its_conversion_train_the_same_batches(logs, tmp_path):
    convert(logs, tmp_path / "out", separator={"tags": "|"}, types={"hex": "hex"})
    schema = Schema(
        "click", ("price",), ("user", "zip", "shop", "tags", "hex"), hex=("hex",),
        separator={"tags": "|"},
    )  # fmt: skip
    batches = [
        list(
            BatchStream(
                open_source(str(path), schema), schema, batch_size=128, shuffle_rows=0, lanes=1
            )
        )
        for path in (logs, tmp_path / "out/train")
    ]
    assert len(batches[0]) == ROWS // 128
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.dense_BI, other.dense_BI)
        assert torch.equal(one.sparse.values(), other.sparse.values())
        assert torch.equal(one.sparse.lengths(), other.sparse.lengths())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["out=o"], "path and out must be given"),
        (["LOGS"], "path and out must be given"),
        (["LOGS", "out=o", "columns=[click,usr]"], "columns: usr is no column"),
        (["LOGS", "out=o", "split=time"], "split=time: name its column, time=COLUMN"),
        (["LOGS", "out=o", "history=3", "user=user"], "history=3: name the columns user=, item="),
        (["LOGS", "out=o", "split=time", "time=user"], "0.csv: row 0 of the logs, column user:"),
        (["LOGS", "out=o", "liked={user: 1}"], "0.csv: column user has no numbers"),
        (["LOGS", "out=o", "user=tags", "separator={tags: '|'}"], "user=tags: has lists"),
        (["LOGS", "out=o", "order=user", "time=ts"], "order=user: name the column of times"),
        (["LOGS", "out=o", "order=time", "time=ts", "val_share=.1"], "split=order cuts rows"),
        (["LOGS", "out=o", "val_share=.6", "test_share=.5"], "no rows are left"),
        (["LOGS", "out=o", "types={user: int64}"], "0.csv: row 0 of the logs, column user: holds"),
    ],
)
def test_wrong_input_is_one_line(logs, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    arguments = [str(logs) if one == "LOGS" else one for one in arguments]
    assert main(["convert", *arguments]) == 1
    said = capsys.readouterr().err
    assert words in said and said.count("error") == 1 and not (tmp_path / "o").exists()


def test_errors_name_the_settings_of_these_commands(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n1,2,3\n")
    for verb in ("inspect", "convert"):
        assert main([verb, str(tmp_path / "a.csv"), f"out={tmp_path / 'o'}"]) == 1
        assert " by bad_rows=skip:N" in (said := capsys.readouterr().err) and "dataset." not in said


def test_results_that_are_there_stay_unless_they_may_be_replaced(logs, tmp_path):
    convert(logs, tmp_path / "out")
    with pytest.raises(RecappError, match="overwrite=true"):
        convert(logs, tmp_path / "out", columns=("click",))
    convert(logs, tmp_path / "out", columns=("click",), overwrite=True)
    assert [*rows_of(tmp_path / "out/train")] == ["click"]


def test_columns_inside_of_others_have_names_of_their_own(tmp_path):
    rows = 40
    table = pa.table(
        {
            "user": [{"id": f"u{n % 3}", "age": n} for n in range(rows)],
            "items": [[{"id": n % 5}, {"id": 7}] for n in range(rows)],
            "context": pa.array(
                [[("device", "ios")] if n % 2 else [] for n in range(rows)],
                pa.map_(pa.string(), pa.string()),
            ),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    convert(
        tmp_path / "a.parquet",
        tmp_path / "out",
        val_share=0,
        columns=("user.id", "items.id", "context.device"),
        vocabularies={"user.id": 1},
    )
    assert rows_of(tmp_path / "out/train") == {
        "user.id": [1 + n % 3 for n in range(rows)],
        "items.id": [[n % 5, 7] for n in range(rows)],
        "context.device": ["ios" if n % 2 else None for n in range(rows)],
    }
    manifest = convert(tmp_path / "a.parquet", tmp_path / "all", val_share=0)
    assert manifest["splits"][0]["rows"] == rows
    assert [*rows_of(tmp_path / "all/train")] == ["user.id", "user.age", "items.id", "context"]


@pytest.mark.full
def test_checkpoints_and_artefacts_know_the_conversion_of_their_rows(tmp_path):
    make_logs(tmp_path / "clicks", rows=900)
    out = tmp_path / "out"
    convert(tmp_path / "clicks", out, val_share=0.1)
    fit(compose(out / "train", "trainer.max_steps=2"), tmp_path / "run")
    last = tmp_path / "run/checkpoints/last.ckpt"
    recapp.export_model(last, tmp_path / "art", recapp.Export(report_rows=0, compile=False))
    written = (out / "recapp_dataset.json").read_bytes()
    wanted = {"md5": hashlib.md5(written).hexdigest(), **json.loads(written)}
    del wanted["files"]
    for folder in (last, tmp_path / "art"):
        assert json.loads((folder / "manifest.json").read_text())["conversions"] == [wanted]
