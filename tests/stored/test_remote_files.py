"""Checkpoints and artefacts in other places: whatever kills a writer, a name leads to a whole
model; what the way there does wrong is tried again, or one line.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from dataset.places import CUT, needs_s3, s3, status
from tables import Comms, save, whole

from recapp.dataset import storage
from recapp.dataset.storage import read_file, sizes_in
from recapp.errors import CheckpointError, ConfigError, DataError
from recapp.settings.uris import UriPath, path_to
from recapp.stored import remote_files
from recapp.stored.checkpoint import link_checkpoint, remove_earlier, write_checkpoint
from recapp.stored.manifest import ArtefactManifest, to_json
from recapp.stored.plain_parts import unfinished
from recapp.stored.store import checkpoints_in, clean_up, entry_of, files_at, write_file
from recapp.stored.stored_model import Artefact, load_table, read_manifest, verify

__all__ = ["s3"]  # a fixture


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(storage, "WAITS", (0.01, 0.01))
    storage._place.cache_clear()
    yield
    storage._place.cache_clear()


@pytest.fixture
def run():
    """A directory in the memory of this process."""
    return path_to(f"memory://bucket-{os.urandom(4).hex()}/run")


@pytest.fixture
def bucket(s3):
    """A directory of S3, and its server."""
    name = f"bucket-{os.urandom(4).hex()}"
    s3.files.create_dir(name)
    s3.faults.next.clear()
    yield path_to(f"s3://{name}/run"), s3.faults
    s3.faults.next.clear()
    s3.faults.on_request = None


class Dies:
    """From some write on, the process is dead: it writes and deletes nothing more."""

    def __init__(self, monkeypatch, writes):
        self.left = writes
        for name in ("put_file", "delete_there"):
            monkeypatch.setattr(remote_files, name, self.instead_of(getattr(remote_files, name)))

    def instead_of(self, do):
        def done(*arguments):
            if self.left <= 0:
                raise KeyboardInterrupt
            self.left -= 1
            return do(*arguments)

        return done


def write_one(path, value):
    blocks = [whole("A", "weight", torch.full((8, 2), float(value)))]
    write_checkpoint(
        path, blocks, comm=Comms(1).rank(0), meta={"step": value}, manifest={"step": value}
    )


def write_artefact(path, value):
    with unfinished(path, overwrite=True) as folder:
        files = {"rows/a.bin": write_file(folder / "rows/a.bin", b"%d" % value)}
        described = ArtefactManifest(folder, {"name": "a", "example": [{"C1": 1}]}, files, ())
        write_file(folder / "manifest.json", to_json(described).encode())


def checkpoint_at(path):
    try:
        assert verify(path)
    except CheckpointError:
        return None
    return int(load_table(path, "A")[0, 0])


def artefact_at(path):
    entry = entry_of(path)
    if entry is None:
        return None
    with Artefact.at(path) as artefact:
        artefact.verify()
        return int(artefact.read("rows/a.bin"))


def versions(path):
    return {name.partition("/")[0] for name in sizes_in(str(path))} - {"link.recapp"}


@pytest.mark.parametrize("first", [None, 1], ids=["new", "replaced"])
@pytest.mark.parametrize(
    ("name", "write", "value_at"),
    [("a.ckpt", write_one, checkpoint_at), ("served", write_artefact, artefact_at)],
    ids=["checkpoint", "artefact"],
)
def test_a_killed_writer_leaves_the_earlier_model_or_the_whole_new_one(
    run, first, name, write, value_at
):
    seen = []
    for writes in range(99):
        path = run / f"{writes}" / name
        if first:
            write(path, first)
        with pytest.MonkeyPatch.context() as patch:
            dies = Dies(patch, writes)
            with suppress(KeyboardInterrupt):
                write(path, 2)
            over = dies.left > 0
        seen.append(value_at(path))
        lock = path.with_name("served.recapp-lock")
        assert (read_file(str(lock)) is None) or name == "served"
        files_at(path).remove(lock)  # an hour later
        write(path, 3)
        assert value_at(path) == 3 and len(versions(path)) == 1
        if over:
            break
    assert over and seen == sorted(seen, key=str, reverse=not first)
    assert {*seen} == {first, 2} and seen.index(2) > 2


def test_what_a_killed_save_leaves_is_deleted_by_the_next_one_of_its_run(run, monkeypatch):
    write_one(run / "step_1.ckpt", 1)
    link_checkpoint(run / "last.ckpt", run / "step_1.ckpt")
    with pytest.MonkeyPatch.context() as patch:
        Dies(patch, 6)
        with pytest.raises(KeyboardInterrupt):
            write_one(run / "step_2.ckpt", 2)
    assert versions(run / "step_2.ckpt") == {"recapp-1"}
    assert {one.path.name for one in checkpoints_in(run)} == {"last.ckpt", "step_1.ckpt"}
    clean_up(run)
    assert not sizes_in(str(run / "step_2.ckpt"))
    assert read_manifest(run / "last.ckpt").step == 1


def test_a_directory_that_is_no_model_is_neither_written_nor_deleted(run):
    write_file(run / "data/day_0.csv", b"1,2")
    with pytest.raises(CheckpointError, match=r"memory://.*/data exists and is no checkpoint"):
        write_one(run / "data", 1)
    with pytest.raises(ConfigError, match=r"output=memory://.*/data: exists and is no artefact"):
        write_artefact(run / "data", 1)
    assert remove_earlier(run, None) == []
    assert sizes_in(str(run)) == {"data/day_0.csv": 3}


def test_a_directory_that_was_copied_there_is_read_and_replaced(run, tmp_path):
    write_one(tmp_path / "a.ckpt", 1)
    for file in (tmp_path / "a.ckpt").iterdir():
        write_file(run / "a.ckpt" / file.name, file.read_bytes())
    assert checkpoint_at(run / "a.ckpt") == 1
    write_one(run / "a.ckpt", 2)
    assert checkpoint_at(run / "a.ckpt") == 2 and versions(run / "a.ckpt") == {"recapp-1"}


def test_two_exports_do_not_write_one_name_at_once(run, monkeypatch):
    with (
        unfinished(run / "served", overwrite=False),
        pytest.raises(ConfigError, match="another export is writing it: wait"),
        unfinished(run / "served", overwrite=False),
    ):
        pass
    with pytest.MonkeyPatch.context() as patch:
        Dies(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            write_artefact(run / "killed", 1)
    with pytest.raises(ConfigError, match="another export is writing it"):
        write_artefact(run / "killed", 1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    write_artefact(run / "killed", 1)
    assert artefact_at(run / "killed") == 1


def test_a_link_that_cannot_be_read_does_not_count_as_a_missing_one(run, monkeypatch):
    write_one(run / "a.ckpt", 1)
    opened = storage._FsspecPlace.opened

    def fails(place, path):
        if path.endswith("link.recapp"):
            raise ConnectionError("the network is down")
        return opened(place, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage._FsspecPlace, "opened", fails)
        with pytest.raises(DataError, match=r"link\.recapp: .* the network is down, 3 times$"):
            write_one(run / "a.ckpt", 2)
        with pytest.raises(DataError, match=r"link\.recapp: .* the network is down$"):
            read_manifest(run / "a.ckpt")  # a host that has not answered is asked once
    assert checkpoint_at(run / "a.ckpt") == 1


def test_a_uri_stays_one_wherever_paths_go():
    path = path_to("s3://bucket/run")
    assert isinstance(path, UriPath) and str(path / "a.ckpt") == "s3://bucket/run/a.ckpt"
    assert os.fspath(path) == os.path.realpath(path) == os.path.abspath(path) == "/s3:/bucket/run"
    assert path.absolute() == path.resolve() == path_to(os.fspath(path)) == path
    assert str(path_to(os.path.join(os.fspath(path), "../b"))) == "s3://bucket/run/../b"
    assert f"{path.parent}" == "s3://bucket" and path.with_name("x") == path_to("s3://bucket/x")
    assert type(path_to("runs/s3:")) is type(Path("a")) is type(path_to("/s3"))


@pytest.mark.parametrize("_", [pytest.param(0, marks=needs_s3)])
def test_faults_are_tried_again_or_are_one_line(bucket, capsys, _):
    run, faults = bucket
    blocks = [[whole("A", "weight", torch.full((8, 2), 1.0))], []]
    faults.next += [status(503), status(500)]
    assert save(run / "a.ckpt", blocks, manifest={"step": 1}) == [None] * 2
    assert "the next try is in" in capsys.readouterr().err
    faults.next += [status(503), CUT]
    assert checkpoint_at(run / "a.ckpt") == 1
    faults.on_request = lambda method, path: method == "PUT" and faults.next.append(status(403))
    (error, other) = save(run / "a.ckpt", blocks, manifest={"step": 2})
    faults.on_request = None
    faults.next.clear()
    assert isinstance(error, DataError) and other is not None
    assert "cannot be written: access is denied" in str(error) and "\n" not in str(error)
    assert read_manifest(run / "a.ckpt").step == 1
    with pytest.raises(DataError, match="the bucket does not exist"):
        read_manifest("s3://no-such-bucket/a.ckpt")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint s3://.*b\.ckpt: did you"):
        read_manifest(run / "b.ckpt")
    faults.next += [status(403)] * 9
    with pytest.raises(DataError, match="access is denied"):
        read_manifest(run / "a.ckpt")


@pytest.mark.parametrize("_", [pytest.param(0, marks=needs_s3)])
def test_a_large_file_is_read_in_parts(bucket, monkeypatch, _):
    run, faults = bucket
    monkeypatch.setattr(storage, "_PART_BYTES", 100)
    value = torch.arange(4000.0).view(-1, 2)
    save(run / "a.ckpt", [[whole("A", "weight", value)]], manifest={"step": 1})
    faults.asked.clear()
    assert load_table(run / "a.ckpt", "A").equal(value)
    assert sum("rank-00000" in path and wanted is not None for _, path, wanted in faults.asked) > 99
