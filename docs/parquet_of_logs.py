"""Write public logs as Parquet: `python docs/parquet_of_logs.py NAME FROM TO`.

    avazu          the contest's CSV files, with a header         -> TO/avazu.parquet
    movielens_1m   files of user, item, rating, time with tabs    -> TO/movielens_1m.parquet
    open_bandit    directories with all.csv[.gz], item_context.csv -> TO/open_bandit.parquet
    bars_*         the published train.csv, ..., with the columns of
                   conf/experiment/bars_*.yaml                     -> TO/train.parquet, ...

FROM is a file, or a directory whose files are joined. Rows come in the order of time, so that the
last ones, which validate, are later than those that train. Criteo's logs need no such script where
they are Parquet already. Each log has the columns of `conf/dataset/NAME.yaml`.
"""

import hashlib
import sys
from collections import defaultdict, deque
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
import yaml

from recapp.dataset.rows import bucket_ids, log_edges

EXPERIMENTS = Path(__file__).parent.parent / "conf/experiment"
CRITEO_X1 = {
    "train.csv": "30b89c1c7213013b92df52ec44f52dc5",
    "valid.csv": "f73c71fb3c4f66b6ebdfa032646bea72",
    "test.csv": "2c48b26e84c04a69b948082edae46f8c",
}
MD5 = {
    "bars_avazu_x1_finalnet": {
        "train.csv": "f1114a07aea9e996842c71648e0f6395",
        "valid.csv": "d9568f246357d156c4b8030fadb8b623",
        "test.csv": "9e2fe9c48705c9315ae7a0953eb57acf",
    },
    "bars_criteo_x1_dcnv2": CRITEO_X1,
    "bars_criteo_x1_finalnet": CRITEO_X1,
    "bars_criteo_x4_fcn": {
        "train.csv": "4a53bb7cbc0e4ee25f9d6a73ed824b1a",
        "valid.csv": "fba5428b22895016e790e2dec623cb56",
        "test.csv": "cfc37da0d75c4d2d8778e76997df2976",
    },
    "bars_taobaoad_x1_dcnv2": {
        "train.csv": "eaabfc8629f23519b04593e26c7522fc",
        "test.csv": "f5ae6197e52385496d46e2867c1c8da1",
    },
}
BUCKETS = {"bars_criteo_x4_fcn": [f"I{k}" for k in range(1, 14)]}  # numbers that are ids there
LIKED = 4  # the least rating of an item that a user likes
HISTORY = 20  # items that a history holds, the latest ones


def avazu(source: Path) -> pa.Table:
    """Return the labelled rows as text, with the hour of the day, in the order of the files."""
    with csv.open_csv(_files(source)[0]) as first:  # compressed or not
        text = csv.ConvertOptions(column_types=dict.fromkeys(first.schema.names, pa.string()))
    tables = [csv.read_csv(path, convert_options=text) for path in _files(source)]
    rows = pa.concat_tables(table for table in tables if "click" in table.column_names)
    hour = pc.utf8_slice_codeunits(rows["hour"], 6, 8)  # YYMMDDHH
    click = pc.cast(rows["click"], pa.int8())
    rows = rows.drop_columns(["id", "hour", "click"])
    return rows.append_column("hour", hour).append_column("click", click)


def movielens_1m(source: Path) -> pa.Table:
    """Return the ratings by time: `liked` says whether it is 4 or 5; `history` has the items that
    the user liked before that second, the latest last.
    """
    names = csv.ReadOptions(column_names=["user", "item", "rating", "time"])
    tabs = csv.ParseOptions(delimiter="\t")
    rows = pa.concat_tables(csv.read_csv(path, names, tabs) for path in _files(source))
    rows = rows.sort_by([("time", "ascending"), ("user", "ascending"), ("item", "ascending")])
    latest: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=HISTORY))
    waiting: dict[int, tuple[int, list[int]]] = {}  # liked in a second that has not passed
    histories = []
    columns = (rows[name].to_pylist() for name in names.column_names)
    for user, item, rating, time in zip(*columns, strict=True):
        since, liked = waiting.get(user, (time, []))
        if since != time:
            latest[user].extend(liked)
            liked = []
        waiting[user] = (time, [*liked, item] if rating >= LIKED else liked)
        histories.append(list(latest[user]))
    known = {
        "user": rows["user"],
        "item": rows["item"],
        "history": pa.array(histories, pa.list_(pa.int64())),
        "liked": pc.cast(pc.greater_equal(rows["rating"], LIKED), pa.int8()),
    }
    return pa.table(known)


def open_bandit(source: Path) -> pa.Table:
    """Return the impressions of all policies by time, with the features of the item shown."""
    parts = []
    for folder in sorted({path.parent for path in source.rglob("item_context.csv")}):
        (file,) = folder.glob("all.csv*")
        rows = csv.read_csv(file)
        items = csv.read_csv(folder / "item_context.csv")
        shown = rows["item_id"].to_numpy()
        of_items = np.stack([rows[f"user-item_affinity_{k}"].to_numpy() for k in range(80)], 1)
        known_ids = items["item_id"].to_numpy()
        order = np.argsort(known_ids)
        place = order[np.searchsorted(known_ids[order], shown)]
        known = {
            "time": pc.cast(rows["timestamp"], pa.string()),
            "click": pc.cast(rows["click"], pa.int8()),
            "item": rows["item_id"],
            "position": rows["position"],
            "affinity": of_items[np.arange(len(shown)), shown],
            "affinities": of_items.sum(1),
            **{f"user_{k}": rows[f"user_feature_{k}"] for k in range(4)},
            **{f"item_{k}": items[f"item_feature_{k}"].take(place) for k in range(4)},
        }
        parts.append(pa.table(known))
    return pa.concat_tables(parts).sort_by("time")


def bars(name: str, source: Path, target: Path) -> None:
    """Check the published files of an experiment by their md5, and write them as Parquet, block by
    block: ids stay text, numbers are numbers.
    """
    for file, published in MD5[name].items():
        with (source / file).open("rb") as opened:
            md5 = hashlib.file_digest(opened, "md5").hexdigest()
        if md5 != published:
            sys.exit(f"{source / file}: its md5 is {md5}, that of the published file {published}")
    dataset = yaml.safe_load((EXPERIMENTS / f"{name}.yaml").read_text())["dataset"]
    kinds = dict.fromkeys(dataset["sparse"], pa.string())
    numbers = [*dataset.get("dense", ()), *BUCKETS.get(name, ()), dataset["label"]]
    kinds |= dict.fromkeys(numbers, pa.float64())
    options = csv.ConvertOptions(column_types=kinds, include_columns=list(kinds))
    target.mkdir(parents=True, exist_ok=True)
    for file in MD5[name]:
        with csv.open_csv(source / file, convert_options=options) as blocks:
            first = _with_buckets(blocks.read_next_batch(), name)
            with pq.ParquetWriter(target / f"{Path(file).stem}.parquet", first.schema) as writer:
                writer.write_table(first)
                for block in blocks:
                    writer.write_table(_with_buckets(block, name))


def _with_buckets(block: pa.RecordBatch, name: str) -> pa.Table:
    """Return a block with numbers as the ids of `dataset.buckets=log`, where they are ids."""
    table = pa.Table.from_batches([block])
    for column in BUCKETS.get(name, ()):
        numbers = pc.fill_null(table[column], 0.0).to_numpy().astype(np.float32)
        place = table.column_names.index(column)
        table = table.set_column(place, column, pa.array(bucket_ids(numbers, log_edges())))
    return table


def _files(source: Path) -> list[Path]:
    """Return a file, or the data files of a directory; those of the training rows come first."""
    if source.is_file():
        return [source]
    found = [path for path in source.iterdir() if path.suffix in (".csv", ".gz", ".rating")]
    return sorted(found, key=lambda path: ("train" not in path.name, path.name))


LOGS = {"avazu": avazu, "movielens_1m": movielens_1m, "open_bandit": open_bandit}

if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in (*LOGS, *MD5):
        sys.exit(f"usage: python docs/parquet_of_logs.py {'|'.join((*LOGS, *MD5))} FROM TO")
    name, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if name in MD5:
        bars(name, source, target)
        sys.exit()
    table = LOGS[name](source)
    target.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, target / f"{name}.parquet")
    print(f"{table.num_rows:,} rows: {target / f'{name}.parquet'}")
