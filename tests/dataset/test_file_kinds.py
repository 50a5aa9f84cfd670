"""Text with a delimiter is read; what no format reads is told from its first bytes."""

import bz2
import gzip
import io
import json
import pickle
import sqlite3
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import orc

from recapp.dataset.data_file import stamp_of
from recapp.dataset.files import file_names
from recapp.dataset.formats import DelimitedText
from recapp.dataset.schema import Schema
from recapp.dataset.sequential_rows import arrow_chunks
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


def zipped():
    def write(sink):
        with zipfile.ZipFile(sink, "w") as archive:
            archive.writestr("a.csv", "x")

    return written(write)


SCHEMA = Schema("label", ("row",), ("one",))
TABLE = pa.table(ROWS)
JSON_LINES = "".join(json.dumps(row) + "\n" for row in TABLE.to_pylist())
READ = {
    "x.csv": text(",").encode(),
    "x.tsv": text("\t").encode(),
    "tabs": text("\t").encode(),
    "semicolons.csv": text(";").encode(),
    "bars, no header": text("|", header=False).encode(),
    "x.inter": text("\t").encode(),
    "mark.csv": text(",").encode("utf-8-sig"),
    "latin-1.csv": text(",").replace(",a", ",é").encode("latin-1"),
    "x.csv.gz": gzip.compress(text(",").encode()),
    "x.csv.bz2": bz2.compress(text(",").encode()),
    "x.csv.zst": pa.compress(text("\t").encode(), "zstd", asbytes=True),
    "gz.any": gzip.compress(text(",").encode()),
}


@pytest.mark.parametrize("name", READ)
def test_text_is_read_whatever_its_delimiter_compression_and_suffix(tmp_path, name):
    (tmp_path / name).write_bytes(READ[name])
    header = "header" not in name
    schema = SCHEMA if header else Schema("f0", ("f1",), ("f2",))
    ((file, _, chunk),) = arrow_chunks(open_source(str(tmp_path / name), schema))
    rows = [
        chunk.column(file.columns[one]).to_pylist() for one in (*schema.targets, *schema.inputs)
    ]
    wanted = [["é" if "latin" in name and one == "a" else one for one in v] for v in ROWS.values()]
    assert rows == wanted


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("label,user,item", True),
        ("0,1,2", True),
        (",label,user", True),
        ('"label","user"', True),
        ("a;b;c", True),
        ("1,5,0", False),
        ("0,1,1", False),
        ("1,,abc", False),
        ("3,x,y", False),
        ("0.5,a", False),
    ],
)
def test_a_header_is_distinguished_from_a_row(tmp_path, header, named):
    (tmp_path / "x.csv").write_text(f"{header}\n")
    path = str(tmp_path / "x.csv")
    columns, rows = DelimitedText().facts(path, stamp_of(path))
    assert rows == [0 if named else 1] and (columns.names[:2] == ["f0", "f1"]) != named


def sqlite():
    with sqlite3.connect(":memory:") as base:
        base.execute("create table clicks (label)")
        return base.serialize()


NAMED = {
    "an SQLite database: duckdb FILE -c": sqlite(),
    "a DuckDB database: duckdb FILE -c": bytes(8) + b"DUCK" + bytes(50),
    "an Avro file, not Parquet: polars.read_avro": b"Obj\x01" + bytes(20),
    "a Feather file of version 1, not Parquet: pandas.read_feather": b"FEA1" + bytes(9),
    "an HDF5 file, not Parquet: pandas.read_hdf": b"\x89HDF\r\n\x1a\n" + bytes(9),
    "an array of NumPy": written(lambda sink: np.save(sink, np.zeros(2))),
    "a zip archive, which workbooks of Excel, npz of NumPy and files of torch.save": zipped(),
    "a pickle, not Parquet: load it if you trust it": pickle.dumps([1]),
    "compressed by xz": b"\xfd7zXZ\0" + bytes(9),
    "compressed by gzip, not Parquet: decompress it": gzip.compress(bytes(9)),
    "compressed by gzip (an Arrow file)": gzip.compress(arrow(TABLE)),
    "Parquet with an encrypted footer": b"PARE" + bytes(20),
    "text with a delimiter between columns, not Parquet: give it the suffix .csv": text(
        ","
    ).encode(),
    "text without a delimiter of one sign, not Parquet: put tabs": text("::").encode(),
    "text in UTF-16, not Parquet: write it in UTF-8": text(",").encode("utf-16"),
    "JSON, not Parquet: polars.read_ndjson": JSON_LINES.encode(),
    "compressed by gzip (JSON), not Parquet: decompress": gzip.compress(JSON_LINES.encode()),
    "JSON, not Parquet: where each line is a row, else": json.dumps(TABLE.to_pylist()).encode()
    + b"\n",
    "JSON, not Parquet: else pandas.read_json": b'{\n"label": [0, 1]\n}\n',
    "libsvm, not Parquet: write a column of lists": b"1 1:6 5:.5\n0 2:3\n",
    "an Arrow file, not Parquet: polars.read_ipc": arrow(TABLE),
    "an Arrow stream, not Parquet: polars.read_ipc_stream": arrow(TABLE, stream=True),
    "an ORC file, not Parquet: pandas.read_orc": written(lambda sink: orc.write_table(TABLE, sink)),
}


@pytest.mark.parametrize("said", NAMED)
def test_what_is_no_parquet_is_named_with_what_to_do(tmp_path, said):
    path = tmp_path / "logs.parquet"
    path.write_bytes(NAMED[said])
    with pytest.raises(DataError) as error:
        open_source(str(path), SCHEMA)
    assert str(error.value).startswith(f"dataset.path: {path} is {said.partition(':')[0]}")
    assert said.partition(":")[2] in str(error.value)


def test_text_with_another_suffix_is_named_with_it_and_so_are_rows_that_do_not_fit(tmp_path):
    for name, content, problem in (
        ("x.csv", JSON_LINES, "is JSON, not CSV: polars"),
        ("x.csv", "label,row,one\n0,1\n", r"is not a whole CSV file \(CSV parse error: .* got 2"),
        ("x.csv.gz", "", r"is not a whole CSV file \(Empty CSV file\)"),
        ("x.csv", "label::row::one\n0::1::2\n", "no column for label"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=problem):
            open_source(str(tmp_path / name), SCHEMA)


def test_a_value_that_cannot_be_read_names_its_file(tmp_path):
    (tmp_path / "x.csv").write_bytes(text(",").encode() * 9000 + b"0,1,\xff\n")
    with pytest.raises(DataError, match=r"x\.csv: cannot be read \(.* invalid UTF8"):
        list(arrow_chunks(open_source(str(tmp_path / "x.csv"), SCHEMA)))


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"", b"\0\1\2\3" * 9])
def test_damaged_parquet_and_unknown_bytes_are_not_whole_parquet(tmp_path, content):
    (tmp_path / "logs.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"is not a whole Parquet file .*; write it again or leave"):
        open_source(str(tmp_path), SCHEMA)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("dbfs:/logs/criteo", "dbfs:/logs/criteo: no such file or directory$"),
        ("no/such/path", "no/such/path: no such file or directory$"),
    ],
)
def test_paths_of_other_systems_are_told_what_a_path_is(path, said):
    with pytest.raises(DataError, match=said):
        file_names(path)
