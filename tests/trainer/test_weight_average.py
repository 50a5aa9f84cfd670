"""Averages of weights in runs on one rank: across resumes, under every plan, and what is stored."""

from types import SimpleNamespace

import pytest
import torch
from engine.test_dynamic_tables import rows_by_key
from tiers import one_of
from torch import nn
from torch.nn import functional
from torch.optim import swa_utils
from trainer.runs import compose, fit
from trainer.test_restart_tables import blocks_of, same

import recapp
from recapp.engine.row_average import RowAverage
from recapp.errors import ConfigError
from recapp.kernels.row_memory import RowMemory
from recapp.planner.rank_memory import average_bytes, bytes_per_rank
from recapp.stored.stored_model import load_table, read_manifest, read_meta
from recapp.tables.config import EmbeddingConfig
from recapp.trainer.lightnings_parts import OF_AVERAGE, AverageWeights, WeightAverage
from recapp.trainer.trainer_settings import AverageSettings
from recapp.transport.communicator import Comm

EPOCH = 4
SHORT = (f"trainer.limit_train_batches={EPOCH}", "trainer.limit_val_batches=1")
EMA = ("trainer.average.kind=ema", "trainer.average.every=1", "trainer.average.decay=0.8")
SWA = ("trainer.average.kind=swa", "trainer.average.every=2", "trainer.average.start=3")
EPOCHS = ("trainer.average.kind=swa", "trainer.average.every=null")
RESTART = (*EMA, "optimizer.restart_tables=['*']", "tables.data_type=bf16")
GROWS = (*SWA, "tables=dynamic", "tables.init_range=0.05")


def run(logs, folder, steps, *more, plan="mixed", ckpt_path=None):
    """All that a checkpoint would hold after some steps, the metrics, and the trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = compose(logs, *SHORT, *more, f"trainer.max_steps={steps}", f"+plan={plan}")
    _, trainer, module = fit(settings, folder, ckpt_path=ckpt_path)
    (shared,) = trainer.strategy.sharded_tables()
    kept = trainer.strategy.weight_average
    whole = type("Whole", (), {"state": shared.state})()
    whole.blocks = lambda: shared.blocks(averaged=kept.updates > 0)
    dynamic = any(group.dynamic for group in shared.state.layout.groups)
    rows = rows_by_key(Comm(), whole) if dynamic else blocks_of(whole)
    dense = dict(module.model.named_parameters())
    average = kept.averaged(trainer.strategy.lightning_module_state_dict())
    state = {("raw", n): held.detach().clone() for n, held in dense.items()}
    state |= {("average", n): held.clone() for n, held in average.items()}
    return rows, state, trainer


UPDATES = {EMA: 10, SWA: 4, EPOCHS: 2, RESTART: 2, GROWS: 4}  # in ten steps of three epochs


@pytest.mark.parametrize(
    "more", one_of(9, [(more,) for more in UPDATES])
)  # every step; with tables that begin anew
def test_a_resumed_run_is_the_unbroken_one_under_another_plan(logs, tmp_path, more):
    rows, dense, trainer = run(logs, tmp_path / "whole", 2 * EPOCH + 2, *more)
    assert trainer.strategy.weight_average.updates == UPDATES[more]
    assert not all(torch.equal(rows[t, "raw"], rows[t, "weight"]) for t, x in rows if x == "raw")
    run(logs, tmp_path / "half", EPOCH + 2, *more, plan="row_wise")
    last = tmp_path / "half/checkpoints/last.ckpt"
    again = run(logs, tmp_path / "rest", 2 * EPOCH + 2, *more, plan="column_wise", ckpt_path=last)
    assert same(again[0], rows) and same(again[1], dense)
    assert again[2].callback_metrics["val_auc"] == trainer.callback_metrics["val_auc"]


@pytest.mark.full
def test_two_ranks_resume_an_average_under_another_plan(jobs, tmp_path):
    shape = ("dataset=sample", f"dataset.path={tmp_path}/clicks", "dataset.generate.rows=2000")
    small = ("dataset.table_rows=[60,40,20]", "tables=from_dataset", "tables.id_rule=hash")
    wanted = (*shape, *small, "dataset.batch_size=128", *EMA, "tables.data_type=bf16")
    jobs.train(tmp_path / "whole", *wanted, "+plan=row_wise", "trainer.max_steps=6")
    half = jobs.train(tmp_path / "half", *wanted, "+plan=table_wise", "trainer.max_steps=3")
    on = (f"ckpt_path={half['checkpoint']}", "+plan=column_wise", "trainer.max_steps=6")
    jobs.train(tmp_path / "rest", *wanted, *on)
    stored = [(tmp_path / name / "checkpoints/last.ckpt") for name in ("whole", "rest")]
    for part in ("weight", "raw", "average"):
        assert torch.equal(*(load_table(path, "small_table", part) for path in stored))
    first, second = (read_meta(path) for path in stored)
    assert same(first["state_dict"], second["state_dict"])
    assert same(first[OF_AVERAGE]["raw"], second[OF_AVERAGE]["raw"])
    scores = [read_manifest(path).metrics["val_auc"] for path in stored]
    assert scores[0] == scores[1]


def test_the_average_begins_anew_with_the_tables(logs, tmp_path):
    rows, dense, _ = run(logs, tmp_path, EPOCH + 1, *RESTART)
    assert all(torch.equal(rows[t, "raw"], rows[t, "weight"]) for t, x in rows if x == "raw")
    raw = {name: held for (of, name), held in dense.items() if of == "raw"}
    assert all(torch.equal(dense["average", f"model.{name}"], held) for name, held in raw.items())


def test_training_is_the_same_with_and_without_an_average(logs, tmp_path, capfd):
    rows, dense, _ = run(logs, tmp_path / "with", EPOCH + 2, *EMA)
    never = (*EMA, "trainer.average.start=99")
    plain_rows, plain, _ = run(logs, tmp_path / "without", EPOCH + 2, *never)
    said = "trainer.average.start=99 trainer.average.every=1: training ended before the first "
    assert capfd.readouterr().err.count(said) == 1
    raw = {table: held for (table, tensor), held in rows.items() if tensor == "raw"}
    assert raw and all(torch.equal(held, plain_rows[t, "weight"]) for t, held in raw.items())
    of_dense = {key: held for key, held in plain.items() if key[0] == "raw"}
    assert all(torch.equal(dense[key], held) for key, held in of_dense.items())
    # and a run goes on from the raw weights when it averages no longer
    last = tmp_path / "with/checkpoints/last.ckpt"
    on = run(logs, tmp_path / "on", 2 * EPOCH, ckpt_path=last)
    said = "the checkpoint has an average of the weights, and trainer.average.kind=none ends it: "
    assert capfd.readouterr().err.count(said) == 1
    longer = run(logs, tmp_path / "longer", 2 * EPOCH)
    assert same(on[0], longer[0]) and same(on[1], longer[1])


def test_the_average_is_validated_stored_and_scored(logs, tmp_path):
    rows, dense, trainer = run(logs, tmp_path, EPOCH + 2, *EMA)
    last = tmp_path / "checkpoints/last.ckpt"
    for table in ("C1", "C3"):
        assert torch.equal(load_table(last, table), rows[table, "weight"])
        assert torch.equal(load_table(last, table, "raw"), rows[table, "raw"])
        assert not torch.equal(rows[table, "weight"], rows[table, "raw"])
    stored = read_meta(last)["state_dict"]
    assert all(torch.equal(held, dense["average", name]) for name, held in stored.items())
    assert not torch.equal(stored["model.bottom.0.weight"], dense["raw", "bottom.0.weight"])
    scorer = recapp.load_model(last)
    batch = next(iter(trainer.datamodule.val_dataloader()))
    logits = scorer.outputs(batch)["logit"]
    loss = functional.binary_cross_entropy_with_logits(logits, batch.labels_B)
    assert float(trainer.callback_metrics["val_log_loss"]) == pytest.approx(float(loss), rel=1e-5)


class Layers(nn.Module):
    """A dense part with a shared parameter and running statistics, and no tables."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight


@pytest.mark.parametrize("moving", [True, False])
def test_the_dense_part_is_averaged_as_by_torch(moving):
    torch.manual_seed(1)
    module = Layers()
    move = swa_utils.get_ema_multi_avg_fn(0.7) if moving else None
    wanted = swa_utils.AveragedModel(module, multi_avg_fn=move, use_buffers=True)
    average = WeightAverage()
    average.keep(module, [])
    average.show()  # there is none yet
    for step in range(4):
        for held in (*module.parameters(), module.norm.running_mean, module.norm.running_var):
            held.data.add_(torch.rand_like(held))
        average.update(1 - 0.7 if moving else 1 / (step + 1))
        wanted.update_parameters(module)
    raw = {name: held.clone() for name, held in module.state_dict().items()}
    expected = {n: v for n, v in wanted.module.state_dict().items() if "num_batches" not in n}
    found = average.averaged(module.state_dict())
    for name, held in expected.items():
        torch.testing.assert_close(found[name], held, rtol=1e-6, atol=1e-7)
    average.show()
    shown = module.state_dict()
    assert all(torch.equal(shown[name], found[name]) for name in expected)
    stored = average.entries()[OF_AVERAGE]["raw"]  # a signal may save meanwhile
    assert all(torch.equal(stored[name], raw[name]) for name in expected)
    assert module.last.weight is module.first.weight
    average.hide()
    assert all(torch.equal(raw[name], held) for name, held in module.state_dict().items())


def test_planners_count_the_average(logs, tmp_path):
    _, _, trainer = run(logs, tmp_path, 2, *EMA)
    (shared,) = trainer.strategy.sharded_tables()
    (held,) = bytes_per_rank(shared.tables(), shared.plan, trainer.strategy.rule, True)
    assert held.total == sum(sum(store.nbytes) for store in shared.state.stores)


def test_a_second_training_begins_a_second_average():
    module, average = Layers(), WeightAverage()
    for start in (1.0, 3.0):
        average.keep(module, ())
        assert not average.updates
        module.first.weight.data.fill_(start)
        average.update(0.5)
        assert average.averaged(module.state_dict())["first.weight"].eq(start).all()


def test_the_average_of_a_model_of_tables_alone_makes_room_for_the_rows_again(capfd):
    """A model without dense weights, such as the dot product of two tables."""
    shown = []
    tables = SimpleNamespace(
        keep_average=lambda: None, update_average=shown.append, show_average=shown.append
    )
    average = WeightAverage()
    average.keep(nn.Module(), [tables])
    average.update(0.5)
    for show in (average.show, average.show, average.hide, average.hide):
        show()
    assert shown == [1.0, True, False]
    entry = {OF_AVERAGE: {"raw": {}, "average": {}}, "state_dict": {}}
    average.loaded(entry, noted=True)
    assert not capfd.readouterr().err  # which says that another run keeps no average
    WeightAverage().loaded(entry, noted=True)
    assert "trainer.average.kind=none ends it" in capfd.readouterr().err


@pytest.mark.parametrize("shown", [True, False])
def test_raw_weights_and_averages_are_checked_before_they_are_saved(shown):
    module, average = Layers(), WeightAverage()
    average.keep(module, ())
    assert average.tensors() == {}
    average.update(1.0)
    average.show() if shown else average.hide()
    held = average.tensors()
    assert {"first.weight, raw", "first.weight, average"} <= held.keys()
    raw = average.entries()[OF_AVERAGE]["raw"]
    assert all(held[f"{name}, raw"] is raw[name] for name in ("first.weight", "norm.bias"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    one_of(
        2,
        [
            (["decay=1"], r"trainer.average.decay=1: must be a number above 0 and below 1"),
            (["decay=0"], r"trainer.average.decay=0: must be a number above 0 and below 1"),
            (["every=0"], r"trainer.average.every=0: must be a whole number of at least 1"),
            (["kind=mean"], r"trainer.average.kind=mean: "),
        ],
    ),
)
def test_wrong_settings_are_refused(logs, overrides, message):
    named = [f"trainer.average.{override}" for override in overrides]
    with pytest.raises(ConfigError, match=message):
        compose(logs, *named)


@pytest.mark.parametrize("wrong", [{"kind": "mean"}, {"decay": 1}, {"every": 0}, {"start": -1}])
def test_settings_made_in_python_are_checked(wrong):
    ((name, _),) = wrong.items()
    with pytest.raises(ConfigError, match=f"trainer.average.{name}=.*: (must be|known)"):
        AverageSettings(**{"kind": "ema", **wrong})


def test_a_callback_without_a_kind_of_average_is_refused():
    with pytest.raises(ConfigError, match="kind=none averages nothing: set ema or swa"):
        AverageWeights(AverageSettings())


@pytest.mark.parametrize(
    ("every", "start", "updates"),
    [
        (1, 0, [1, 2, 3, 4, 5, 6]),
        (1, 2, [3, 4, 5, 6]),
        (2, 2, [4, 6]),
        (None, 0, [2, 4, 6]),
        (None, 1, [4, 6]),
    ],
)
def test_the_first_steps_or_epochs_have_no_update(every, start, updates):
    """In three epochs of two steps."""
    callback = AverageWeights(AverageSettings(kind="swa", every=every, start=start))
    found = []
    for step in range(1, 7):
        over = step % 2 == 0
        trainer = SimpleNamespace(
            global_step=step,
            current_epoch=(step - 1) // 2,
            is_last_batch=over,
            num_training_batches=2,
        )
        before = callback.average.updates
        callback.on_step(trainer, 2 if over else 1)
        found += [step] if callback.average.updates > before else []
    assert found == updates


@pytest.mark.parametrize(("stage", "times"), [("fit", 1), ("validate", 0)])
def test_training_says_that_the_average_of_a_checkpoint_is_of_another_kind(stage, times, capfd):
    stored = AverageWeights(AverageSettings(kind="swa"))
    stored.average.updates = 3
    callback = AverageWeights(AverageSettings(kind="ema"))
    trainer = SimpleNamespace(strategy=SimpleNamespace(), is_global_zero=True)
    callback.setup(trainer, nn.Identity(), stage)
    callback.load_state_dict(stored.state_dict())
    said = "trainer.average.kind=ema: the average begins anew, because that of the checkpoint is of"
    assert capfd.readouterr().err.count(said) == times and not callback.average.updates


def test_the_rounded_copy_that_lookups_read_is_counted():
    trained = RowMemory(4, 3, torch.bfloat16, torch.device("cpu"))
    trained.grow(4)
    average = RowAverage(trained, torch.float32)
    hidden = average.nbytes
    average.show(True)
    assert average.nbytes == hidden + trained.nbytes == 4 * 3 * (4 + 2)
    table = EmbeddingConfig(
        name="t", num_embeddings=4, embedding_dim=3, feature_names=["f"], data_type="bf16"
    )
    assert 4 * average_bytes(table, 3, 4) == average.nbytes
    average.show(False)
    assert average.nbytes == hidden


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"decay": 0.8, "kind": "swa"}, "decay=0.8: has no effect with .*kind=swa: .* kind to ema"),
        ({"every": 5}, "every=5: has no effect with .*kind=none: leave it out, or .* ema or swa"),
        ({"start": 5}, "start=5: has no effect with .*kind=none: leave it out, or .* ema or swa"),
    ],
)
def test_settings_without_effect_are_refused(given, says):
    with pytest.raises(ConfigError, match=f"trainer.average.{says}"):
        AverageWeights(AverageSettings(**given))


def test_an_average_over_epochs_of_tables_that_begin_anew_is_refused(logs):
    with pytest.raises(ConfigError, match=r"trainer.average.every=null: optimizer.restart_tables"):
        compose(logs, *EPOCHS, "optimizer.restart_tables=['*']")
