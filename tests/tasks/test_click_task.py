"""What click prediction says of itself is what its metrics and its loss do."""

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recapp.errors import ConfigError
from recapp.metrics import click_metrics
from recapp.run.constructors import build_task
from recapp.settings.records import Constructor, find_constructor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tasks.measures import Measure, measures_from
from recapp.tasks.task import ClickTask, Output, Task


def batch_of(labels, weights=None):
    labels_B = torch.tensor(labels, dtype=torch.float32)
    sparse = KeyedJaggedTensor(
        ["C1"], torch.arange(len(labels)), lengths=torch.ones(len(labels), dtype=torch.int64)
    )
    return Batch(torch.zeros(len(labels), 0), sparse, labels_B, weights)


def test_it_knows_the_metrics_of_clicks_and_which_way_is_better():
    words = {True: "max", False: "min", None: None}
    known = {name: words[metric.higher_is_better] for name, metric in click_metrics().items()}
    assert {measure.name: measure.better for measure in ClickTask().measures} == known


def test_metrics_are_chosen_by_name_and_unknown_ones_refused():
    task = ClickTask(["log_loss", "auc"])
    assert list(task.make_metrics()) == ["log_loss", "auc"]
    assert (task.measures.objective, task.measures.mode) == ("val_auc", "max")
    with pytest.raises(ConfigError, match=r"metrics.names has auk: did you mean auc\?"):
        ClickTask(["auk"])


def test_the_loss_is_the_mean_cross_entropy_and_nothing_for_no_samples():
    logits_B = torch.tensor([0.3, -2.0, 1.0])
    task = ClickTask()
    batch = batch_of([1, 0, 1])
    expected = binary_cross_entropy_with_logits(logits_B, batch.labels_B, reduction="sum") / 3
    assert torch.equal(task.loss({"logit": logits_B}, batch), expected)
    assert task.loss({"logit": torch.zeros(0)}, batch_of([])) == 0


@pytest.mark.parametrize("settings", [{}, {"focal": 2.0}, {"ranking": 0.5}], ids=str)
def test_rows_of_unknown_label_and_weight_0_count_in_neither_loss_nor_metrics(settings):
    task = ClickTask(**settings)
    logits_B = torch.tensor([0.3, 9.0, -2.0, 1.0, -9.0])
    known = torch.tensor([True, False, True, True, False])
    every = batch_of([1, 0, 0, 1, 0], {"label": known.float()})
    some = batch_of([1, 0, 1], {"label": torch.ones(3)})
    expected = task.loss({"logit": logits_B[known]}, some) * 3 / 5
    assert torch.allclose(task.loss({"logit": logits_B}, every), expected)
    with_unknown, without = task.make_metrics(False), task.make_metrics(False)
    task.update(with_unknown, {"logit": logits_B}, every)
    task.update(without, {"logit": logits_B[known]}, some)
    for name in without:
        assert with_unknown[name].compute() == without[name].compute(), name


def test_metrics_are_updated_with_logits_and_labels():
    logits_B = torch.tensor([0.3, -2.0, 1.0], dtype=torch.bfloat16)
    task = ClickTask()
    metrics = task.make_metrics(sync_on_compute=False)
    task.update(metrics, {"logit": logits_B}, batch_of([1, 0, 1]))
    for name, metric in click_metrics(sync_on_compute=False).items():
        metric.update(logits_B.float(), torch.tensor([1.0, 0.0, 1.0]))
        assert torch.equal(metrics[name].compute(), metric.compute())


def test_a_tensor_is_the_only_output_and_scores_are_probabilities():
    task = ClickTask()
    logits_B = torch.tensor([0.0, 3.0])
    outputs = task.named(logits_B, 2, "Model")
    assert outputs["logit"] is logits_B and task.named({"logit": logits_B}, 2, "M") == outputs
    assert torch.equal(task.scores(outputs)["score"], torch.sigmoid(logits_B))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ((1, 2), "returned a tuple"),
        (torch.zeros(2, 1), r"returned a tensor of shape \[2, 1\] for 2 samples"),
        ({"click": torch.zeros(2)}, "returned a mapping without logit"),
    ],
)
def test_what_is_no_logit_for_each_sample_is_refused(found, says):
    with pytest.raises(ConfigError, match=f"model Mine {says}.*one logit for each sample"):
        ClickTask().named(found, 2, "Mine")


class Mine(ClickTask):
    """A task whose parts each test gives."""

    def __init__(self, names=None, **parts):
        for name, value in ({"outputs": (Output("logit"),)} | parts).items():
            setattr(self, name, value)
        Task.__init__(self, names)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"outputs": ()}, r"it has no outputs: give it an Output\(\.\.\.\)"),
        (
            {"outputs": (Output("click"), Output("order"))},
            r"two outputs have the column score: give each Output\(\.\.\.\) a column of its own",
        ),
        (
            {"outputs": (Output("click"), Output("click", column="other"))},
            r"two outputs have the name click: give each Output\(\.\.\.\) a name of its own",
        ),
        (
            {"outputs": (Output("click", column="order"), Output("order"))},
            "the output click has the column order, the name of another output: give the column",
        ),
        (
            {"known": (Measure("auc", "AUC", "max", output="logt"),)},
            r"the metric auc reads the output logt: did you mean logit\?",
        ),
        ({"best": "auk"}, r"best is the metric auk: did you mean auc\?"),
        ({"storage_metric": "log_los"}, r"storage_metric is the metric log_los: did you mean log_"),
        (
            {"storage_metric": "calibration"},
            r"storage_metric is the metric calibration, of which no value is better: give its Mea",
        ),
    ],
)
def test_a_task_whose_parts_do_not_fit_together_is_refused(parts, says):
    target = f"{Mine.__module__}.Mine"
    assert build_task(Constructor(target)).outputs == (Output("logit"),)
    with pytest.raises(ConfigError, match=rf"^task\._target_={target}: {says}"):
        build_task(Constructor(target, parts))
    named = (Output("price", column="price", activation="identity"),)
    assert build_task(Constructor(target, {"outputs": named})).outputs == named


def test_an_activation_that_no_program_computes_is_refused():
    assert Output("price", activation="identity").score(3.0) == 3.0
    says = r"output price: activation=softmax: must be sigmoid or identity: let the model"
    with pytest.raises(ConfigError, match=says):
        Output("price", activation="softmax")


def test_a_task_with_scores_of_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"Doubled\.scores: a task has none of its own"):

        class Doubled(ClickTask):
            def scores(self, outputs):
                return {"score": 2 * outputs["logit"]}


def test_measures_come_back_from_what_a_run_stores():
    measures = ClickTask().measures
    plain = measures.plain()
    plain["metrics"][0]["later"] = "of a newer version"
    assert measures_from(plain) == measures
    for damaged in ({}, {"best": "auc", "metrics": 3}, {"best": "auc", "metrics": [3]}):
        with pytest.raises(ValueError, match="no metrics"):
            measures_from(damaged)


def test_a_task_is_made_without_torch():
    said = "import sys; from recapp.tasks.task import ClickTask; ClickTask(); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert not {"torch", "torchmetrics"} & set(out.stdout.split())


def test_the_label_is_the_only_one_or_the_one_that_is_named():
    assert ClickTask().check_labels(["clicked"]) == ((), ())
    assert ClickTask(label="bought").check_labels(["clicked", "bought"]) == ((), ())
    with pytest.raises(ConfigError, match=r"dataset.label=\[clicked,bought\]: .*task.label=click"):
        ClickTask().check_labels(["clicked", "bought"])
    with pytest.raises(
        ConfigError, match=r"dataset.label=clicked: has no label klicked, .*: did you mean"
    ):
        ClickTask(label="klicked").check_labels(["clicked"])


def test_weights_multiply_the_loss_of_each_sample():
    logits_B = torch.tensor([0.3, -2.0])
    labels = {"clicked": torch.tensor([1.0, 0.0]), "bought": torch.tensor([0.0, 1.0])}
    weights = {"bought": torch.tensor([2.0, 0.0])}
    plain = batch_of([1, 0])
    batch = Batch(plain.dense_BI, plain.sparse, labels, weights)
    found = ClickTask(label="bought").loss({"logit": logits_B}, batch)
    alone = binary_cross_entropy_with_logits(logits_B[:1], labels["bought"][:1])
    assert found == 2 * alone / 2
    unweighted = ClickTask(label="clicked").loss({"logit": logits_B}, batch)
    assert unweighted == binary_cross_entropy_with_logits(logits_B, labels["clicked"])


@pytest.mark.parametrize("target", ["", ".", "..x", "a..b", "not a path"])
def test_a_constructor_needs_a_module_and_a_class(target):
    with pytest.raises(ConfigError, match=r"task\._target_=.*must be a module and a class"):
        find_constructor(target, "task")


def test_a_module_that_cannot_be_imported_names_the_import_that_fails(tmp_path, monkeypatch):
    (tmp_path / "lacking_task.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    says = (
        r"task\._target_=lacking_task\.Mine: .*lacking_task imports not_installed_here: No module"
    )
    with pytest.raises(ConfigError, match=says):
        find_constructor("lacking_task.Mine", "task")
