"""`recapp.load_model`: a checkpoint as an ordinary module, in a process that knows no ranks."""

import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from jobs import metrics_of, small
from trainer.runs import compose, fit, make_logs

import recapp
from recapp.errors import CheckpointError, DataError
from recapp.metrics import click_metrics
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Logs, and where `trained` saves."""
    base = tmp_path_factory.mktemp("load_model")
    make_logs(base / "logs")
    return base


@pytest.fixture(scope="module")
def trained(base):
    """The modules of two runs of one rank in this process, `hashed` and `dynamic`."""
    found = {}
    for kind, more in (("hashed", ()), ("dynamic", ["tables=dynamic"])):
        settings = compose(base / "logs", "trainer.max_steps=4", *more)
        _, _, found[kind] = fit(settings, base / kind)
    return found


@pytest.fixture(scope="module", autouse=True)
def _all_trained(trained):
    """Each test loads what was trained."""


def last(base, kind="hashed"):
    return base / kind / "checkpoints/last.ckpt"


def rows_of(base):
    return pq.read_table(base / "logs")


def test_three_lines_give_scores_of_raw_rows(base):
    had_ranks = torch.distributed.is_initialized()
    model = recapp.load_model(last(base))
    scores = model.predict(rows_of(base))
    assert isinstance(model, torch.nn.Module) and not model.training
    assert scores.shape == (2100,) and scores.dtype == torch.float32
    assert bool(((scores > 0) & (scores < 1)).all()) and len(scores.unique()) > 1000
    assert not any(p.requires_grad for p in model.parameters())
    assert torch.distributed.is_initialized() == had_ranks


@pytest.mark.full
def test_a_process_that_scores_does_without_the_trainer(base, tmp_path):
    recapp.export_model(last(base), tmp_path / "art", recapp.Export(report_rows=0, compile=False))
    for path in (last(base), tmp_path / "art"):
        code = (
            "import sys, recapp, pyarrow.parquet as pq\n"
            f"recapp.load_model({str(path)!r}).predict(pq.read_table({str(base / 'logs')!r}))\n"
            "print(sorted({'lightning', 'torchmetrics', 'matplotlib'} & sys.modules.keys()))"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


@pytest.mark.parametrize("kind", ["hashed", "dynamic"])
def test_its_logits_are_those_of_the_model_in_the_trainer(base, trained, kind):
    model = recapp.load_model(last(base, kind))
    batch = model.batch(rows_of(base).slice(0, 300))
    with torch.no_grad():
        wanted = trained[kind].eval()(batch)
    assert torch.equal(model(batch), wanted)


def test_a_row_scores_alike_alone_and_among_others_but_for_last_bits(base):
    model = recapp.load_model(last(base))
    rows = rows_of(base)
    alone = torch.cat([model.predict(rows.slice(n, 1)) for n in range(20)])
    torch.testing.assert_close(alone, model.predict(rows)[:20], atol=1e-6, rtol=0)


def test_any_number_of_rows_none_included_is_scored(base):
    model = recapp.load_model(last(base))
    rows = rows_of(base)
    many = pa.concat_tables([rows] * 4)
    assert model.predict(rows.slice(0, 0)).shape == (0,)
    assert torch.allclose(model.predict(many)[2100:4200], model.predict(rows), atol=1e-6)


def test_rows_need_no_label_and_names_may_be_others_that_training_knows(base):
    model = recapp.load_model(last(base))
    rows = rows_of(base).slice(0, 50)
    wanted = model.predict(rows)
    unlabelled = rows.drop(["label"])
    assert torch.equal(model.predict(unlabelled), wanted)
    assert torch.equal(
        model.predict(unlabelled.rename_columns([f"_c{n}" for n in range(1, 40)])), wanted
    )
    assert torch.equal(
        model.predict(unlabelled.rename_columns([f"x{n}" for n in range(39)])), wanted
    )


def test_a_missing_column_is_named(base):
    model = recapp.load_model(last(base))
    with pytest.raises(DataError, match="no column for C7"):
        model.predict(rows_of(base).drop(["C7"]))


def test_a_key_that_a_dynamic_table_has_never_seen_is_scored(base):
    model = recapp.load_model(last(base, "dynamic"))
    batch = model.batch(rows_of(base).slice(0, 5))
    new = KeyedJaggedTensor(
        list(batch.sparse.keys()),
        torch.full_like(batch.sparse.values(), 2**61),
        lengths=batch.sparse.lengths(),
    )
    first, second = (model(Batch(batch.dense_BI, new, batch.labels_B)) for _ in range(2))
    assert torch.isfinite(first).all() and torch.equal(first, second)


# ---- damage


@pytest.fixture
def copy(base, tmp_path):
    path = tmp_path / "copy.ckpt"
    shutil.copytree(last(base).resolve(), path)
    return path


def test_a_path_that_is_no_checkpoint_says_so(base):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*did you mean"):
        recapp.load_model(last(base).with_name("lost.ckpt"))
    with pytest.raises(CheckpointError, match="no checkpoint, or an incomplete one"):
        recapp.load_model(base)


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "meta.pt"])
def test_a_damaged_checkpoint_is_refused_by_file(copy, file):
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 255
    (copy / file).write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        recapp.load_model(copy)
    assert file in str(raised.value) or "table" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_cut_checkpoint_is_refused(copy):
    whole = (copy / "rank-00000.safetensors").read_bytes()
    (copy / "rank-00000.safetensors").write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match=r"is incomplete: rank-00000\.safetensors"):
        recapp.load_model(copy)


def test_a_manifest_that_was_changed_is_refused(copy):
    manifest = (copy / "manifest.json").read_text()
    changed = manifest.replace("recapp.models.published_dlrm.DLRM", "evil_package.Model")
    assert changed != manifest
    (copy / "manifest.json").write_text(changed)
    with pytest.raises(CheckpointError, match="its bytes are not those that were saved"):
        recapp.load_model(copy)


# ---- beside ranks


def loaded_beside_ranks(comm, path, logs):
    """What a rank of a process group gets from load_model; ranks load different numbers of times,
    which would hang if loading spoke to the others.
    """
    rows = pq.read_table(logs).slice(100 * comm.rank, 100)
    scores = [recapp.load_model(path).predict(rows) for _ in range(comm.rank + 1)][-1]
    return scores, comm.all_gather(comm.rank)


def test_inside_of_a_process_group_each_rank_loads_and_scores_by_itself(ranks, base):
    found = ranks.run(loaded_beside_ranks, 2, last(base), base / "logs")
    model = recapp.load_model(last(base))
    for rank, (scores, gathered) in enumerate(found):
        wanted = model.predict(rows_of(base).slice(100 * rank, 100))
        torch.testing.assert_close(scores, wanted, atol=1e-6, rtol=0)
        assert gathered == [0, 1]


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("plan", ["mixed", "row_wise"])
def test_it_measures_what_evaluation_measures_on_any_number_of_ranks(jobs, tmp_path, world, plan):
    jobs.train(
        tmp_path / "run",
        *small(tmp_path / "logs"),
        "trainer.max_steps=12",
        f"+plan={plan}",
        world=world,
    )
    path = tmp_path / "run/checkpoints/last.ckpt"
    measured = jobs.evaluate(tmp_path / "eval", f"ckpt_path={path}", world=world)
    rows = pa.concat_tables(
        pq.read_table(file) for file in sorted((tmp_path / "logs").glob("*.parquet"))
    )
    rows = rows.slice(rows.num_rows * 6 // 7)
    model = recapp.load_model(path)
    found = click_metrics(["auc", "log_loss"])
    labels = torch.tensor(rows["label"].to_numpy(zero_copy_only=False)).float()
    logits = torch.cat([model(model.batch(rows.slice(n, 256))) for n in range(0, len(rows), 256)])
    for name, metric in found.items():
        metric.update(logits, labels)
        assert float(metric.compute()) == pytest.approx(measured[f"val_{name}"], abs=1e-6), name
    assert metrics_of(tmp_path / "eval")["ranks"] == world
