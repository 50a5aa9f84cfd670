"""Text with a delimiter is read; other files are refused."""

import bz2
import gzip
import json

import pyarrow as pa
import pyarrow.feather as feather
import pytest

from recapp.dataset.delimited_text import DelimitedText
from recapp.dataset.files import file_names
from recapp.dataset.schema import Schema
from recapp.dataset.source import arrow_chunks, open_source
from recapp.dataset.storage import stamp_of
from recapp.errors import DataError

ROWS = {"label": ["0", "1", "0"], "row": ["1", "2", "007"], "one": ["a", "7", ""]}


def text(delimiter, header=True):
    lines = [*([[*ROWS]] if header else []), *zip(*ROWS.values(), strict=True)]
    return "".join(delimiter.join(line) + "\n" for line in lines)


SCHEMA = Schema("label", ("row",), ("one",))
JSON_LINES = "".join(json.dumps(row) + "\n" for row in pa.table(ROWS).to_pylist())
READ = {
    "x.csv": text(",").encode(),
    "x.tsv": text("\t").encode(),
    "tabs": text("\t").encode(),
    "semicolons.csv": text(";").encode(),
    "bars, no header": text("|", header=False).encode(),
    "hive": text("\x01").encode(),
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
    columns, rows, _ = DelimitedText().facts(path, stamp_of(path))
    assert rows == [0 if named else 1] and (columns.names[:2] == ["f0", "f1"]) != named


def test_a_header_that_names_a_column_twice_is_no_row(tmp_path):
    (tmp_path / "x.csv").write_text("label,row,row,one\n0,1,2,a\n")
    with pytest.raises(DataError, match=r"column row \(row\) is there 2 times"):
        open_source(str(tmp_path), SCHEMA)
    (tmp_path / "x.csv").write_text("a,b,b\nb,a,c\n")
    assert open_source(str(tmp_path / "x.csv"), Schema("f0", ("f1",), ("f2",))).rows == 2


def test_what_is_no_text_and_rows_that_do_not_fit_are_refused(tmp_path):
    for name, content, problem in (
        (
            "x.csv",
            JSON_LINES,
            r"is not a whole CSV file \(it is no text with a delimiter between columns\)",
        ),
        ("x.csv", "label,row,one\n0,1\n", "x.csv: line 2 has 2 columns where 3 are expected"),
        ("x.csv.gz", "", r"is not a whole CSV file \(it is empty\)"),
        ("x.csv", "label~row~one\n0~1~2\n", "no column for label"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=problem):
            open_source(str(tmp_path / name), SCHEMA)


def test_a_value_that_cannot_be_read_names_its_file(tmp_path):
    (tmp_path / "x.csv").write_bytes(text(",").encode() + b"0,1,a\n" * 400_000 + b"0,1,\xff\n")
    with pytest.raises(DataError, match=r"x\.csv: row 400,003 holds bytes that are no UTF-8"):
        list(arrow_chunks(open_source(str(tmp_path / "x.csv"), SCHEMA)))


@pytest.mark.parametrize(
    "content", [b"PAR1 and no more", b"", b"ORC" + bytes(20), JSON_LINES.encode()]
)
def test_damaged_parquet_and_unknown_bytes_are_not_whole_parquet(tmp_path, content):
    (tmp_path / "logs.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"is not a whole Parquet file .*; write it again or leave"):
        open_source(str(tmp_path), SCHEMA)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "x.xlsx",
            b"PK\x03\x04" + bytes(90),
            r"in no known format \(\.parquet, .*; write it again",
        ),
        ("x.json", b'[{"label": 1,\n', r"not a whole JSON lines file .*; jq -c '\.\[\]' makes"),
    ],
)
def test_a_file_in_no_known_format_is_not_called_parquet(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        open_source(str(tmp_path / name), SCHEMA)


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


@pytest.mark.parametrize("name", ["x.csv.gz", "x.csv.bz2", "x.csv.zst"])
def test_an_archive_that_is_cut_short_is_one_line(tmp_path, name):
    content = text(",").encode() + b"".join(b"0,%d,a\n" % row for row in range(20_000))
    packed = {
        "gz": lambda: gzip.compress(content),
        "bz2": lambda: bz2.compress(content),
        "zst": lambda: pa.compress(content, "zstd", asbytes=True),
    }[name.rpartition(".")[2]]()
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=rf"{name} is not a whole CSV file \(Truncated compressed"):
        open_source(str(tmp_path / name), SCHEMA)


@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.arrow"])
def test_files_that_go_or_grow_in_mid_run_are_one_line(tmp_path, name):
    path = tmp_path / name
    if name == "x.arrow":
        feather.write_feather(pa.table(ROWS), str(path))
    else:
        path.write_text(text(",") if name == "x.csv" else JSON_LINES)
    source = open_source(str(path), SCHEMA)
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match=f"{name}: has changed since it was opened"):
        list(arrow_chunks(source))
    path.unlink()
    with pytest.raises(DataError, match=rf"{name}: can be read no more \(No such file"):
        list(arrow_chunks(source))
