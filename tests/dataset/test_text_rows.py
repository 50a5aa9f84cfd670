"""Rows of text: found as Python's csv module finds them, in ranges of a file, counted once."""

import csv
import gzip
import io
import multiprocessing
import random
import time

import numpy as np
import pytest

from recapp.dataset import text_rows
from recapp.dataset.data_file import DataFile, chunks, facts_of
from recapp.dataset.delimited_text import DelimitedText
from recapp.dataset.json_lines import JsonLines
from recapp.dataset.storage import stamp_of
from recapp.errors import DataError

FIELDS = 3


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(text_rows, "GROUP_ROWS", 8)
    monkeypatch.setattr(text_rows, "BATCH_ROWS", 4)
    monkeypatch.setattr(text_rows, "BLOCK_BYTES", 64)
    text_rows._layout.cache_clear()
    yield
    text_rows._layout.cache_clear()


def opened(path, format=None):
    """Return a file, opened."""
    format = format or DelimitedText()
    stamp = stamp_of(str(path))
    types, rows, _ = facts_of(format, str(path), stamp)
    starts = np.cumsum([0, *rows]).tolist()
    return DataFile(str(path), format, stamp, {name: name for name in types.names}, tuple(starts))


def rows_of(file, group=None):
    """Return the rows of a file, or of one of its row groups."""
    found = []
    for number, first in enumerate(file.starts[:-1]):
        count = file.starts[number + 1] - first
        for _, chunk in chunks(file, number, count) if count and group in (None, number) else ():
            found += [tuple(row.values()) for row in chunk.to_pylist()]
    return found


def split(text, block, delimiter=",", quote='"'):
    """Return the rows of a text that is read in blocks, and the fields of the odd ones."""
    names = [str(field) for field in range(FIELDS)]
    head = text_rows.Head(0, names, delimiter.encode(), ord(quote) if quote else -1)
    columns = text_rows.pa.schema([(name, text_rows.pa.string()) for name in names])
    good = []
    odd = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(text_rows, "BLOCK_BYTES", block)
        for rows in text_rows._rows(io.BytesIO(text.encode()), head, 0):
            odd += rows.odd_K2[:, 1].tolist()
            batch = DelimitedText().batch(rows, columns, None, head)
            good += [list(row.values()) for row in batch.to_pylist()]
    return good, odd


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("delimiter", [",", "\t", "::"])
def test_rows_and_values_are_those_of_pythons_csv(seed, delimiter):
    """1,000 texts of each kind, cut into blocks at any byte."""
    draw = random.Random(seed)
    signs = ["a", "é", delimiter, delimiter, '"', '"', "\n", "\r\n", "\r", " ", ":" * (seed % 2)]
    for _ in range(1000):
        text = "".join(draw.choice(signs) for _ in range(draw.randrange(40)))
        python = text.replace("::", "\x1f") if delimiter == "::" else text
        sign = "\x1f" if delimiter == "::" else delimiter
        wanted = [row for row in csv.reader(io.StringIO(python, newline=""), delimiter=sign) if row]
        wanted = [[value.replace("\x1f", "::") for value in row] for row in wanted]
        good, odd = split(text, draw.choice([3, 7, 1000]), delimiter)
        if -1 in odd:  # Python takes a quote that never ends for one that ends with the text
            assert odd.index(-1) == len(odd) - 1
            odd.pop()
            wanted.pop()
        assert good == [row for row in wanted if len(row) == FIELDS], repr(text)
        assert odd == [len(row) for row in wanted if len(row) != FIELDS], repr(text)


def test_no_character_quotes_where_the_settings_say_so():
    assert split('"a,b",c\n1,"2,3"\n', 1000, quote="") == (
        [['"a', 'b"', "c"], ["1", '"2', '3"']],
        [],
    )


def _text(rows):
    lines = ["id,text", *(f'{row},"line{row % 3 * chr(10)}, end"' for row in range(rows))]
    return "\r\n".join(lines) + "\r\n" * (rows % 2)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 41])
def test_a_file_is_read_by_ranges_that_each_begin_at_a_row(tmp_path, small_groups, rows):
    (tmp_path / "x.csv").write_text(_text(rows), newline="")
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(_text(rows).encode()))
    plain, packed = opened(tmp_path / "x.csv"), opened(tmp_path / "x.csv.gz")
    wanted = [(str(row), f"line{row % 3 * chr(10)}, end") for row in range(rows)]
    assert rows_of(plain) == wanted == rows_of(packed)
    assert packed.starts == (0, rows)
    for number, first in enumerate(plain.starts[:-1]):
        assert plain.starts[number + 1] - first <= 8
        assert rows_of(plain, number) == wanted[first : first + 8]


class Recorded:
    """A stream that adds the number of bytes of each read to a list."""

    def __init__(self, stream, counts):
        self.stream = stream
        self.counts = counts

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()

    def seek(self, to):
        self.stream.seek(to)

    def readinto(self, memory):
        self.counts.append(self.stream.readinto(memory))
        return self.counts[-1]


def test_a_range_is_read_without_the_bytes_before_it(tmp_path, small_groups, monkeypatch):
    path = tmp_path / "x.csv"
    path.write_text(_text(64), newline="")
    file = opened(path)
    counts = []
    stream = text_rows.TextFile.open
    monkeypatch.setattr(text_rows.TextFile, "open", lambda self: Recorded(stream(self), counts))
    assert rows_of(file, 6)[0] == ("48", "line, end")
    group = text_rows._layout(file.format, file.path, file.stamp)[0].groups[6]
    assert sum(counts) == group.last - group.first < len(path.read_bytes()) / 7


def test_a_block_of_text_leaves_no_small_batch_behind(tmp_path, small_groups):
    path = tmp_path / "x.csv"
    path.write_text("row,text\n" + "".join(f"{row},{'x' * 8}\n" for row in range(10, 26)))
    for group in (0, 1):  # five rows are in a block
        batches = chunks(opened(path), group, 8)
        assert [batch.num_rows for _, batch in batches] == [4, 4]


@pytest.mark.parametrize("format", [DelimitedText(), JsonLines(bad_rows=1)])
def test_rows_are_counted_once_for_all_runs(tmp_path, small_groups, monkeypatch, format):
    monkeypatch.setattr(text_rows, "CACHED_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "x"
    path.write_text(_text(41) if format.name == "CSV" else '{"a": [1, 2]}\n{"a": 7\n' + "{}\n" * 30)
    first = opened(path, format)
    wanted = rows_of(first)
    text_rows._layout.cache_clear()
    facts_of.cache_clear()
    with monkeypatch.context() as patches:
        patches.setattr(text_rows, "_found", None)
        assert opened(path, format) == first and rows_of(first) == wanted
    (entry,) = (tmp_path / "cache/recapp/rows").iterdir()
    for damage in ("", "{}", "[1]", entry.read_text().replace("groups", "other")):
        entry.write_text(damage)
        text_rows._layout.cache_clear()
        facts_of.cache_clear()
        assert opened(path, format) == first
    path.write_text(path.read_text() + ("99,x\n" if format.name == "CSV" else "{}\n"))
    assert opened(path, format).starts[-1] == first.starts[-1] + 1
    assert len(list((tmp_path / "cache/recapp/rows").iterdir())) == 2


def test_one_process_counts_and_the_next_one_takes_over(tmp_path, small_groups, monkeypatch, capfd):
    """The first of three processes dies as it counts; one of the others counts, the last reads."""
    monkeypatch.setattr(text_rows, "CACHED_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "x.csv"
    path.write_text(_text(41))
    counting, counted = tmp_path / "counting", tmp_path / "counted"
    found = text_rows._found

    def slowly(*arguments):
        with open(counted, "a") as file:
            file.write("once\n")
        if not counting.exists():
            counting.touch()
            time.sleep(60)
        return found(*arguments)

    monkeypatch.setattr(text_rows, "_found", slowly)
    fork = multiprocessing.get_context("fork")
    first, second, third = (fork.Process(target=opened, args=(path,)) for _ in range(3))
    first.start()
    while not counting.exists():
        time.sleep(0.01)
    second.start()
    third.start()
    said = ""
    while said.count("another process does that") < 2:
        said += capfd.readouterr().err
        time.sleep(0.01)
    first.kill()
    for one in (second, third):
        one.join(30)
        assert one.exitcode == 0
    assert counted.read_text() == "once\nonce\n"
    assert len(list((tmp_path / "cache/recapp/rows").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, small_groups, monkeypatch):
    monkeypatch.setattr(text_rows, "CACHED_BYTES", 0)
    (tmp_path / "cache").write_text("a file where the directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.csv").write_text(_text(3))
    assert len(rows_of(opened(tmp_path / "x.csv"))) == 3


@pytest.mark.parametrize(
    ("content", "rows", "line", "problem"),
    [
        ("a,b\n1,2\n3\n4,5\n", 2, 3, "has 1 columns where 2 are expected"),
        ("a,b\r\n1,2\r\n4,5,6\r\n", 1, 3, "has 3 columns where 2 are expected"),
        ('a,b\n1,"2\n3"\n4\n', 1, 4, "has 1 columns where 2 are expected"),
        ('a,b\n1,2\n"4,5\n6,7\n', 1, 3, "begins a quote that never ends; where quotes are only"),
        (
            '{"a": 1}\n{"a": 2\n{"a": 3}\n',
            2,
            2,
            r"does not fit \(JSON parse error: Missing a comma",
        ),
        ('{"a": 1}\n{"a": "x"}\n', 1, 2, "does not fit .*int64 vs string"),
        ('{"a": 1}\nnull\n', 1, 2, "is no JSON object"),
        ('{"a": 1} {"a": 2}\n{"a": 3}\n', 1, 1, "holds 2 JSON values"),
    ],
)
def test_a_bad_row_is_an_error_with_its_line_or_left_out(tmp_path, content, rows, line, problem):
    path = tmp_path / "x"
    path.write_text(content, newline="")
    kind = JsonLines if content[0] == "{" else DelimitedText
    with pytest.raises(DataError, match=f"x: line {line} {problem}.*; mend it, or leave out up to"):
        opened(path, kind())
    file = opened(path, kind(bad_rows=1))
    assert len(rows_of(file)) == file.starts[-1] == rows
    assert facts_of(file.format, str(path), file.stamp).bad[0].startswith(f"line {line} ")


def test_more_bad_rows_than_may_be_are_one_error(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n" + "1,2\n3\n" * 5)
    with pytest.raises(DataError, match=r"line 7 has 1 columns .*; it is bad row 3, and .*skip:2"):
        opened(tmp_path / "x.csv", DelimitedText(bad_rows=2))
    assert len(rows_of(opened(tmp_path / "x.csv", DelimitedText(bad_rows=5)))) == 5
