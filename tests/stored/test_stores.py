"""Stored models meet a file system in seven operations: a store of objects keeps them as well as
local disks do.
"""

import ast
import os
from pathlib import Path

import pytest
import torch
from dataset.places import needs_s3, s3
from tables import save, whole
from trainer.runs import compose, fit, make_logs

import recapp
from recapp.errors import CheckpointError
from recapp.model_export import export_model
from recapp.run.recipe import Export
from recapp.settings.uris import path_to
from recapp.stored.checkpoint import link_checkpoint, remove_checkpoint
from recapp.stored.manifest import ArtefactManifest, to_json
from recapp.stored.operations import Files
from recapp.stored.plain_parts import unfinished
from recapp.stored.remote_files import RemoteFiles
from recapp.stored.store import LocalFiles, checkpoints_in, write_file
from recapp.stored.stored_model import Artefact, load_table, read_manifest, read_stored, verify

__all__ = ["s3"]  # a fixture

ROOM = Path(recapp.__file__).parent / "stored"
TOUCHES = {
    *("open", "stat", "lstat", "exists", "is_file", "is_dir", "is_symlink", "iterdir", "glob"),
    *("rglob", "mkdir", "rmdir", "unlink", "rename", "replace_file", "symlink_to", "resolve"),
    *("read_text", "read_bytes", "write_text", "write_bytes", "touch", "listdir", "scandir"),
    *("fsync", "fstat", "realpath", "rmtree", "makedirs", "remove_file", "flock"),
}
"""Calls by which Python touches files."""
SEAM = ("store.py", "remote_files.py")


def touching(text):
    """The calls of a file that touch a file system by other means than the seam."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        by_seam = isinstance(called, ast.Attribute) and ast.unparse(called.value) == "pinned"
        if name in TOUCHES and not by_seam:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_a_call_that_touches_files_is_found():
    assert list(touching("with open(file) as source:\n    pass"))
    assert list(touching("(folder / file).stat()")) and list(touching("os.scandir(folder)"))
    assert not list(touching("pinned.open(file, kind)\nfiles.size(folder)"))


def test_only_the_seam_of_the_room_touches_a_file_system():
    found = {
        path.name: calls
        for path in sorted(ROOM.glob("*.py"))
        if path.name not in SEAM and (calls := list(touching(path.read_text())))
    }
    assert found == {}


@pytest.fixture(params=["memory", pytest.param("s3", marks=needs_s3)])
def elsewhere(request):
    """A directory of another place."""
    name = os.urandom(4).hex()
    if request.param == "s3":
        request.getfixturevalue("s3").files.create_dir(f"bucket-{name}")
    return path_to(f"{request.param}://bucket-{name}/run")


def test_a_store_has_seven_operations():
    names = [name for name in vars(Files) if not name.startswith("_")]
    assert len(names) == 7
    assert all(hasattr(kind, name) for kind in (LocalFiles, RemoteFiles) for name in names)


def test_another_store_keeps_checkpoints_without_a_change_elsewhere(elsewhere):
    path = elsewhere / "a.ckpt"
    for value in (1.0, 2.0):
        table = whole("A", "weight", torch.full((8, 2), value))
        assert save(path, [[table], []], manifest={"step": int(value)}) == [None] * 2
    assert verify(path) > 8 * 2 * 4 and load_table(path, "A").unique().tolist() == [2]
    link_checkpoint(elsewhere / "last.ckpt", path)
    assert read_manifest(elsewhere / "last.ckpt").step == 2
    assert [one.path.name for one in checkpoints_in(elsewhere)] == ["a.ckpt", "last.ckpt"]
    with pytest.raises(
        CheckpointError, match=r"no checkpoint .*lst\.ckpt: did you mean last\.ckpt"
    ):
        read_manifest(elsewhere / "lst.ckpt")
    with pytest.raises(CheckpointError, match="was not removed, because"):
        remove_checkpoint(path)
    remove_checkpoint(elsewhere / "last.ckpt")
    remove_checkpoint(path)
    assert checkpoints_in(elsewhere) == [] and not elsewhere.exists()


def test_another_store_keeps_artefacts_without_a_change_elsewhere(elsewhere):
    for name, overwrite in (("one", False), ("two", True)):
        with unfinished(elsewhere / "art", overwrite) as folder:
            files = {"rows/a.bin": write_file(folder / "rows/a.bin", b"rows")}
            info = {"name": name, "example": [{"C1": 1}]}
            described = ArtefactManifest(folder, info, files, ())
            write_file(folder / "manifest.json", to_json(described).encode())
    assert read_stored(elsewhere / "art").info["name"] == "two"
    with Artefact.at(elsewhere / "art") as artefact:
        assert artefact.verify() == 4 and artefact.read("rows/a.bin") == b"rows"
    assert not elsewhere.exists()


def test_a_run_is_saved_resumed_and_exported_in_another_store(elsewhere, tmp_path):
    logs = make_logs(tmp_path / "logs")
    _, trainer, _ = fit(compose(logs, "trainer.max_steps=4"), tmp_path / "first")
    losses = []
    for folder in (tmp_path, elsewhere):
        path = folder / "a.ckpt"
        trainer.save_checkpoint(path)
        assert verify(path) and read_manifest(path).step == 4
        longer = compose(logs, "trainer.max_steps=9")
        seen, _, _ = fit(longer, tmp_path / f"more{len(losses)}", ckpt_path=str(path))
        losses.append(seen.losses)
        export_model(path, folder / "art", Export(report_rows=0, compile=False))
    assert losses[0] == losses[1] and len(losses[0]) == 5
    local, other = (recapp.load_model(folder / "art") for folder in (tmp_path, elsewhere))
    assert other.example.equals(local.example)
    assert (other.predict(other.example) == local.predict(local.example)).all()
    assert not elsewhere.exists()
