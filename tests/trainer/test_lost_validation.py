"""Whatever goes wrong in a validation, the epoch before it is saved; a run goes on from there."""

import errno
import os
import pickle
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs import recipe
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from runs import compose, fit
from trainer.test_snapshots import CatchUp

from recapp.console import short_path
from recapp.dataset.click_rows import first_outside, place_of
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.schema import Schema
from recapp.dataset.source import open_source
from recapp.errors import CheckpointError, IdError
from recapp.run.run_checks import check_ids
from recapp.settings.values import typed
from recapp.stored import checkpoint
from recapp.stored.manifest import META
from recapp.stored.stored_model import read_manifest, verify
from recapp.tables.config import EmbeddingBagConfig, TableLookup
from recapp.tables.ids import LongBag
from recapp.train import note_how_to_go_on
from recapp.trainer.datamodule import ClickData
from recapp.trainer.keep_checkpoints import EndTogether

EPOCH = 18
"""The steps of an epoch of the logs."""


class Fault(Exception):
    """An error of a user's own code."""


class Fail(Callback):
    """Raises an error in a hook of the validation after a step."""

    def __init__(self, hook, step=EPOCH):
        def fail(trainer, *_):
            if trainer.global_step == step:
                raise Fault

        setattr(self, hook, fail)


@pytest.fixture(scope="module")
def unbroken(logs, tmp_path_factory):
    """The weights and metrics of two epochs that nothing disturbs."""
    folder = tmp_path_factory.mktemp("unbroken")
    _, _, module = fit(compose(logs, "trainer.max_epochs=2"), folder)
    return of_run(folder, module)


def of_run(folder, module):
    """The metrics of the last checkpoint of a run, and its dense weights."""
    metrics = read_manifest(folder / "checkpoints/last.ckpt").metrics
    return metrics, {name: p.tolist() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "hook", ["on_validation_batch_end", pytest.param("on_validation_start", marks=pytest.mark.full)]
)
def test_the_epoch_before_a_failed_validation_is_saved_and_validated_later(
    logs, tmp_path, unbroken, hook
):
    recipe = compose(logs, "trainer.max_epochs=2")
    last = tmp_path / "checkpoints/last.ckpt"
    with pytest.raises(Fault):
        fit(recipe, tmp_path, Fail(hook))
    manifest = read_manifest(last)
    assert (manifest.step, manifest.metrics) == (EPOCH, {})
    assert manifest.position == {"epoch": 1, "batches": 0, "batch_size": 96}
    _, _, module = fit(recipe, tmp_path, CatchUp(over=False), ckpt_path=last)
    assert of_run(tmp_path, module) == unbroken


class FillDisk(Callback):
    """Leaves no room for another file from the first validation on."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_validation_start(self, trainer, pl_module):
        def write(file, content):
            with open(file, "wb") as out:
                out.write(content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.monkeypatch.setattr(checkpoint, "write_file", write)


def test_a_disk_that_is_full_after_a_validation_leaves_the_epoch_and_no_half_file(
    logs, tmp_path, unbroken, monkeypatch
):
    recipe = compose(logs, "trainer.max_epochs=2")
    folder = tmp_path / "checkpoints"
    full = rf"could not be written: the disk under {folder} is full, .*: make room there"
    with pytest.raises(CheckpointError, match=full):
        fit(recipe, tmp_path, FillDisk(monkeypatch))
    monkeypatch.undo()
    assert (folder / "last.ckpt").exists() and verify(folder / "last.ckpt") > 0
    assert all(p.name.startswith("last.ckpt") for p in folder.iterdir())
    assert sum(p.is_dir() and not p.is_symlink() for p in folder.iterdir()) == 1
    _, _, module = fit(recipe, tmp_path, CatchUp(over=False), ckpt_path=folder / "last.ckpt")
    assert of_run(tmp_path, module) == unbroken


@pytest.mark.full
def test_a_later_validation_leaves_its_epoch_too(logs, tmp_path):
    with pytest.raises(Fault):
        fit(compose(logs, "trainer.max_epochs=2"), tmp_path, Fail("on_validation_end", 2 * EPOCH))
    manifest = read_manifest(tmp_path / "checkpoints/last.ckpt")
    assert (manifest.step, manifest.metrics) == (2 * EPOCH, {})
    # the best so far stays
    assert read_manifest(tmp_path / f"checkpoints/step_{EPOCH:06d}.ckpt").metrics


@pytest.fixture
def parts(logs, tmp_path):
    """Training rows and validation rows in files of their own, and how to write the latter."""
    table = pq.read_table(logs)
    (tmp_path / "rows").mkdir()
    pq.write_table(table[:1800], tmp_path / "rows/train.parquet")

    def write(number=None, **options):
        rows = table[1800:]
        if number is not None:
            values = rows["C9"].to_pylist()
            values[7] = number
            rows = rows.set_column(
                rows.schema.get_field_index("C9"), "C9", pa.array(values, rows["C9"].type)
            )
        pq.write_table(rows, tmp_path / "rows/val.parquet", row_group_size=50, **options)

    recipe = compose(
        tmp_path / "rows/train.parquet",
        f"dataset.val_path={tmp_path}/rows/val.parquet",
        "trainer.max_epochs=1",
    )
    return recipe, write


def test_an_id_of_validation_rows_alone_is_named_with_its_row_before_or_after_training(
    parts, tmp_path
):
    recipe, write = parts
    says = (
        f"table C9: feature C9 has the id 4711 in row 7 of {tmp_path}/rows/val.parquet "
        r"\(dataset.val_path\), which is outside its 9 rows .* set its id_rule to hash"
    )
    write(4711)
    with pytest.raises(IdError, match=says):
        check_ids(recipe)
    write(4711, write_statistics=False)
    check_ids(recipe)
    with pytest.raises(IdError, match=says):
        fit(recipe, tmp_path)
    last = tmp_path / "checkpoints/last.ckpt"
    assert read_manifest(last).step == EPOCH and not read_manifest(last).metrics
    write()
    check_ids(recipe)
    _, _, module = fit(recipe, tmp_path, CatchUp(over=True), ckpt_path=last)
    _, _, unbroken = fit(recipe, tmp_path / "unbroken")
    assert of_run(tmp_path, module) == of_run(tmp_path / "unbroken", unbroken)


@pytest.mark.parametrize("kind", [pa.int64(), pa.list_(pa.int64())])
def test_rows_of_ids_are_found_in_files_row_groups_and_bags(tmp_path, kind):
    values = [[n, 50 + n] if pa.types.is_list(kind) else n for n in range(40)]
    for name in ("a", "b"):
        kept = pa.array(values if name == "a" else values[::-1], kind)
        labels = pa.array([0.0] * 40)
        other = pa.array([4711] * 40)  # a name with a dot is no part of the other column
        pq.write_table(
            pa.table({"label": labels, "C": kept, "C.x": other}),
            tmp_path / f"{name}.parquet",
            row_group_size=16,
        )
    schema = Schema(label="label", dense=(), sparse=("C",))
    source = open_source(str(tmp_path), schema)
    assert place_of(source, schema, "C", number=33) == f"row 33 of {tmp_path}/a.parquet"
    assert (
        place_of(source.slice(40, 80), schema, "C", number=33) == f"row 6 of {tmp_path}/b.parquet"
    )
    assert place_of(source, schema, "C", number=99) == ""
    assert first_outside(source, schema, {"C": range(90)}) is None
    greatest = 89 if pa.types.is_list(kind) else 39
    assert first_outside(source, schema, {"C": range(greatest)}) == ("C", greatest)
    assert first_outside(source, schema, {"C": range(1, 90)}) == ("C", 0)


def test_the_first_bag_of_a_length_is_found_where_lists_are_padded(tmp_path):
    bags = [[1, 0, 0], [2, 3, 0], [4, 5, 6], [7, 8, 9]]
    for name in ("a", "b"):
        lists = pa.array(bags[:2] if name == "a" else bags, pa.list_(pa.int64()))
        labels = pa.array([0.0] * len(lists))
        pq.write_table(pa.table({"label": labels, "C": lists}), tmp_path / f"{name}.parquet")
    schema = Schema(label="label", dense=(), sparse=("C",), padding=0)
    source = open_source(str(tmp_path), schema)
    assert place_of(source, schema, "C", length=3) == f"row 2 of {tmp_path}/b.parquet"
    assert place_of(source, schema, "C", length=2) == f"row 1 of {tmp_path}/a.parquet"
    assert place_of(source, schema, "C", length=4) == ""

    settings = DataSettings(path=str(tmp_path), sparse=("C",), padding=0, val_share=0.5)
    data = ClickData(settings, schema)
    data.setup("fit")
    data.trainer = SimpleNamespace(validating=True, sanity_checking=False, current_epoch=0)
    lookup = TableLookup(
        EmbeddingBagConfig(10, 4, name="t", feature_names=["C"]), "C", "wide", "concat", hotness=2
    )
    error = pickle.loads(pickle.dumps(LongBag(lookup, 3)))
    data.on_exception(error)
    assert str(error) == (
        f"lookup wide: feature C has a bag of 3 ids in row 2 of {tmp_path}/b.parquet (validation "
        "rows), and its concatenation takes at most hotness=2: raise hotness, or set truncates to "
        "leave the last ids out"
    )


def test_a_run_that_fails_says_how_to_go_on_if_it_has_saved(tmp_path, capsys):
    run = tmp_path / "a run"
    settings = recipe("train", [])
    manifest = run / "checkpoints/last.ckpt/manifest.json"
    manifest.parent.mkdir(parents=True)
    for saves in (False, True):
        with pytest.raises(Fault), note_how_to_go_on(settings, run):
            if saves:
                manifest.touch()
            raise Fault
        said = capsys.readouterr().err
        line = typed("ckpt_path", short_path(manifest.parent))
        assert (f"to go on: python -m recapp.train {line}\n" in said) == saves


class Names(Checkpoint):
    """The files of the checkpoint that is saved before a validation."""

    def on_validation_start(self, trainer, pl_module):
        (last,) = [c for c in trainer.callbacks if isinstance(c, EndTogether)]
        folder = last.save.__self__.path
        self.files = {p.name: p.stat().st_ino for p in folder.iterdir()}


def test_tables_are_written_once_though_they_are_saved_before_and_after(logs, tmp_path):
    names = Names()
    fit(compose(logs), tmp_path, names)
    best = tmp_path / f"checkpoints/step_{EPOCH:06d}.ckpt"
    files = {p.name: p.stat().st_ino for p in best.iterdir()}
    shared = [name for name in files if files[name] == names.files[name]]
    assert shared == ["rank-00000.safetensors"] and META in files
    assert verify(best) > 0 and read_manifest(best).metrics
    assert (tmp_path / "checkpoints/last.ckpt").resolve() == best


class Change(Callback):
    """Changes a row of a table in a validation, as a swap of weights does."""

    def on_validation_end(self, trainer, pl_module):
        blocks = [b for c in trainer.strategy.sharded_tables() for b in c.blocks()]
        with torch.no_grad():
            blocks[0].data[0, 0] += 1


def test_tables_that_a_validation_changes_are_written_as_they_are(logs, tmp_path):
    names = Names()
    fit(compose(logs), tmp_path, Change(), names)
    best = tmp_path / f"checkpoints/step_{EPOCH:06d}.ckpt"
    file = best / "rank-00000.safetensors"
    assert file.stat().st_ino != names.files[file.name] and verify(best) > 0
