"""An artefact is the checkpoint that it was made of: the same scores, in fewer bytes where that was
asked for; and what is wrong with one is said.
"""

import json
import logging
import os
import platform
import random
import shutil
import zlib
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from compilers import needs_compiler
from tiers import one_of
from torch import nn
from trainer.runs import SIZES, compose, fit, make_logs

import recapp
from recapp import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from recapp.dataset.sequential_rows import example_rows
from recapp.engine.read_only_store import values_of
from recapp.errors import ArtefactError, CheckpointError, ConfigError, RecappError
from recapp.export import main
from recapp.inference import compiled
from recapp.inference.build_cpp import SOURCE
from recapp.inference.compiled import NotCompiled, compile_dense
from recapp.inference.export_settings import Export
from recapp.inference.held_tables import TrainedTables, one_rank
from recapp.inference.probe import Probe, least_storage
from recapp.metrics import click_metrics
from recapp.model_export import export_model
from recapp.run.run_rows import validation_batches, validation_source
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.manifest import sealed
from recapp.stored.operations import MANIFEST, REPLACED
from recapp.stored.plain_parts import unfinished
from recapp.stored.stored_model import Artefact
from recapp.tables.config import DataType
from recapp.tasks.task import ClickTask

GROWS = ("tables=dynamic", "tables.init_range=0.05")
FAST = {"compile": False}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return make_logs(Path(tmp_path_factory.mktemp("logs")) / "logs")


def trained(logs, folder, *more):
    folder.mkdir()
    config = compose(logs, "trainer.max_steps=6", *more)
    fit(config, folder)
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def checkpoint(logs, tmp_path_factory):
    return trained(logs, tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture(scope="module")
def dynamic(logs, tmp_path_factory):
    return trained(logs, tmp_path_factory.mktemp("runs") / "dynamic", *GROWS)


@pytest.fixture(autouse=True)
def plain_kernels(reference_kernels):
    """Kernels do not matter here."""


def rows_of(checkpoint, logs, count=300):
    settings = compose(logs)
    return example_rows(validation_source(settings), settings.schema, count)


def export(checkpoint, folder, **options):
    return export_model(checkpoint, folder, Export(**(FAST | options)))


# ---- scores


@pytest.mark.parametrize("kind", ["checkpoint", "dynamic"])
def test_an_artefact_of_the_trained_widths_scores_the_same_bits(request, logs, tmp_path, kind):
    path = request.getfixturevalue(kind)
    export(path, tmp_path / "art", report_rows=0)
    rows = rows_of(path, logs)
    model = recapp.load_model(tmp_path / "art")
    assert torch.equal(model.predict(rows), recapp.load_model(path).predict(rows))
    assert isinstance(model, torch.nn.Module) and model.name == "art"


@pytest.mark.parametrize(
    ("kind", "quantize"),
    one_of(3, list(product(["checkpoint", "dynamic"], ["int8", "fp16", "int4"]))),
)
def test_fewer_bits_score_nearly_the_same(request, logs, tmp_path, kind, quantize):
    path = request.getfixturevalue(kind)
    report = export(path, tmp_path / "art", quantize=quantize)
    rows = rows_of(path, logs)
    before = recapp.load_model(path).predict(rows)
    after = recapp.load_model(tmp_path / "art").predict(rows)
    widths = {row["quantize"]: row for row in report["widths"]}
    assert 0 < (after - before).abs().max() <= widths[quantize]["largest_change"] + 1e-6
    assert widths["exported"] == {**widths[quantize], "quantize": "exported"}
    changes = [widths[w]["largest_change"] for w in ("none", "fp16", "int8", "int4")]
    assert changes == sorted(changes) and changes[0] == 0


def test_the_report_is_what_the_artefact_scores_on_the_validation_rows(checkpoint, logs, tmp_path):
    report = export(checkpoint, tmp_path / "art", quantize="int4")
    settings = compose(logs)
    batches = validation_batches(validation_source(settings), settings, 10**6)
    model = recapp.load_model(tmp_path / "art")
    names = ("auc", "log_loss", "normalized_entropy")
    metrics = click_metrics(names, sync_on_compute=False)
    for batch in batches:
        for metric in metrics.values():
            metric.update(model(batch), batch.labels_B)
    exported = report["widths"][-1]
    for name, metric in metrics.items():
        assert exported[name] == pytest.approx(float(metric.compute()), abs=1e-9)
    assert report["validation_rows"] == sum(b.rows for b in batches)


def test_bytes_are_counted_by_table_and_are_those_of_the_files(checkpoint, tmp_path):
    report = export(
        checkpoint,
        tmp_path / "art",
        quantize="int8",
        quantize_tables={"C1": "int4", "C2*": "fp16", "C20": "none"},
        report_rows=0,
    )
    tables = {t["table"]: t for t in report["tables"]}
    rows = dict(zip((f"C{i}" for i in range(1, 27)), SIZES, strict=True))
    assert [tables[t]["stored"] for t in ("C1", "C2", "C3", "C20", "C21")] == [
        "int4",
        "fp16",
        "int8",
        "fp32",
        "fp16",
    ]
    width = {"int4": 8 + 4, "int8": 16 + 8, "fp16": 32, "fp32": 64}  # of 16 columns, with scale
    for name, table in tables.items():
        assert table["bytes_before"] == rows[name] * 64
        assert table["bytes_after"] == rows[name] * width[table["stored"]]
    on_disk = sum(f.stat().st_size for f in (tmp_path / "art" / "rows").iterdir())
    assert on_disk == sum(t["bytes_after"] for t in tables.values())


def test_auto_stays_in_its_budget_and_saves_bytes(checkpoint, tmp_path):
    small = export(checkpoint, tmp_path / "a", quantize="auto", budget_ne=1e-3)
    tight = export(checkpoint, tmp_path / "b", quantize="auto", budget_ne=1e-7)
    for report, budget in ((small, 1e-3), (tight, 1e-7)):
        assert report["widths"][-1]["ne_change"] <= budget
    size = [sum(t["bytes_after"] for t in r["tables"]) for r in (small, tight)]
    assert size[0] < size[1] < sum(t["bytes_before"] for t in small["tables"])


class BagsTwice(torch.nn.Module):
    """A model that calls one of its two collections twice in a forward."""

    def __init__(self):
        super().__init__()
        users = EmbeddingBagConfig(
            name="users", num_embeddings=9, embedding_dim=4, feature_names=["user"], pooling="sum"
        )
        words = EmbeddingConfig(
            name="words", num_embeddings=9, embedding_dim=4, feature_names=["text"]
        )
        self.bags = EmbeddingBagCollection([users], device="meta")
        self.sequences = EmbeddingCollection([words], device="meta")

    def forward(self, batch):
        logit_B = self.bags(batch.sparse).values().sum(1)
        logit_B = logit_B + self.sequences(batch.sparse)["text"].values().sum(1)
        return logit_B + self.bags(batch.sparse).values().sum(1)


def test_auto_measures_each_choice_anew(reference_kernels):
    seeded = torch.Generator().manual_seed(2)
    rows = {name: torch.rand(9, 4, generator=seeded) - 0.5 for name in ("users", "words")}
    clicks = (2 * rows["users"] + rows["words"]).sum(1) > 0  # as the trained rows predict
    ids = KeyedJaggedTensor(["user", "text"], torch.arange(9).repeat(2), lengths=[1] * 18)
    batch = Batch(torch.zeros(9, 0), ids, clicks.float())  # one batch, in all measurements

    def probe():
        read = lambda table, row_N: rows[table.name][row_N]  # noqa: E731
        return Probe(BagsTwice, lambda model: None, [batch], read, ClickTask())

    measured = probe()
    alone = [{}, {"words": DataType.INT4}, {"users": DataType.INT4}]
    costs = [measured.measure(choice).cost for choice in alone]
    assert costs == [probe().measure(choice).cost for choice in alone]
    assert costs[1] - costs[0] > 1e-4
    tables = [t for part in (BagsTwice().bags, BagsTwice().sequences) for t in part.tables()]
    counts = {"users": 9, "words": 9}
    chosen = least_storage(tables, counts, measured, 1e-6, {}, lambda done: None)
    assert probe().measure(chosen).cost - costs[0] <= 1e-6
    assert chosen["words"] == DataType.FP16  # which costs nothing here


@pytest.mark.full
def test_auto_leaves_what_is_chosen_by_hand(checkpoint, tmp_path):
    by_hand = {"C1": "none", "C10": "int4"}
    report = export(
        checkpoint, tmp_path / "a", quantize="auto", budget_ne=1e-3, quantize_tables=by_hand
    )
    stored = {t["table"]: t["stored"] for t in report["tables"]}
    assert (stored["C1"], stored["C10"]) == ("fp32", "int4")


@pytest.mark.full
def test_a_budget_that_is_spent_by_hand_is_said(checkpoint, tmp_path, capsys):
    by_hand = {f"C{i}": "int4" for i in range(1, 11)}
    alone = export(checkpoint, tmp_path / "a", quantize_tables=by_hand)
    spent = alone["widths"][-1]["ne_change"]
    for budget, said in ((abs(spent) + 1e-3, False), (0.0, spent > 0)):
        options = {"quantize": "auto", "budget_ne": budget, "quantize_tables": by_hand}
        export(checkpoint, tmp_path / f"{budget}", **options)
        assert ("quantize_tables alone cost" in capsys.readouterr().err) is said


def test_large_tables_pass_through_a_file_that_is_gone_afterwards(
    checkpoint, logs, tmp_path, monkeypatch
):
    export(checkpoint, tmp_path / "a", quantize="int8", report_rows=0)
    monkeypatch.setattr("recapp.inference.held_tables.MEMORY_BYTES", 0)
    monkeypatch.setattr("recapp.inference.held_tables.PART_ELEMENTS", 100)
    export(checkpoint, tmp_path / "b", quantize="int8", report_rows=0)
    files = [sorted((tmp_path / x / "rows").iterdir()) for x in "ab"]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    assert {p.name for p in (tmp_path / "b").iterdir()} == {
        "rows",
        "manifest.json",
        "dense.safetensors",
    }


def test_rows_are_mapped_and_those_of_two_models_are_the_same_pages(checkpoint, logs, tmp_path):
    export(checkpoint, tmp_path / "art", quantize="int8", report_rows=0)
    models = [recapp.load_model(tmp_path / "art", check_rows=False) for _ in range(2)]
    held = [values_of(s.held) for m in models for s in m.modules() if hasattr(s, "held")]
    inode = (tmp_path / "art" / "rows" / "int8_16.bin").stat().st_ino
    maps = [x for x in Path("/proc/self/maps").read_text().splitlines() if f" {inode} " in x]
    assert len(maps) >= len(held) == 2


def test_without_validation_rows_the_example_is_made_up(checkpoint, logs, tmp_path, capsys):
    away = tmp_path / "away"
    shutil.move(logs, away)
    try:
        export(checkpoint, tmp_path / "art", quantize="int8")
        assert recapp.load_model(tmp_path / "art").example.num_rows == 1
        assert "so nothing is measured:" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=r"quantize=auto: there are no validation rows"):
            export(checkpoint, tmp_path / "b", quantize="auto")
    finally:
        shutil.move(away, logs)


def test_a_checkpoint_keeps_rows_that_validate_and_reads_no_data_for_them(
    checkpoint, logs, tmp_path
):
    expected = rows_of(checkpoint, logs, 4)
    shutil.move(logs, tmp_path / "away")
    try:
        assert recapp.load_model(checkpoint).example.to_pylist() == expected.to_pylist()
    finally:
        shutil.move(tmp_path / "away", logs)


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ([{"I1": 1.0}], "its example is no row of its data"),
        (["row"], "example is"),
        ({"I1": 1}, "example is"),
        ([{}] * 5000, "example is"),
        ("mixed", "its example is no row of its data"),
    ],
)
def test_an_example_that_is_no_row_is_refused_in_one_line(checkpoint, tmp_path, example, says):
    copied = tmp_path / "copy.ckpt"
    shutil.copytree(checkpoint.resolve(), copied)
    info = json.loads((copied / MANIFEST).read_text())
    if example == "mixed":
        example = [{**info["example"][0], "C1": {"a": [1, "b"]}}]
    del info["checksum"]
    text = json.dumps({**info, "example": example})
    (copied / MANIFEST).write_text(sealed(text[:-1]))
    with pytest.raises(CheckpointError, match=says) as error:
        recapp.load_model(copied)
    assert len(str(error.value).splitlines()) == 1


# ---- wrong options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int2"}, "quantize=int2: did you mean int8 or int4"),
        ({"quantize_tables": {"C99": "int8"}}, "quantize_tables.C99: the model has no such table"),
        ({"quantize_tables": {"C1": "int3"}}, "quantize_tables={C1: int3}: C1: int3: did you mean"),
        ({"budget_ne": -1.0}, "budget_ne=-1.0: must be a number of at least 0"),
        ({"budget_ne": 0.1, "quantize": "int8"}, "a budget is for quantize=auto"),
        ({"quantize": "auto", "report_rows": 0}, "quantize=auto report_rows=0"),
        ({"report_rows": -1}, "report_rows=-1: must be a whole number of at least 0"),
    ],
)
def test_wrong_options_are_said(checkpoint, tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        export(checkpoint, tmp_path / "art", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("override", ["+plan=mixed", "trainer.devices=2", "seed=7"])
def test_settings_that_change_nothing_of_an_artefact_are_refused(
    checkpoint, tmp_path, capsys, override
):
    given = [f"ckpt_path={checkpoint}", f"output={tmp_path / 'art'}", override]
    assert main(given) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {override}: has no effect on an artefact")
    assert not (tmp_path / "art").exists()


def test_what_is_no_artefact_is_not_replaced_and_an_artefact_when_asked(checkpoint, tmp_path):
    (tmp_path / "art").mkdir()
    with pytest.raises(ConfigError, match="exists and is no artefact"):
        export(checkpoint, tmp_path / "art", report_rows=0, overwrite=True)
    (tmp_path / "art").rmdir()
    export(checkpoint, tmp_path / "art", report_rows=0)
    with pytest.raises(ConfigError, match="there is an artefact: set overwrite=true"):
        export(checkpoint, tmp_path / "art", report_rows=0)
    first = recapp.load_model(tmp_path / "art")
    export(checkpoint, tmp_path / "art", report_rows=0, overwrite=True, quantize="int8")
    assert recapp.load_model(tmp_path / "art").version != first.version
    assert [p.name for p in tmp_path.iterdir()] == ["art"]


def test_an_export_that_fails_leaves_the_earlier_artefact(checkpoint, tmp_path, monkeypatch):
    export(checkpoint, tmp_path / "art", report_rows=0)
    before = recapp.load_model(tmp_path / "art").version

    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("recapp.stored.store.os.fsync", full)
    with pytest.raises(ArtefactError, match=r"cannot be written: No space left on device"):
        export(checkpoint, tmp_path / "art", report_rows=0, overwrite=True)
    assert recapp.load_model(tmp_path / "art").version == before
    assert [p.name for p in tmp_path.iterdir()] == ["art"]


def test_directories_of_the_users_beside_it_stay_as_they_are(checkpoint, tmp_path):
    """People call their own copies served.old and served.tmp."""
    for name in ("art.old", "art.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("mine")
    for _ in range(2):
        export(checkpoint, tmp_path / "art", report_rows=0, overwrite=True)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/precious")) == [
        "art.old/precious",
        "art.tmp/precious",
    ]
    shutil.move(tmp_path / "art", tmp_path / "moved.old")
    export(checkpoint, tmp_path / "moved", report_rows=0)
    assert recapp.load_model(tmp_path / "moved.old").name == "art"


def test_an_artefact_that_a_killed_export_was_replacing_is_read_and_gets_its_name_back(
    checkpoint, tmp_path
):
    export(checkpoint, tmp_path / "art", report_rows=0)
    (tmp_path / "art").rename(tmp_path / "art.recapp-replaced")
    (tmp_path / "art.recapp-export").mkdir()
    (tmp_path / "art.recapp-export" / "table.tmp").write_text("left behind")
    assert recapp.load_model(tmp_path / "art").name == "art"
    assert f'".{REPLACED}"' in (SOURCE / "manifest.cpp").read_text()
    with pytest.raises(ConfigError, match="there is an artefact: set overwrite=true"):
        export(checkpoint, tmp_path / "art", report_rows=0)
    export(checkpoint, tmp_path / "art", report_rows=0, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["art"]


def test_an_artefact_does_not_lie_in_its_checkpoint(checkpoint):
    with pytest.raises(ConfigError, match="lies in the directory of the checkpoint, and would be"):
        export(checkpoint, checkpoint / "deep" / "art", report_rows=0)
    assert not (checkpoint / "deep").exists()


def test_two_exports_do_not_write_the_same_artefact(tmp_path):
    with unfinished(tmp_path / "art", False) as folder:
        (folder / "first").write_text("whole")
        with (
            pytest.raises(ConfigError, match="another export is writing it"),
            unfinished(tmp_path / "art", False),
        ):
            pass
    assert [p.name for p in (tmp_path / "art").iterdir()] == ["first"]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("/", ConfigError, "output=/: is no name of a new directory"),
        ("file/art", ArtefactError, "cannot be written: Not a directory"),
        ("x" * 300, ArtefactError, "cannot be written: File name too long"),
    ],
)
def test_names_that_cannot_be_are_said_in_one_line(tmp_path, name, error, said):
    (tmp_path / "file").touch()
    with pytest.raises(error, match=said) as found, unfinished(tmp_path / name, False):
        pass
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("change", ["dataset.dense_transform=none", "tables.pooling=mean"])
def test_settings_that_the_command_line_changes_are_the_artefacts(
    checkpoint, logs, tmp_path, change
):
    export_model(checkpoint, tmp_path / "art", Export(report_rows=0, **FAST), compose(logs, change))
    group, _, name = change.partition("=")[0].partition(".")
    stored = json.loads((tmp_path / "art" / "manifest.json").read_text())["config"]
    assert stored[group][name] == change.partition("=")[2]
    model = recapp.load_model(tmp_path / "art")  # which scores its example
    assert len(model.predict(model.example)) == 16


def with_first_value(monkeypatch, value):
    """Have every table of a checkpoint begin with a value."""
    whole = TrainedTables.rows

    @contextmanager
    def changed(self, table):
        with whole(self, table) as found:
            found[:, 0] = value
            yield found

    monkeypatch.setattr(TrainedTables, "rows", changed)


def test_a_checkpoint_with_values_that_are_not_finite_is_refused(checkpoint, tmp_path, monkeypatch):
    with_first_value(monkeypatch, float("nan"))
    for quantize in ("none", "int8"):
        with pytest.raises(CheckpointError, match=r"table C1, rows from 0 on: "):
            export(checkpoint, tmp_path / "art", report_rows=0, quantize=quantize)
    with pytest.raises(
        CheckpointError, match="quantize=auto: the checkpoint gives validation rows"
    ):
        export(checkpoint, tmp_path / "art", quantize="auto")


def test_widths_that_cannot_hold_the_values_are_not_measured_and_not_chosen(
    checkpoint, tmp_path, monkeypatch, capsys
):
    with_first_value(monkeypatch, 2e6)
    report = export(checkpoint, tmp_path / "a", quantize="int8")
    assert [w["quantize"] for w in report["widths"]] == ["none", "int8", "exported"]
    assert "quantize=fp16 is not measured: table C1: there are values" in capsys.readouterr().err
    report = export(checkpoint, tmp_path / "b", quantize="auto", budget_ne=1.0)
    assert {t["stored"] for t in report["tables"]} == {"int8"}
    with pytest.raises(ConfigError, match="quantize_tables: table C1: there are values that fp16"):
        export(checkpoint, tmp_path / "c", quantize="auto", quantize_tables={"C1": "fp16"})


# ---- damaged and foreign artefacts


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "art"
    export(checkpoint, folder, quantize="int8", report_rows=0)
    return folder


@pytest.fixture
def artefact(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "art"))


def rewrite(artefact, change):
    """Change the manifest and seal it again, as somebody would who means harm."""
    file = artefact / "manifest.json"
    info = json.loads(file.read_text())
    info.pop("checksum")
    change(info)
    body = json.dumps(info)[:-1].encode()
    file.write_bytes(body + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(body))


@pytest.mark.parametrize("file", ["rows/int8_16.bin", "dense.safetensors"])
def test_a_flipped_bit_is_found_and_its_file_named(artefact, file):
    raw = bytearray((artefact / file).read_bytes())
    raw[len(raw) // 2] ^= 1
    (artefact / file).write_bytes(raw)
    with pytest.raises(ArtefactError, match=f"{file} is damaged: its bytes are not those"):
        recapp.load_model(artefact)


@pytest.mark.parametrize("file", ["rows/int8_16.bin", "dense.safetensors"])
def test_files_that_are_short_or_missing_are_named(artefact, file):
    raw = (artefact / file).read_bytes()
    (artefact / file).write_bytes(raw[:-7])
    said = f"is incomplete: {file} has {len(raw) - 7:,} of {len(raw):,} bytes"
    with pytest.raises(ArtefactError, match=said):
        recapp.load_model(artefact)
    (artefact / file).unlink()
    with pytest.raises(ArtefactError, match=f"is incomplete: {file} is missing"):
        recapp.load_model(artefact)


def test_a_manifest_that_was_changed_is_refused(artefact):
    file = artefact / "manifest.json"
    file.write_text(file.read_text().replace('"int8"', '"int4"', 1))
    with pytest.raises(ArtefactError, match="its bytes are not those that were written"):
        recapp.load_model(artefact)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: m.update(version=9),
            "has format recapp-artefact 9, but this recapp reads format recapp-artefact 4",
        ),
        (lambda m: m["tables"][0].update(rows=-1), "table C1 of -1 rows"),
        (lambda m: m["tables"][0].update(rows="7"), "rows='7'"),
        (lambda m: m["tables"][0].update(storage="int2"), "int2"),
        (lambda m: m["tables"][0].update(dim=8), "C1 has rows that|differs from its settings"),
        (lambda m: m["tables"][0].update(first_row=10**9), "C1 has rows that"),
        (lambda m: m["tables"].pop(), "settings and tables differ: C26"),
        (
            lambda m: m["ids"].update(lists=["C99"]),
            "artefact .* was trained on lists of C99, which is no",
        ),
        (lambda m: m["features"].update(lists=["C99"]), r"features\.lists is .*C99.*, which it"),
        (lambda m: m["tables"][0].update(file="../x"), "KeyError"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "crc32": "0"}}), 'file "../x"'),
        (lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "crc32": "0"}}), "/etc/passwd"),
        (lambda m: m["outputs"].update(logit=[0.5] * 16), "has the logit .* must be 0.500000"),
        (lambda m: m["outputs"].update(logit=[0.5]), "its example has 16 rows, and 1 scores"),
        (lambda m: m["outputs"].update(logit=[True] * 16), "outputs are no numbers"),
        (lambda m: m["outputs"].update(logit=3), "outputs are no numbers"),
        (lambda m: m["outputs"].update(more=[]), "outputs has logit, more, and the task logit"),
        (lambda m: m.pop("outputs"), "outputs is missing"),
        (lambda m: m["tables"][0].update(start_hash=2**70), "start values of table C1"),
        (lambda m: m["tables"][0].update(start_range=1e400), "start values of table C1"),
        (lambda m: m["tables"][1].update(storage="int4"), "C2 is not stored as the other tables"),
        (lambda m: m["files"].pop("dense.safetensors"), r"dense\.safetensors is not listed"),
        (lambda m: m.pop("config"), "config is missing"),
        (lambda m: m.pop("name"), "name is missing"),
    ],
)
def test_manifests_that_cannot_be_are_refused_in_one_line(artefact, change, said):
    rewrite(artefact, change)
    with pytest.raises(ArtefactError, match=said) as error:
        recapp.load_model(artefact)
    assert "\n" not in str(error.value)


def put(artefact, file, raw):
    """Replace a file, checksums included, as somebody would who means harm."""
    (artefact / file).write_bytes(raw)
    entry = {"bytes": len(raw), "crc32": f"{zlib.crc32(raw):08x}"}
    rewrite(artefact, lambda info: info["files"].update({file: entry}))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_that_stands_in_an_example_is_a_traceback(artefact, seed):
    rng = random.Random(f"example {seed}")
    odd = [None, True, -1, 2**70, 1e308, "", "x", [], [None], [[1]], {}, {"a": [1, "b"]}]

    def change(info):
        for row in rng.sample(info["example"], 3):
            row[rng.choice(sorted(row))] = rng.choice(odd)

    rewrite(artefact, change)
    with suppress(RecappError):
        recapp.load_model(artefact)


def test_an_artefact_without_an_example_is_exported_again(artefact):
    rewrite(artefact, lambda info: info.pop("example"))
    with pytest.raises(ArtefactError, match=r"it has no example.*; export it again"):
        recapp.load_model(artefact)


@pytest.mark.parametrize("kind", ["F4", "F8_E8M0", "F8_E4M3", "C64", "BOOL"])
def test_a_dense_part_of_strange_numbers_is_refused(artefact, kind):
    entry = {"odd": {"dtype": kind, "shape": [2], "data_offsets": [0, 0]}}
    entry["odd"]["data_offsets"][1] = {"F4": 1, "C64": 16}.get(kind, 2)
    head = json.dumps(entry).encode()
    end = bytes(entry["odd"]["data_offsets"][1])
    put(artefact, "dense.safetensors", len(head).to_bytes(8, "little") + head + end)
    with pytest.raises(ArtefactError, match="the manifest of artefact"):
        recapp.load_model(artefact)


def test_rows_of_another_table_are_noticed_by_the_example(artefact):
    """All checksums are right, but two tables have changed places."""

    def swap(info):
        tables = {t["name"]: t for t in info["tables"]}
        three, four = tables["C3"], tables["C26"]
        three["first_row"], four["first_row"] = four["first_row"] - 60 + 5, three["first_row"]

    rewrite(artefact, swap)
    with pytest.raises(ArtefactError, match=r"scores its example otherwise|has rows that"):
        recapp.load_model(artefact)


def test_settings_that_name_code_are_judged_as_a_checkpoints(artefact):
    def harm(info):
        info["config"]["model"] = {"_target_": "os.system", "command": "touch harm"}

    rewrite(artefact, harm)
    with pytest.raises(CheckpointError, match=r"os\.system"):
        recapp.load_model(artefact)
    assert not Path("harm").exists()


def test_a_path_without_a_name_of_its_own_is_read(artefact, monkeypatch):
    monkeypatch.chdir(artefact)
    assert recapp.load_model(".").name == "art"
    with pytest.raises(CheckpointError, match="/ is no checkpoint, or an incomplete one"):
        recapp.load_model("/")


@pytest.mark.parametrize("trust", ["mine", ["a],model.x=[b"], [3]])
def test_trust_names_packages(checkpoint, artefact, trust):
    for path in (checkpoint, artefact):
        with pytest.raises(ConfigError, match="must be a list of packages"):
            recapp.load_model(path, trust=trust)


def test_what_is_no_artefact_is_said(checkpoint, artefact, tmp_path):
    with pytest.raises(CheckpointError):
        recapp.load_model(tmp_path)
    rewrite(artefact, lambda info: info.update(format="other"))
    with pytest.raises(ArtefactError, match='format "other"'):
        Artefact.at(artefact)
    with pytest.raises(ArtefactError, match=r"is a checkpoint: `python -m recapp\.export"):
        Artefact.at(checkpoint)
    with pytest.raises(ArtefactError, match="there is no such directory"):
        Artefact.at(tmp_path / "none")


def test_trust_of_code_that_is_not_there_is_noted(artefact, logs, capsys):
    model = recapp.load_model(artefact, trust_compiled=True)
    assert model.info["compiled"] is False
    assert "instead of a compiled one: it was exported without one" in capsys.readouterr().err


# ---- raw rows


def test_columns_that_lack_or_have_other_types_are_named(artefact, logs):
    model = recapp.load_model(artefact)
    rows = model.example
    with pytest.raises(recapp.errors.DataError, match="C3"):
        model.predict(rows.drop_columns(["C3"]))
    wrong = rows.set_column(rows.schema.get_field_index("I1"), "I1", pa.array(["x"] * len(rows)))
    with pytest.raises(recapp.errors.DataError, match="I1"):
        model.predict(wrong)
    assert len(model.predict(rows.slice(0, 0))) == 0


# ---- compiled


@pytest.mark.full
@needs_compiler
def test_compiled_scores_of_dynamic_tables_equal_the_portable_ones(dynamic, logs, tmp_path, capsys):
    """Those of tables of fixed sizes: `test_every_path.py`."""
    folder = tmp_path / "art"
    export(dynamic, folder, quantize="int8", report_rows=0, compile=True)
    rows = rows_of(dynamic, logs)
    portable = recapp.load_model(folder)
    compiled = recapp.load_model(folder, trust_compiled=True)
    assert compiled.info["compiled"] and not portable.info["compiled"]
    for count in (1, 2, 300, 0):
        part = portable.batch(rows.slice(0, count))
        torch.testing.assert_close(compiled(part), portable(part), rtol=1e-5, atol=1e-5)
    entry = json.loads((folder / "manifest.json").read_text())["compiled"]
    assert entry["file"] == "compiled/dense.pt2" and entry["largest_difference"] <= 1e-5
    for change, said in (
        ({"flags": ["avx9"]}, "it needs avx9, which this CPU lacks"),
        ({"machine": "riscv64"}, "it is code for riscv64"),
        ({"torch": "1.0"}, r"it was compiled with torch 1\.0"),
    ):
        capsys.readouterr()
        rewrite(folder, lambda info, change=change: info["compiled"].update(change))
        fallen = recapp.load_model(folder, trust_compiled=True)
        assert not fallen.info["compiled"]
        assert said.replace("\\", "") in capsys.readouterr().err
        rewrite(folder, lambda info: info.update(compiled=entry))
    raw = bytearray((folder / "compiled/dense.pt2").read_bytes())
    raw[100] ^= 1
    (folder / "compiled/dense.pt2").write_bytes(raw)
    assert torch.equal(recapp.load_model(folder).predict(rows), portable.predict(rows))
    with pytest.raises(ArtefactError, match=r"dense\.pt2 is damaged"):
        recapp.load_model(folder, trust_compiled=True)


def test_collections_of_two_types_are_not_compiled():
    def bags(name, data_type):
        table = recapp.EmbeddingBagConfig(10, 4, name, data_type, [name])
        return recapp.EmbeddingBagCollection([table], device=torch.device("meta"))

    types = (recapp.DataType.FP32, recapp.DataType.FP64)
    model = one_rank(nn.ModuleList(map(bags, "ab", types)), torch.device("cpu"))
    with pytest.raises(NotCompiled, match=r"compute in float32 and float64, .*: give the tab"):
        compile_dense(model, ClickTask(), 1)


def test_code_that_cannot_be_loaded_is_noted(artefact, capsys):
    put(artefact, "dense.pt2", b"no package")
    entry = {
        "file": "dense.pt2",
        "machine": platform.machine(),
        "flags": [],
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "outputs": ["logit"],
    }
    rewrite(artefact, lambda info: info.update(compiled=entry))
    model = recapp.load_model(artefact, trust_compiled=True)
    assert model.info["compiled"] is False
    assert "instead of a compiled one: it cannot be loaded here: " in capsys.readouterr().err
    rewrite(artefact, lambda info: info["compiled"].update(file="other.pt2"))
    with pytest.raises(ArtefactError, match=r"other\.pt2 is not listed; export it again"):
        recapp.load_model(artefact, trust_compiled=True)


def test_without_a_compiler_the_artefact_has_no_code(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    export(checkpoint, tmp_path / "art", report_rows=0, compile=True)
    assert "there is no C++ compiler no-such-compiler here" in capsys.readouterr().err
    assert not (tmp_path / "art" / "compiled").exists()


def test_compiling_silences_torch_alone():
    with compiled._quiet():
        assert logging.getLogger("of.a.user").isEnabledFor(logging.WARNING)
        assert not logging.getLogger("torch.export").isEnabledFor(logging.WARNING)
    assert logging.getLogger("torch.export").isEnabledFor(logging.WARNING)
