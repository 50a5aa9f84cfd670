"""A fingerprint of files is small, says which file differs, and believes nothing that it is read
from.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset.dataset_files import numbered_source

from recapp.dataset.data_file import (
    LISTED,
    FileFacts,
    Fingerprint,
    difference,
    file_facts,
)
from recapp.dataset.schema import Schema
from recapp.dataset.source import open_source
from recapp.errors import CheckpointError

DIGEST = "0123456789abcdef"


def files(count):
    return [FileFacts(f"dt={n}/part-0.parquet", n, 100 + n, f"{n:016x}") for n in range(count)]


def test_facts_are_those_of_the_files(tmp_path):
    source = numbered_source(tmp_path / "logs", [[3, 4], [5]])
    first, second = file_facts(source.files)
    assert first[:2] == ("part-0.parquet", 7) and second[:2] == ("part-1.parquet", 5)
    assert first.size == (tmp_path / "logs" / "part-0.parquet").stat().st_size
    assert first.contents != second.contents


def test_a_footer_tells_values_that_take_the_same_bytes_apart(tmp_path):
    for name, least in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        table = pa.table({"row": pa.array([least, 9], pa.int64())})
        pq.write_table(table, tmp_path / name / "a.parquet", compression="none")
    sizes = {(tmp_path / name / "a.parquet").stat().st_size for name in ("one", "other")}
    assert len(sizes) == 1
    schema = Schema(label=None, dense=(), sparse=("row",))
    one, other = (
        file_facts(open_source(str(tmp_path / name), schema).files)[0] for name in ("one", "other")
    )
    assert one[:3] == other[:3] and one.contents != other.contents


@pytest.mark.parametrize("count", [1, 20, LISTED, 5 * LISTED])
def test_files_that_are_the_same_or_more_are_known_by_a_bounded_text(count):
    text = json.dumps(Fingerprint.of(files(count)).to_plain())
    stored = Fingerprint.from_plain(json.loads(text), "a.ckpt")
    assert len(text) < 100_000
    assert difference(stored, files(count)) == difference(stored, files(count + 2)) == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.pop(), "1 of 3,000 files are gone from the end"),
        (lambda found: found.pop(2500), "1 of 3,000 files are gone from the end"),
        (lambda found: found.pop(7), "dt=7/part-0.parquet is gone"),
        (lambda found: found.reverse(), "dt=2999/part-0.parquet stands where dt=0/"),
        (
            lambda found: found.insert(2500, found[0]),
            "one of the files behind the first 1,000 is another one",
        ),
    ],
)
def test_a_difference_among_many_files_is_named_as_well_as_it_can_be(change, says):
    stored = Fingerprint.of(files(3000))
    found = files(3000)
    change(found)
    assert difference(stored, found).startswith(says)


@pytest.mark.parametrize(
    "plain",
    [
        {},
        [],
        7,
        {"count": 1, "digest": DIGEST},
        {"count": 1, "digest": DIGEST, "first": [["a", 1, 2]]},
        {"count": 1, "digest": DIGEST, "first": "a"},
        {"count": 1, "digest": DIGEST, "first": [{"name": "a"}]},
    ],
)
def test_what_is_no_fingerprint_is_one_line(plain):
    with pytest.raises(CheckpointError, match=r"^a\.ckpt: what it says of the files .* damaged"):
        Fingerprint.from_plain(plain, "a.ckpt")
