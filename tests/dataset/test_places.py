"""Data of other places: the same rows from a disk, a web server and S3, whatever faults the way
there has; or one line.
"""

import gzip
import os
import pickle
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from dataset_files import SCHEMA, numbered_table, row_numbers, write_numbered
from places import CUT, http_server, s3, shelf, slow, status

from recapp.dataset import scoring, storage
from recapp.dataset.data_file import Fingerprint, difference, file_facts
from recapp.dataset.data_settings import ScoringSettings
from recapp.dataset.files import file_names, left_out
from recapp.dataset.schema import Schema
from recapp.dataset.scoring import RankInput, ScoreFile, check_output, open_input
from recapp.dataset.source import open_source
from recapp.dataset.storage import located, open_file, stamp_of
from recapp.dataset.stream import BatchStream
from recapp.errors import ConfigError, DataError
from recapp.settings.uris import refuse_secrets

FILES = [[20, 30], [25], [0, 40]]


__all__ = ["s3", "shelf"]  # fixtures


@pytest.fixture(autouse=True)
def at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(scoring, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(storage, "WAITS", (0.01, 0.01, 0.01))
    storage._place.cache_clear()
    yield
    storage._place.cache_clear()


def batches(path, *, position=(0, 0), threads=0, schema=SCHEMA, **settings):
    stream = BatchStream(
        open_source(path, schema), schema, batch_size=8, lanes=4, shuffle_rows=16, **settings
    )
    stream.num_threads = threads
    stream.set_position(*position)
    return list(stream)


def assert_same(ours, expected):
    assert len(ours) == len(expected) > 0
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one.dense_BI, other.dense_BI)
        assert torch.equal(one.sparse.values(), other.sparse.values())
        assert torch.equal(one.sparse.lengths(), other.sparse.lengths())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole"),
        pytest.param({"position": (1, 3)}, id="resumed", marks=pytest.mark.full),
        pytest.param({"rank": 1, "world": 2}, id="a rank of two", marks=pytest.mark.full),
        pytest.param({"threads": 2}, id="threads"),
    ],
)
def test_batches_are_those_of_the_same_files_on_disk(shelf, settings):
    write_numbered(shelf.folder, FILES)
    shelf.put()
    assert_same(batches(shelf.uri, **settings), batches(str(shelf.folder), **settings))


@pytest.mark.full
def test_compressed_text_is_read_in_place(shelf):
    table = numbered_table(0, 90).select(["label", "row", "one"])
    lines = [",".join(table.column_names)]
    lines += [",".join(map(str, row.values())) for row in table.to_pylist()]
    (shelf.folder / "rows.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (shelf.folder / "rows.csv").write_text("\n".join(lines))
    shelf.put()
    schema = Schema("label", ("row",), ("one",), integers=("one",))
    for name in ("rows.csv", "rows.csv.gz"):
        ours = batches(f"{shelf.uri}/{name}", schema=schema)
        assert_same(ours, batches(str(shelf.folder / name), schema=schema))


@pytest.mark.full
def test_directories_globs_partitions_and_lists_name_the_same_files(shelf):
    for day in ("dt=2026-1-10", "dt=2026-1-2"):
        write_numbered(shelf.folder / "days" / day, [[3], [3]])
    (shelf.folder / "days" / "dt=2026-1-2" / "_SUCCESS").write_text("done")
    write_numbered(shelf.folder / "flat", [[2], [2]])
    (shelf.folder / "flat" / "notes.txt").write_text("of\nthe logs\n")
    (shelf.folder / "flat" / "_file_list.txt").write_text("1\n/elsewhere/part-1.parquet\n")
    shelf.put()

    def below(top, path):
        return [name.removeprefix(f"{top}/") for name in file_names(f"{top}/{path}")]

    for path in (
        *("days", "days/dt=2026-1-*", "days/dt=2026-1-2", "flat", "flat/part-*.parquet"),
        *("flat/part-[1-9].parquet", "flat/part-0.parquet", "flat/_file_list.txt"),
    ):
        assert below(shelf.uri, path) == below(str(shelf.folder), path), path
    assert left_out(f"{shelf.uri}/flat") == left_out(str(shelf.folder / "flat"))
    assert left_out(f"{shelf.uri}/days") == left_out(str(shelf.folder / "days"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("part-3.parquet", "no such file or directory; did you mean part-0.parquet?"),
        ("part-[7-9].parquet", "no file matches; check the pattern"),
        ("nowhere/part-*.parquet", "no file matches; check the pattern"),
        ("table", "belongs to {uri}/table, a table of Delta Lake"),
        ("mixed", "holds Parquet and CSV|holds part-0.parquet and rows.csv"),
    ],
)
def test_what_directories_of_disks_refuse_is_refused_there_too(shelf, path, problem):
    write_numbered(shelf.folder, [[3]])
    write_numbered(shelf.folder / "table", [[3]])
    (shelf.folder / "table" / "_delta_log").mkdir()
    (shelf.folder / "table" / "_delta_log" / "0.json").write_text("{}")
    write_numbered(shelf.folder / "mixed", [[3]])
    (shelf.folder / "mixed" / "rows.csv").write_text("label,row\n1,2\n")
    shelf.put()
    with pytest.raises(DataError) as info:
        file_names(f"{shelf.uri}/{path}")
    assert str(info.value).startswith(f"dataset.path={shelf.uri}/{path}: ")
    assert any(one in str(info.value) for one in problem.format(uri=shelf.uri).split("|"))


def test_nothing_above_a_bucket_is_asked_for_a_table():
    """A name beside it would be another's bucket."""
    inside = [str(one) for one in located("s3://bucket/logs/a.parquet").parents]
    assert inside == ["s3://bucket/logs", "s3://bucket"]
    assert not located("s3://bucket").parents


def test_a_server_that_does_not_answer_is_asked_once_by_the_next_question(shelf, capsys):
    (shelf.folder / "rows.csv").write_text("label,row\n1,2\n")
    shelf.put()
    path = f"{shelf.uri}/rows.csv"
    shelf.server.faults.next += [status(503)] * 20
    for tries in (", 4 times", ""):
        with pytest.raises(DataError) as info:
            stamp_of(path)
        assert str(info.value).endswith(f"the server answers 503{tries}")
    assert len(capsys.readouterr().err.splitlines()) == 3
    for faults in (0, 2):  # it has answered, so it is asked again
        shelf.server.faults.next[:] = [status(503)] * faults
        stamp_of(path)


@pytest.mark.parametrize(
    "fault",
    [status(503), CUT, *(pytest.param(status(n), marks=pytest.mark.full) for n in (500, 429))],
    ids=str,
)
def test_faults_that_pass_change_no_row_and_are_shown(shelf, fault, capsys):
    write_numbered(shelf.folder, FILES)
    shelf.put()
    expected = batches(str(shelf.folder))
    source = open_source(shelf.uri, SCHEMA)
    shelf.server.faults.next += [None, None, fault, None, None, fault]
    stream = BatchStream(source, SCHEMA, batch_size=8, lanes=4, shuffle_rows=16)
    assert_same(list(stream), expected)
    assert not shelf.server.faults.next
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) in (1, 2) and all("the next try is in 0.01 s" in line for line in shown)
    assert all(line.startswith(shelf.uri) and "not-to-be-shown" not in line for line in shown)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (status(403), "cannot be read: access is denied; give credentials"),
        (status(404), "no s"),
        (status(503), "cannot be read: "),
    ],
    ids=str,
)
def test_faults_that_stay_are_one_line(shelf, fault, problem):
    write_numbered(shelf.folder, [[3]])
    shelf.put()
    shelf.server.faults.next += [fault] * 200
    with pytest.raises(DataError) as info:
        open_source(f"{shelf.uri}/part-0.parquet", SCHEMA)
    shelf.server.faults.next.clear()
    text = str(info.value)
    assert f"{shelf.uri}/part-0.parquet" in text and problem in text and "\n" not in text
    assert "not-to-be-shown" not in text
    if fault == status(503):
        assert text.endswith("the server answers 503, 4 times")


@pytest.mark.full
def test_a_file_that_goes_in_mid_run_is_named(shelf):
    write_numbered(shelf.folder, [[3], [3]])
    shelf.put()
    source = open_source(shelf.uri, SCHEMA)
    shelf.server.faults.next += [status(404)] * 100
    with pytest.raises(DataError) as info:
        list(BatchStream(source, SCHEMA, batch_size=2, lanes=1, shuffle_rows=2))
    shelf.server.faults.next.clear()
    assert str(info.value).startswith(f"{shelf.uri}/part-") and "no such file" in str(info.value)


@pytest.mark.parametrize("rows", [60, 20], ids=["longer", "shorter"])
@pytest.mark.parametrize(
    "before", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 2, 3))]
)
def test_a_file_that_changes_in_mid_run_is_refused(shelf, before, rows):
    """Whatever request is the first of the new version."""
    write_numbered(shelf.folder, [[40]])
    shelf.put()
    stream = BatchStream(open_source(shelf.uri, SCHEMA), SCHEMA, batch_size=40, lanes=1)
    asked = []

    def change(method, _):
        if method in ("GET", "HEAD"):
            asked.append(method)
            if len(asked) == before + 1:
                pq.write_table(numbered_table(1000, rows), shelf.folder / "part-0.parquet")
                shelf.server.faults.on_request = None
                threading.Thread(target=shelf.put).start()

    if shelf.uri.startswith("http"):
        shelf.server.faults.on_request = change
    else:
        pq.write_table(numbered_table(1000, rows), shelf.folder / "part-0.parquet")
        shelf.put()
    try:
        got = list(stream)
    except DataError as error:
        assert str(error) == (
            f"{shelf.uri}/part-0.parquet: has changed since it was opened; start again when its "
            "writer is done"
        )
    else:  # the change came behind the last request
        assert len(asked) <= before and len(got) == 1


@pytest.mark.full
def test_a_version_with_equal_size_has_another_stamp_and_other_facts(shelf):
    write_numbered(shelf.folder, [[3]])
    shelf.put()
    file = f"{shelf.uri}/part-0.parquet"
    stamp = stamp_of(file)
    assert stamp_of(file) == stamp
    known = Fingerprint.of(file_facts(open_source(file, SCHEMA).files))
    assert not difference(known, file_facts(open_source(file, SCHEMA).files))
    raw = (shelf.folder / "part-0.parquet").read_bytes()
    (shelf.folder / "part-0.parquet").write_bytes(raw[:10] + bytes([raw[10] ^ 1]) + raw[11:])
    shelf.put()
    other = stamp_of(file)
    assert other.size == stamp.size and other != stamp


@pytest.mark.full
def test_a_source_crosses_to_another_process(shelf):
    write_numbered(shelf.folder, FILES)
    shelf.put()
    source = open_source(shelf.uri, SCHEMA)
    assert pickle.loads(pickle.dumps(source)) == source
    expected = batches(str(shelf.folder))
    stream = BatchStream(source, SCHEMA, batch_size=8, lanes=4, shuffle_rows=16)
    child = os.fork()
    if not child:
        try:
            assert_same(list(stream), expected)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_row_group_is_read_by_few_ranges_of_the_wanted_columns(shelf):
    table = numbered_table(0, 5000)
    for name in map(str, range(20)):
        table = table.append_column(name, table["row"])
    pq.write_table(table, shelf.folder / "part-0.parquet", use_dictionary=False)
    shelf.put()
    schema = Schema("label", ("row",), ("one",))
    source = open_source(f"{shelf.uri}/part-0.parquet", schema)
    shelf.server.faults.asked.clear()
    stream = BatchStream(source, schema, batch_size=5000, lanes=1, shuffle_rows=16)
    assert len(list(stream)) == 1
    ranges = [wanted for method, _, wanted in shelf.server.faults.asked if wanted]
    sizes = [int(last) - int(first) + 1 for first, last in (r[6:].split("-") for r in ranges)]
    assert len(ranges) <= 3
    if shelf.uri.startswith("http"):
        assert len(shelf.server.faults.asked) - len(ranges) == 1  # whether it has changed
    assert sum(sizes) < (shelf.folder / "part-0.parquet").stat().st_size / 3


@pytest.mark.full
def test_the_next_row_group_is_asked_for_while_one_is_read(tmp_path):
    pq.write_table(numbered_table(0, 40_000), tmp_path / "a.parquet", row_group_size=20_000)
    schema = Schema("label", ("row",), ("one",))
    with http_server(tmp_path) as server:
        source = open_source(f"{server.url}/a.parquet", schema)
        server.faults.asked.clear()
        stream = BatchStream(source, schema, batch_size=8, lanes=1, shuffle_rows=8)
        stream.num_threads = 1
        batches = iter(stream)
        assert row_numbers(next(batches))
        second = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0)
        first_byte = second.dictionary_page_offset or second.data_page_offset

        def has_second():
            asked = [wanted[6:] for _, _, wanted in server.faults.asked if wanted]
            return any(int(one.partition("-")[0]) >= first_byte for one in asked)

        until = time.monotonic() + 20
        while not has_second() and time.monotonic() < until:
            time.sleep(0.01)
        assert has_second()
        batches.close()


def test_a_server_that_is_silent_is_asked_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(storage, "SECONDS_OF_SILENCE", 0.2)
    (tmp_path / "a").write_bytes(b"0123456789")
    with http_server(tmp_path) as server, open_file(f"{server.url}/a") as file:
        server.faults.next += [slow(0.6)]
        assert file.read(4) == b"0123"
    assert "Timeout" in capsys.readouterr().err or "timeout" in capsys.readouterr().err


def test_a_server_without_ranges_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"0123456789")
    with http_server(tmp_path, answers_ranges=False) as server:
        with open_file(f"{server.url}/a") as file, pytest.raises(DataError, match="whole files"):
            file.read(4)
        with open_file(f"{server.url}/a") as file:
            assert file.read() == b"0123456789"


@pytest.mark.full
def test_a_bucket_that_does_not_exist_is_named(s3):
    for path in ("logs", "logs/*.parquet", "logs/day=1/a.parquet", ""):
        with pytest.raises(DataError) as info:
            file_names(f"s3://no-such-bucket/{path}")
        assert str(info.value).endswith(": there is no s3://no-such-bucket")


def test_what_fsspec_knows_is_a_place():
    import fsspec

    fsspec.filesystem("memory").pipe("/top/a.csv", b"label,row,one\n1,2,3\n")
    schema = Schema("label", ("row",), ("one",), integers=("one",))
    assert open_source("memory://top", schema).rows == 1
    assert file_names("memory://top/*.csv") == ["memory://top/a.csv"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nope://host/a", "cannot be read: Protocol not known: nope"),
        ("s3:///logs", "the URI names no host or bucket"),
        ("file:///logs", "write the path itself, /logs"),
    ],
)
def test_a_uri_without_a_client_is_refused(path, problem):
    with pytest.raises(DataError) as info:
        file_names(path)
    assert problem in str(info.value) and path[:11] in str(info.value)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError("Unable to load libjvm\ndlopen(..) failed"), ("Unable to load libjvm", False)),
        (
            OSError("no answer from https://cdn/a?X-Amz-Signature=hidden&b=1 (reset)"),
            ("no answer from https://cdn/a (reset)", True),
        ),
        (OSError("AWS Error UNKNOWN (HTTP status 503)"), ("the server answers 503", True)),
        (OSError("AWS Error (HTTP status 409)"), ("the server answers 409", False)),
        (OSError("Bucket 'b' not found"), ("the bucket does not exist", False)),
        (ImportError("Install huggingface_hub"), ("Install huggingface_hub", False)),
        (TimeoutError(), ("TimeoutError", True)),
        (OSError("word " * 1000), ("word " * 59 + "[...]", True)),
    ],
)
def test_an_error_of_a_library_is_a_short_line_without_a_secret(error, problem):
    assert storage._problem(error) == problem


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:hidden@bucket/logs",
        "s3://hidden@bucket/logs",
        "https://user:hidden@host/a.parquet",
        "abfs://box:hidden@account/x",
        "s3://bucket/logs?access_key=hidden",
        "https://host/a.parquet?X-Amz-Signature=hidden",
    ],
)
def test_a_uri_with_a_secret_is_refused_without_showing_it(uri):
    with pytest.raises(DataError) as info:
        file_names(uri)
    assert str(info.value).startswith("dataset.path=") and "hidden" not in str(info.value)
    with pytest.raises(DataError):
        refuse_secrets(uri, "input")


def test_a_container_of_azure_and_a_glob_are_no_secrets():
    refuse_secrets("abfs://box@account.dfs.core.windows.net/logs/part-?.parquet", "input")
    refuse_secrets("/mnt/logs/user:name@host?a=b", "input")


def written(output, input):
    file = ScoreFile(output, input, ("score",))
    file.folder.mkdir()
    file.open_part(0)
    for batch in RankInput(input, 0, 1):
        file.write(batch.kept, {"score": np.arange(batch.rows, dtype=np.float32)})
    file.close_part()
    file.join(1)
    file.delete_parts()
    file.folder.rmdir()
    return file


@pytest.fixture
def to_score(tmp_path):
    logs = write_numbered(tmp_path / "to_score", [[7], [3]])
    return open_input(ScoringSettings(input=str(logs), columns=("one",)), SCHEMA, "none")


@pytest.mark.full
def test_scores_are_written_to_a_bucket_whole_or_not_at_all(shelf, to_score, tmp_path, capsys):
    output = located(f"{shelf.uri}/scores.parquet")
    if not output.is_in_bucket:
        with pytest.raises(ConfigError, match="a web server takes no files"):
            check_output(output, [], overwrite=False)
        return
    shelf.server.files.create_dir(shelf.uri.removeprefix("s3://").partition("/")[0])
    check_output(output, [], overwrite=False)
    shelf.server.faults.next += [status(503)]
    written(output, to_score)
    assert "the next try is in" in capsys.readouterr().err
    with open_file(str(output)) as file:
        there = pq.read_table(file)
    written(tmp_path / "scores.parquet", to_score)
    assert there.equals(pq.read_table(tmp_path / "scores.parquet"))
    with pytest.raises(ConfigError, match=r"^output=s3://.*: exists; choose another name"):
        check_output(located(str(output)), [], overwrite=False)
    check_output(located(str(output)), [], overwrite=True)
    with pytest.raises(ConfigError, match="is one of the files that are scored"):
        check_output(located(str(output)), [str(output)], overwrite=True)
    with pytest.raises(ConfigError, match="there is no directory s3://no-such-bucket; make it"):
        check_output(located("s3://no-such-bucket/a.parquet"), [], overwrite=False)
    other = located(f"{shelf.uri}/other.parquet")
    shelf.server.faults.next += [status(403)] * 50
    with pytest.raises(DataError, match=r"other\.parquet: cannot be written: access is denied"):
        written(other, to_score)
    shelf.server.faults.next.clear()
    assert not located(str(other)).exists()


def test_scores_are_written_to_what_fsspec_knows(to_score):
    written(located("memory://scores/a.parquet"), to_score)
    with open_file("memory://scores/a.parquet") as file:
        assert pq.read_table(file).num_rows == 10
