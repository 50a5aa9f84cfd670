"""A path that is no Parquet is told from its first bytes; the lines that an error shows keep every
row.
"""

import bz2
import gzip
import io
import json
import pickle
import sqlite3
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from recapp.dataset.files import file_names
from recapp.dataset.schema import Schema
from recapp.dataset.source import open_source
from recapp.errors import DataError

ROWS = {"label": ["0", "1", "0"], "row": ["1", "2", "007"], "one": ["a", "7", ""]}


def text(delimiter, header=True):
    lines = [*([[*ROWS]] if header else []), *zip(*ROWS.values(), strict=True)]
    return "".join(delimiter.join(line) + "\n" for line in lines)


def arrow(table, *, stream=False):
    sink = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def written(write):
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def zipped(*names):
    def write(sink):
        with zipfile.ZipFile(sink, "w") as archive:
            for name in names:
                archive.writestr(name, "x")

    return written(write)


SCHEMA = Schema("label", ("row",), ("one",))
TABLE = pa.table(ROWS)
JSON_ROWS = TABLE.to_pylist()
JSON_LINES = "".join(json.dumps(row) + "\n" for row in JSON_ROWS)
BLANKS = text(" ").replace(" \n", " b\n")  # a row's last value cannot be empty
CONVERTED = {
    "tabs": text("\t").encode(),
    "semicolons": text(";").encode(),
    "bars, no header": text("|", header=False).encode(),
    "colons": text("::").encode(),
    "colons, no header": text("::", header=False).encode(),
    "blanks": (" " + BLANKS.replace(" ", "  ")).encode(),
    "blanks, no header": BLANKS.partition("\n")[2].encode(),
    "utf-16": text(",").encode("utf-16"),
    "latin-1": text(",").replace(",a", ",é").encode("latin-1"),
    "bz2": bz2.compress(text(",").encode()),
    "zstd": pa.compress(text("\t").encode(), "zstd", asbytes=True),
    "gz of colons": gzip.compress(text("::").encode()),
    "JSON lines": JSON_LINES.encode(),
    "gz of JSON lines": gzip.compress(JSON_LINES.encode()),
    "JSON array": json.dumps(JSON_ROWS, indent=1).encode(),
    "gz of a JSON array": gzip.compress(json.dumps(JSON_ROWS).replace("},", "},\n").encode()),
    "Arrow": arrow(TABLE),
    "Arrow stream": arrow(TABLE, stream=True),
    "ORC": written(lambda sink: orc.write_table(TABLE, sink)),
}


def lines_for(path):
    """Return the lines of Python that an error shows for a path."""
    with pytest.raises(DataError, match="is read after it is converted to Parquet") as error:
        file_names(str(path))
    return error.value.__notes__


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", CONVERTED)
def test_the_lines_convert_what_their_file_is_and_keep_every_row(tmp_path, name):
    file = tmp_path / ("logs.gz" if name == "gz of colons" else "logs.any")
    file.write_bytes(CONVERTED[name])
    exec("\n".join(lines_for(file)), {})
    found = pq.read_table("data/logs/logs.parquet")
    wanted = TABLE
    if "header" in name:
        wanted = wanted.rename_columns(["f0", "f1", "f2"])
    if "blanks" in name:
        wanted = wanted.set_column(2, wanted.column_names[2], pa.array(["a", "7", "b"]))
    if "latin" in name:
        wanted = wanted.set_column(2, "one", pa.array(["é", "7", ""]))
    assert found.to_pydict() == wanted.to_pydict()


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv.bz2", "a.csv.zst"])
def test_a_directory_of_such_files_is_converted(tmp_path, name):
    kinds = {".jsonl": "JSON lines", ".bz2": "bz2", ".zst": "zstd"}
    for number in range(2):
        file = tmp_path / "logs" / f"{number}{name}"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(CONVERTED[kinds[file.suffix]])
    exec("\n".join(lines_for(tmp_path / "logs")), {})
    assert sum(pq.read_table(file).num_rows for file in Path("data/logs").iterdir()) == 6


def test_all_text_of_a_directory_is_converted_whatever_its_suffixes(tmp_path):
    (tmp_path / "logs").mkdir()
    rows = CONVERTED["JSON lines"]
    (tmp_path / "logs/a.json").write_bytes(rows)
    (tmp_path / "logs/b.json.gz").write_bytes(gzip.compress(rows))
    (tmp_path / "logs/README").write_text("Rows of last week.\nAsk us.\n")
    exec("\n".join(lines_for(tmp_path / "logs")), {})
    assert sorted(p.name for p in Path("data/logs").iterdir()) == ["a.parquet", "b.json.parquet"]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_libsvm_becomes_lists(tmp_path, compress):
    (tmp_path / "rows.txt").write_bytes(compress(b"1 1:6 5:.5\n0 2:3\n0\n"))
    exec("\n".join(lines_for(tmp_path / "rows.txt")), {})
    assert pq.read_table("data/rows/rows.parquet").to_pydict() == {
        "label": ["1", "0", "0"],
        "ids": [[1, 5], [2], []],
        "values": [[6.0, 0.5], [3.0], []],
    }


def sqlite():
    with sqlite3.connect(":memory:") as base:
        base.execute("create table clicks (label)")
        return base.serialize()


RECORD = b"\n\x10example of a row"
NAMED = {
    "an SQLite database: duckdb FILE -c": sqlite(),
    "a DuckDB database: duckdb FILE -c": bytes(8) + b"DUCK" + bytes(50),
    "an Avro file, not Parquet: polars.read_avro": b"Obj\x01" + bytes(20),
    "a Feather file of version 1, not Parquet: pandas.read_feather": b"FEA1" + bytes(9),
    "an HDF5 file, not Parquet: pandas.read_hdf": b"\x89HDF\r\n\x1a\n" + bytes(9),
    "an Excel workbook, not Parquet: pandas.read_excel": zipped("[Content_Types].xml", "xl/x"),
    "arrays of NumPy (npz)": written(lambda sink: np.savez(sink, a=np.zeros(2))),
    "an array of NumPy": written(lambda sink: np.save(sink, np.zeros(2))),
    "a file of torch.save": zipped("archive/data.pkl", "archive/version"),
    "a zip archive, not Parquet: unzip it": zipped("a.csv"),
    "a pickle, not Parquet: load it if you trust it": pickle.dumps([1]),
    "compressed by xz": b"\xfd7zXZ\0" + bytes(9),
    "compressed by gzip, not Parquet: decompress it": gzip.compress(bytes(9)),
    "compressed by gzip (an Arrow file)": gzip.compress(arrow(TABLE)),
    "a TFRecord file": len(RECORD).to_bytes(8, "little") + bytes(4) + RECORD + bytes(4),
    "Parquet with an encrypted footer": b"PARE" + bytes(20),
    "text with ',' between columns, not Parquet: give it another suffix": text(",").encode(),
    "JSON lines, not Parquet: give it another suffix": JSON_LINES.encode(),
    "a JSON document, not Parquet: pandas.read_json": b'{\n"label": [0, 1]\n}\n',
}


@pytest.mark.parametrize("said", NAMED)
def test_what_is_no_parquet_is_named_with_what_to_do(tmp_path, said):
    path = tmp_path / "logs.parquet"
    path.write_bytes(NAMED[said])
    with pytest.raises(DataError) as error:
        open_source(str(path), SCHEMA)
    assert str(error.value).startswith(f"dataset.path: {path} is {said.partition(':')[0]}")
    assert said.partition(":")[2] in str(error.value)


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"", b"\0\1\2\3" * 9])
def test_damaged_parquet_and_unknown_bytes_are_not_whole_parquet(tmp_path, content):
    (tmp_path / "logs.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"is not a whole Parquet file .*; write it again or leave"):
        open_source(str(tmp_path), SCHEMA)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("dbfs:/logs/criteo", "; a path of this machine is meant, such as /dbfs/logs/criteo"),
        ("reczoo/Criteo_x1", "`hf download reczoo/Criteo_x1 --repo-type dataset --local-dir DIR`"),
        ("no/such/path", "no/such/path: no such file or directory$"),
    ],
)
def test_paths_of_other_systems_are_told_what_a_path_is(path, said):
    with pytest.raises(DataError, match=said):
        file_names(path)
