"""`recapp.data convert` beside polars, duckdb and pandas: the same answers, seconds and memory.

    python tests/speed/conversion_rivals.py PYTHON [LOGS]

It is run by a Python that has the rivals (`pip install polars duckdb pandas pyarrow`); PYTHON is
one that has recapp. Each makes typed Parquet of an event log: types found in text, a split by time,
vocabularies, histories of liked items. Rows, types, vocabularies, splits and histories must be
equal. Then each converts LOGS, text with a header, in a process of its own, or the event log.
"""

import csv
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 200_000
LEAST = {"user": 5, "item": 2}
LONGEST = 5
LIKED = 4.0
VAL_SHARE = 0.1
TYPES = {
    "user": "string",
    "item": "int64",
    "zip": "string",
    "rating": "double",
    "ts": "int64",
    "big": "string",
    "click": "int64",
}


def event_log(path):
    """Write events of users in no order, with missing values, and ids that look like numbers."""
    draw = random.Random(7)
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(TYPES)
        for _ in range(ROWS):
            lines.writerow(
                [
                    f"u,{int(2000 * draw.paretovariate(2)) % 9000}",
                    int(draw.paretovariate(0.5)) % 5000,
                    f"{draw.randrange(100_000):05}",
                    draw.choice(["", 1.5, 2.0, 3.0, 4.0, 4.5, 5.0]),
                    1_700_000_000 + draw.randrange(20_000),
                    2**63 + draw.randrange(2**62),
                    int(draw.random() < 0.3),
                ]
            )


def of_recapp(python, path, folder):
    arguments = [
        *("split=time", "time=ts", f"val_share={VAL_SHARE}", "user=user", "item=item"),
        *(f"history={LONGEST}", f"liked={{rating: {LIKED}}}"),
        f"vocabularies={{user: {LEAST['user']}, item: {LEAST['item']}}}",
    ]
    out = folder / "recapp"
    command = [python, "-m", "recapp.data", "convert", str(path), f"out={out}", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = {
        split: pa.concat_tables(map(pq.read_table, sorted((out / split).glob("*.parquet"))))
        for split in ("train", "val")
    }
    for name in LEAST:
        found[name] = pq.read_table(out / "vocabularies" / f"{name}.parquet")
    return found


def of_polars(path):
    kinds = {"string": pl.String, "int64": pl.Int64, "double": pl.Float64}
    rows = pl.read_csv(path, schema={name: kinds[kind] for name, kind in TYPES.items()})
    rows = rows.with_row_index("row")
    counts = rows.group_by("ts").len().sort("ts")
    before = counts["len"].cum_sum().shift(1, fill_value=0)
    cut = counts["ts"][(before.cast(pl.Int64) - round((1 - VAL_SHARE) * ROWS)).abs().arg_min()]
    train = rows.filter(pl.col("ts") < cut)
    found = {}
    for name, least in LEAST.items():
        known = train.group_by(name).len("count").filter(pl.col("count") >= least)
        known = known.sort(["count", name], descending=[True, False])
        found[name] = known.select(pl.col(name).alias("value"), pl.col("count").cast(pl.Int64))
        ids = found[name].select(pl.col("value").alias(name)).with_row_index(f"{name}_id", 1)
        rows = rows.join(ids, on=name, how="left").with_columns(pl.col(f"{name}_id").fill_null(0))
    liked = rows.filter(pl.col("rating") >= LIKED).sort(["ts", "row"])
    seen = liked.select("user", "ts", pl.int_range(1, pl.len() + 1).over("user").alias("seen"))
    items = liked.group_by("user", maintain_order=True).agg(pl.col("item_id").alias("items"))
    rows = rows.with_columns((pl.col("ts") - 1).alias("before")).sort("before")
    rows = rows.join_asof(seen, left_on="before", right_on="ts", by="user", strategy="backward")
    rows = rows.join(items, on="user", how="left").sort("row")
    seen = pl.col("seen").fill_null(0)
    first = pl.max_horizontal(seen - LONGEST, 0)
    rows = rows.select(
        pl.col("user_id").alias("user"),
        pl.col("item_id").alias("item"),
        *("zip", "rating", "ts", "big", "click"),
        pl.col("rating").ge(LIKED).fill_null(False).cast(pl.Int64).alias("liked"),
        pl.col("items").fill_null([]).list.slice(first, seen - first).alias("history"),
    )
    found["train"] = rows.filter(pl.col("ts") < cut)
    found["val"] = rows.filter(pl.col("ts") >= cut)
    return {name: one.to_arrow() for name, one in found.items()}


def of_duckdb(path):
    base = duckdb.connect()
    base.execute(
        "create table rows as select row_number() over () as row, * from read_csv(?, header=true, "
        "types={'user': 'varchar', 'zip': 'varchar', 'big': 'varchar'}, parallel=false)",
        [str(path)],
    )
    wanted = round((1 - VAL_SHARE) * ROWS)
    (cut,) = base.execute(
        "select ts from (select ts, sum(count(*)) over (order by ts) - count(*) as before "
        f"from rows group by ts) order by abs(before - {wanted}), ts limit 1"
    ).fetchone()
    found = {}
    for name, least in LEAST.items():
        base.execute(
            f"create table of_{name} as select {name} as value, count(*) as count, row_number() "
            f"over (order by count(*) desc, {name}) as id from rows where ts < {cut} and {name} is "
            f"not null group by {name} having count(*) >= {least}"
        )
        query = f"select value, count from of_{name} order by id"
        found[name] = base.execute(query).to_arrow_table()
    base.execute(
        "create table wide as select row, ts, coalesce(of_user.id, 0) as user, coalesce(of_item.id,"
        " 0) as item, rows.user as own, zip, rating, big, click, coalesce(rating >= "
        f"{LIKED}, false)::bigint as liked from rows left join of_user on of_user.value = "
        "rows.user left join of_item on of_item.value = rows.item"
    )
    for split, sign in (("train", "<"), ("val", ">=")):
        found[split] = base.execute(
            "select user, item, zip, rating, ts, big, click, liked, coalesce(seen, [])"
            f"[-{LONGEST}:] as history from (select *, list(item order by ts, row) filter (where "
            "liked = 1) over (partition by own order by ts range between unbounded preceding and 1 "
            f"preceding) as seen from wide) where ts {sign} {cut} order by row"
        ).to_arrow_table()
    return found


def compared(own, other):
    """Return the differences of two answers, as text."""
    problems = []
    for name, table in own.items():
        one = table.to_pydict()
        two = other[name].to_pydict()
        if list(one) != list(two):
            problems.append(f"{name}: columns {list(one)}, {list(two)}")
        for column in one:
            if one[column] != two[column]:
                pairs = zip(one[column], two[column], strict=False)
                odd = next(((n, *pair) for n, pair in enumerate(pairs) if pair[0] != pair[1]), None)
                problems.append(f"{name}.{column}: {len(one[column])} {len(two[column])} {odd}")
    return problems


# each is a program of its own, so that none has the memory of another's package
CONVERSIONS = {
    "polars": "import polars as pl; pl.scan_csv(logs, separator=sign, infer_schema_length=None)"
    ".sink_parquet(out, compression='zstd')",
    "duckdb": "import duckdb; duckdb.execute(f\"copy (from read_csv('{logs}', delim='{sign}', "
    "header=true)) to '{out}' (format parquet, compression zstd)\")",
    "pandas": "import pandas as pd; "
    "pd.read_csv(logs, sep=sign).to_parquet(out, compression='zstd')",
}


def measured(who, command):
    """Run a command in a process of its own; return seconds, processor seconds and peak MB."""
    begin = time.monotonic()
    child = (
        "import resource, subprocess, sys, json; subprocess.run(sys.argv[1:], check=True, "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); u = resource.getrusage("
        "resource.RUSAGE_CHILDREN); print(u.ru_utime + u.ru_stime, u.ru_maxrss >> 10)"
    )
    run = [sys.executable, "-c", child, *command]
    processor, peak = subprocess.run(run, check=True, capture_output=True).stdout.split()
    seconds = time.monotonic() - begin
    print(f"| {who:8} | {seconds:7.1f} | {float(processor):11.1f} | {int(peak):7,} |", flush=True)


def main():
    python = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events.csv"
        event_log(events)
        own = of_recapp(python, events, Path(folder))
        types = {name: str(own["train"].schema.field(name).type) for name in TYPES}
        wanted = TYPES | dict.fromkeys(LEAST, "int32")
        problems = [] if types == wanted else [f"types {types}"]
        for who, answer in (("polars", of_polars), ("duckdb", of_duckdb)):
            problems += [f"{who}: {problem}" for problem in compared(own, answer(events))]
        rows = sum(own[split].num_rows for split in ("train", "val"))
        print(*problems or [f"{rows:,} rows: equal answers of recapp, polars and duckdb"], sep="\n")
        logs = sys.argv[2] if len(sys.argv) > 2 else str(events)
        with open(logs) as file:
            sign = "\t" if "\t" in file.readline() else ","
        print("| who      | seconds | processor s | peak MB |", flush=True)
        out = str(Path(folder) / "out")
        measured("recapp", [python, "-m", "recapp.data", "convert", logs, f"out={out}"])
        for who, program in CONVERSIONS.items():
            begin = "import sys; logs, sign, out = sys.argv[1:]; "
            measured(who, [sys.executable, "-c", begin + program, logs, sign, f"{out}.{who}"])
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
