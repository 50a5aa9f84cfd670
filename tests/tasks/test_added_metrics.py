"""Metrics and details of the group `metrics` against formulas over all samples, on one rank and on
two whose states are merged.
"""

import json
import math

import numpy as np
import pytest
import torch
from test_metrics import of_all_samples
from torchmetrics.classification import BinaryAccuracy

from recapp.errors import ConfigError
from recapp.metrics import click_metrics
from recapp.reporting.report_pages import part_of_page
from recapp.reporting.summary import (
    KEPT,
    interval,
    intervals,
    read_details,
    report_end,
    slices_of,
    write_details,
)
from recapp.run.constructors import build_task
from recapp.settings.records import Constructor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.sparse.missing_ids import MISSING, MISSING_INT32
from recapp.tasks.detail_metrics import SLICES, ids_of, poisson_weights
from recapp.tasks.measures import Measure, MetricSettings
from recapp.tasks.task import ClickTask, Output, Sample, Task

CLICK = Constructor("recapp.tasks.task.ClickTask")
RATING = Constructor("recapp.tasks.task.RatingTask")
ROWS = 301
CUTS = [120, 0, 150, 1, 30]


def rows(soft=False, groups=40):
    """Logits, labels, weights and groups of a log."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, generator=generator).mul(8).round() / 8  # with ties
    chance = torch.rand(ROWS, generator=generator)
    labels = chance if soft else (chance < logits.sigmoid()).float()
    weights = torch.rand(ROWS, generator=generator) + 0.1
    return logits, labels, weights, torch.randint(groups, (ROWS,), generator=generator)


def batches(labels, weights, groups, weighted, cuts=CUTS):
    parts = zip(labels.split(cuts), weights.split(cuts), groups.split(cuts), strict=True)
    first = 0
    for labels_B, weights_B, groups_B in parts:
        count = len(labels_B)
        sparse = KeyedJaggedTensor(["C1"], groups_B, lengths=torch.ones(count, dtype=torch.int64))
        dense = torch.arange(first, first + count, dtype=torch.float32)[:, None]
        given = {"label": weights_B} if weighted else None
        numbers = torch.arange(first, first + count)
        yield Batch(dense, sparse, labels_B, given, numbers)
        first += count


def measured(task, settings_of, logits, parts, ranks):
    """Metrics or details of some ranks, each updated with every other batch."""
    made = [settings_of(task) for _ in range(ranks)]
    for number, (logits_B, batch) in enumerate(parts):
        outputs = {task.outputs[0].name: logits_B}
        task.update(made[number % ranks], outputs, batch)
    return made


def merged(metrics):
    """The first metric, with the states of all: sums are added, lists joined."""
    first, *others = metrics
    for name, default in first._defaults.items():
        for other in others:
            now = getattr(first, name) + getattr(other, name)
            setattr(first, name, now)
        assert isinstance(default, list) or getattr(first, name).shape == default.shape
    for name, inner in getattr(first, "metrics", {}).items():
        merged([inner, *(other.metrics[name] for other in others)])
    first._computed = None
    return first


def test_ids_of_32_bits_are_those_of_64():
    wide, narrow = torch.tensor([7, MISSING]), torch.tensor([7, MISSING_INT32], dtype=torch.int32)
    for ids in (wide, narrow):
        (batch,) = batches(torch.ones(2), torch.ones(2), ids, False, [2])
        assert torch.equal(ids_of(batch, "C1"), wide)


def gauc_of_groups(logits, labels, weights, groups, soft):
    total = found = 0.0
    for group in groups.unique():
        own = groups == group
        clicks = (weights * labels)[own]
        others = (weights * (1 - labels))[own]
        if clicks.sum() > 0 and others.sum() > 0:
            auc = of_all_samples("auc", logits[own], labels[own], weights[own], soft)
            found += auc * weights[own].sum().item()
            total += weights[own].sum().item()
    return found / total


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_gauc_is_the_mean_of_groups_by_impressions(soft, weighted, ranks):
    logits, labels, weights, groups = rows(soft, groups=60)
    settings = MetricSettings(group="C1", names=("auc", "gauc"))
    kind = Constructor(CLICK.target, {"soft_labels": soft})
    task = build_task(kind, settings.names, settings)
    assert [one.name for one in task.measures] == ["auc", "gauc"]
    parts = zip(logits.split(CUTS), batches(labels, weights, groups, weighted), strict=True)
    made = measured(task, lambda t: t.make_metrics(False), logits, parts, ranks)
    value = merged([one["gauc"] for one in made]).compute().item()
    one = weights.double() if weighted else torch.ones(ROWS, dtype=torch.float64)
    wanted = gauc_of_groups(logits, labels.double(), one, groups, soft)
    assert value == pytest.approx(wanted, rel=1e-6)


def test_gauc_without_a_group_of_both_classes_or_without_rows_is_nan():
    settings = MetricSettings(group="C1")
    task = build_task(CLICK, None, settings)
    metric = task.make_metrics(False)["gauc"]
    none = next(batches(torch.ones(0), torch.ones(0), torch.ones(0, dtype=torch.int64), False, [0]))
    task.update({"gauc": metric}, {"logit": torch.zeros(0)}, none)
    assert math.isnan(metric.compute())
    batch = next(batches(torch.ones(3), torch.ones(3), torch.tensor([1, 1, 2]), False, [3]))
    task.update({"gauc": metric}, {"logit": torch.zeros(3)}, batch)
    assert math.isnan(metric.compute())


def test_a_missing_id_is_a_group_and_a_list_of_ids_is_refused():
    task = build_task(CLICK, None, MetricSettings(group="C1"))
    metrics = {"gauc": task.make_metrics(False)["gauc"]}

    def fed(lengths):
        lengths = torch.tensor(lengths)
        sparse = KeyedJaggedTensor(["C1"], torch.arange(int(lengths.sum())), lengths=lengths)
        batch = Batch(torch.zeros(3, 0), sparse, torch.tensor([0.0, 1.0, 0.0]))
        task.update(metrics, {"logit": torch.zeros(3)}, batch)

    fed([1, 0, 1])
    assert metrics["gauc"].groups[0].tolist() == [0, MISSING, 1]
    with pytest.raises(ConfigError, match="C1 has a list of ids in a row"):
        fed([1, 2, 0])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_slices_are_the_metrics_of_their_rows_and_the_rest_is_other(soft, weighted, ranks):
    logits, labels, weights, groups = rows(soft, groups=30)
    kind = Constructor(CLICK.target, {"soft_labels": soft})
    task = build_task(kind, None, MetricSettings(by=("C1",)))
    common = groups.bincount().argsort(descending=True)[:SLICES].tolist()

    def made(task):
        (detail,) = task.make_details().values()
        detail.set_values([(f"v{number}", number) for number in common])
        return {"by C1": detail}

    parts = zip(logits.split(CUTS), batches(labels, weights, groups, weighted), strict=True)
    details = measured(task, made, logits, parts, ranks)
    found = merged([one["by C1"] for one in details]).record()
    assert sum(one["rows"] for one in found) == ROWS and found[-1]["value"] == "other"
    one = weights.double() if weighted else torch.ones(ROWS, dtype=torch.float64)
    for each in found:
        rest = torch.tensor([int(group) not in common for group in groups])
        own = rest if each["other"] else groups == int(each["value"][1:])
        assert each["rows"] == own.sum()
        for name in ("auc", "log_loss", "calibration"):
            wanted = of_all_samples(name, logits[own], labels[own], one[own], soft)
            known = each[name] is not None
            assert known == math.isfinite(wanted)
            assert not known or each[name] == pytest.approx(wanted, abs=2e-3, rel=1e-9), name


def test_slices_of_ratings_have_errors():
    task = build_task(RATING, None, MetricSettings(by=("C1",)))
    (detail,) = task.make_details().values()
    detail.set_values([("one", 1)])
    labels = torch.tensor([3.0, 1.0, 5.0])
    batch = next(batches(labels, labels, torch.tensor([1, 1, 2]), False, [3]))
    task.update({"by C1": detail}, {"rating": torch.tensor([4.0, 1.0, 3.0])}, batch)
    one, other = detail.record()
    assert (one["value"], one["rows"], other["value"]) == ("one", 2, "other")
    assert one["rmse"] == pytest.approx(math.sqrt(0.5)) and one["difference"] == 0.5
    assert other["rmse"] == 2 and other["difference"] == -2


@pytest.mark.parametrize("weighted", [False, True])
def test_buckets_have_the_mean_prediction_and_the_share_of_clicks(weighted):
    logits, labels, weights, groups = rows()
    logits = logits + torch.arange(ROWS) / 1e4
    task = build_task(CLICK, None, MetricSettings(buckets=7))
    parts = zip(logits.split(CUTS), batches(labels, weights, groups, weighted), strict=True)
    made = measured(task, lambda t: t.make_details(), logits, parts, 2)
    found = merged([one["buckets"] for one in made]).record()
    one = weights.double() if weighted else torch.ones(ROWS, dtype=torch.float64)
    assert len(found) == 7
    assert sum(each["rows"] for each in found) == pytest.approx(one.sum().item())
    assert max(each["rows"] for each in found) < 1.2 * min(each["rows"] for each in found)
    means = [each["predicted"] for each in found]
    assert means == sorted(means)
    clicks = sum(each["clicks"] * each["rows"] for each in found)
    assert clicks == pytest.approx((one * labels).sum().item())


def test_poisson_weights_have_mean_and_variance_one_and_belong_to_rows():
    keys = torch.arange(4000) * 7919
    weights = poisson_weights(keys, 50)
    assert weights.mean().item() == pytest.approx(1, abs=0.01)
    assert weights.var().item() == pytest.approx(1, abs=0.02)
    assert np.abs(np.corrcoef(weights.numpy().T) - np.eye(50)).max() < 0.1
    assert torch.equal(poisson_weights(keys[17:29], 50), weights[17:29])


def test_a_bootstrap_knows_rows_by_their_numbers_and_labels():
    def record_of(numbers, labels, values, cuts):
        settings = MetricSettings(bootstrap=20, names=("log_loss",))
        metric = build_task(CLICK, None, settings).make_details()["bootstrap"]
        parts = (torch.tensor(each).split(cuts) for each in (numbers, labels, values))
        for numbers_B, labels_B, values_B in zip(*parts, strict=True):
            count = len(labels_B)
            ids = KeyedJaggedTensor(["a"], values_B, lengths=torch.ones(count, dtype=torch.int64))
            batch = Batch(values_B[:, None].float(), ids, labels_B, row_numbers_B=numbers_B)
            score_B = torch.full((count,), 0.25)
            metric.update(Sample(score_B.logit(), score_B, labels_B, None, batch))
        found = metric.record()
        return found["drawn"], found["rows"], found["metrics"]["log_loss"]

    labels = [0.0, 1.0, 1.0, 0.0]
    first = record_of([0, 1, 2, 3], labels, [7, 7, 7, 7], [4])
    # other columns, another order and other batches: the same rows
    assert record_of([2, 3, 0, 1], [1.0, 0.0, 0.0, 1.0], [1, 2, 3, 4], [1, 0, 3]) == first
    assert record_of([1, 2, 3, 4], labels, [7, 7, 7, 7], [4])[1] != first[1]
    assert record_of([0, 1, 2, 3], labels[::-1], [7, 7, 7, 7], [4])[1] == first[1]
    assert record_of([0, 1, 2, 3], [1.0, 1.0, 0.0, 0.0], [7, 7, 7, 7], [4])[1] != first[1]


def test_a_bootstrap_without_row_numbers_is_refused():
    settings = MetricSettings(bootstrap=20, names=("log_loss",))
    task = build_task(CLICK, None, settings)
    batch = next(batches(torch.ones(3), torch.ones(3), torch.tensor([1, 1, 2]), False, [3]))
    batch.row_numbers_B = None
    with pytest.raises(ConfigError, match=r"the batches have none: .*number_rows=True"):
        task.update(task.make_details(), {"logit": torch.zeros(3)}, batch)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_bootstrap_has_the_metrics_of_each_sample_of_the_rows(weighted):
    logits, labels, weights, groups = rows()
    names = (
        "auc",
        "log_loss",
        "normalized_entropy",
        "calibration",
        "pr_auc",
        "lift",
        "rmse",
        "mae",
    )
    settings = MetricSettings(bootstrap=20, names=names)
    task = build_task(CLICK, names, settings)
    every = list(batches(labels, weights, groups, weighted))
    made = measured(
        task, lambda t: t.make_details(), logits, zip(logits.split(CUTS), every, strict=True), 2
    )
    found = merged([one["bootstrap"] for one in made]).record()
    drawn = torch.cat([poisson_weights(batch.row_numbers_B, 20) for batch in every])
    assert found["drawn"] == drawn.sum(0).tolist()
    for name in names:
        for number in (0, 19):
            metric = click_metrics([name], False)[name]
            one = drawn[:, number] * (weights.double() if weighted else 1)
            metric.update(logits, labels, weights_B=one)
            value = found["metrics"][name][number]
            assert value == pytest.approx(metric.compute().item(), rel=2e-3), name


def test_intervals_of_a_bootstrap_are_its_quantiles():
    values = [float(number) for number in np.random.default_rng(1).normal(size=200)]
    low, high = np.quantile(values, [0.025, 0.975])
    assert interval(values) == pytest.approx((low, high))
    assert interval([1.0, math.nan]) is None and interval([]) is None
    details = {"bootstrap": {"metrics": {"auc": values}}}
    both = {"test_auc_low": low, "test_auc_high": high}
    assert intervals(details, "test") == pytest.approx(both, rel=1e-12)


EXTRA = "torchmetrics.classification."


class PriceAndClick(ClickTask):
    """A task whose metrics read other outputs by default than `metrics.output` may name."""

    known = (Measure("auc", "AUC", "max"), Measure("rmse", "RMSE", "min", output="click"))
    storage_metric = "auc"

    def __init__(self, names=None, order=("price", "click")):
        Task.__init__(self, names)
        kinds = {
            "price": Output("price", activation="identity", column="price"),
            "click": Output("click"),
        }
        self.outputs = tuple(kinds[name] for name in order)


SHOP = Constructor(f"{PriceAndClick.__module__}.PriceAndClick")


class Lenient(BinaryAccuracy):
    """A metric of a user's module that is one of torchmetrics."""


def with_extra(target, task=CLICK, **settings):
    extra = {"mine": Constructor(target, settings.pop("arguments", {}))}
    return build_task(task, None, MetricSettings(extra=extra, **settings))


def test_a_metric_of_torchmetrics_gets_predictions_and_labels():
    logits, labels, weights, groups = rows()
    task = with_extra(f"{EXTRA}BinaryAccuracy", arguments={"threshold": 0.3})
    assert task.measures.get("mine").better == "max"
    metric = task.make_metrics(False)["mine"]
    for logits_B, batch in zip(
        logits.split(CUTS), batches(labels, weights, groups, False), strict=True
    ):
        task.update({"mine": metric}, {"logit": logits_B}, batch)
    right = (logits.sigmoid() > 0.3) == (labels == 1)
    assert metric.compute().item() == pytest.approx(right.float().mean().item())
    ranked = with_extra("torchmetrics.retrieval.RetrievalMRR", group="C1")
    assert [one.name for one in ranked.measures][-2:] == ["gauc", "mine"]


@pytest.mark.parametrize(
    ("target", "settings", "says"),
    [
        (
            "torchmetrics.MeanMetric",
            {},
            r"its update takes \(value, weight\): must take \(preds, t",
        ),
        ("torchmetrics.retrieval.RetrievalMRR", {}, "measures groups: set metrics.group=COLUMN"),
        (f"{EXTRA}MulticlassAccuracy", {"arguments": {"num_classes": 3}}, "is of several classes"),
        (f"{EXTRA}BinaryAccuracy", {"arguments": {"threshold": 7}}, "Expected argument"),
        (f"{EXTRA}BinaryROC", {}, "its value is tuple: must be one number"),
        (f"{EXTRA}BinaryF2", {}, r"no such constructor in torchmetrics.classification"),
        (f"{EXTRA}BinaryAUROC", {"task": RATING}, "needs labels of 0 or 1, and those of the task"),
    ],
)
def test_a_metric_of_torchmetrics_that_does_not_fit_is_refused(target, settings, says):
    with pytest.raises(ConfigError, match=rf"^metrics\.extra\.mine.*{says}"):
        with_extra(target, **settings)


@pytest.mark.parametrize(
    ("task", "settings", "says"),
    [
        (CLICK, {"names": ("gauc",)}, "metrics.names has gauc: set metrics.group=COLUMN"),
        (CLICK, {"output": "logt"}, r"metrics.output=logt: did you mean logit\?"),
        (CLICK, {"names": ("auc", "auk")}, r"metrics.names has auk: did you mean auc\?"),
        (
            SHOP,
            {"bootstrap": 20},
            "metrics.bootstrap=20: none of the metrics auc, rmse has intervals for the output "
            "price; these have: rmse, mae",
        ),
        (RATING, {"buckets": 5}, "metrics.buckets=5: the output rating is a number and no click"),
        (RATING, {"group": "C1"}, "metrics.group=C1: the output rating is a number and no click"),
        (
            CLICK,
            {"extra": {"auc": Constructor(f"{EXTRA}BinaryAUROC")}},
            "metrics.extra.auc: is a metric of the task: give yours another name",
        ),
        *(
            (
                CLICK,
                {"extra": {name: Constructor(f"{EXTRA}BinaryAUROC")}},
                f"metrics.extra.{name}: cannot be a name: choose another without dots and blanks",
            )
            for name in ("buckets", "bootstrap", "keys", "reset", "f.1", "by C1")
        ),
    ],
)
def test_settings_that_do_not_fit_the_task_are_refused(task, settings, says):
    found = MetricSettings(**settings)
    with pytest.raises(ConfigError, match=f"^{says}"):
        build_task(task, found.names, found)


def test_a_bootstrap_measures_the_metrics_of_its_output():
    settings = MetricSettings(bootstrap=20, output="click")
    (bootstrap,) = build_task(SHOP, None, settings).make_details().values()
    assert list(bootstrap.metrics) == ["rmse"]
    turned = Constructor(SHOP.target, {"order": ("click", "price")})
    (bootstrap,) = build_task(turned, None, settings).make_details().values()
    assert list(bootstrap.metrics) == ["auc", "rmse"]


def test_the_note_of_an_undefined_metric_has_its_own_reason(tmp_path, capsys):
    task = build_task(CLICK, None, MetricSettings(group="C1"))
    measured = {"status": "ok", "val_auc": math.nan, "val_gauc": math.nan, "val_log_loss": 0.3}
    report_end(measured, task, tmp_path, "json")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("val_auc cannot be computed: the validation rows are of one class only")
    assert second == (
        "val_gauc cannot be computed on the validation rows: no group has both classes"
    )


def test_names_may_name_what_is_added():
    extra = {"f1": Constructor(f"{EXTRA}BinaryF1Score")}
    for names, found in (
        (("gauc",), ["gauc", "f1"]),
        (("auc", "f1"), ["auc", "gauc", "f1"]),
    ):
        settings = MetricSettings(names=names, group="C1", extra=extra)
        assert list(build_task(CLICK, names, settings).make_metrics(False)) == found


def test_a_metric_is_tried_without_other_ranks(monkeypatch):
    monkeypatch.setattr("torchmetrics.metric.jit_distributed_available", lambda: True)
    with_extra(f"{EXTRA}BinaryAUROC")  # nobody would answer


@pytest.mark.parametrize(
    ("target", "cut"),
    [
        ("torchmetrics.retrieval.RetrievalMRR", [120, 0, 151, 30]),
        ("torchmetrics.retrieval.RetrievalMRR", [0, 301]),
        (f"{EXTRA}BinaryAUROC", [0, 200, 0, 101]),
    ],
)
def test_ranks_with_other_numbers_of_batches_or_rows_exchange_the_same_tensors(target, cut):
    logits, labels, weights, groups = rows()
    task = with_extra(target, group="C1")
    parts = list(zip(logits.split(cut), batches(labels, weights, groups, False, cut), strict=True))
    *ranks, whole = ({"mine": task.make_metrics(False)["mine"]} for _ in range(3))
    for number, (logits_B, batch) in enumerate(parts):
        for metrics in (ranks[number % 2], whole):
            task.update(metrics, {"logit": logits_B}, batch)
    sent = []
    for metrics in ranks:
        own = []
        metrics["mine"].sync(
            lambda tensor, group, own=own: [own.append(tensor) or tensor],
            distributed_available=lambda: True,
        )
        metrics["mine"].unsync()
        sent.append(own)
    assert [(one.dtype, one.ndim) for one in sent[0]] == [(one.dtype, one.ndim) for one in sent[1]]
    both = zip(*sent, strict=True)
    first = ranks[0]["mine"]
    first.sync(lambda tensor, group: list(next(both)), distributed_available=lambda: True)
    assert first.compute().item() == pytest.approx(whole["mine"].compute().item(), rel=1e-5)


def test_a_subclass_of_a_metric_of_torchmetrics_gets_whole_labels():
    task = with_extra(f"{Lenient.__module__}.Lenient")
    metric = task.make_metrics(False)["mine"]
    batch = next(batches(torch.ones(2), torch.ones(2), torch.tensor([1, 1]), False, [2]))
    task.update({"mine": metric}, {"logit": torch.tensor([3.0, -3.0])}, batch)
    assert metric.compute() == 0.5
    rated = Constructor(RATING.target)
    with pytest.raises(ConfigError, match="needs labels of 0 or 1"):
        with_extra(f"{Lenient.__module__}.Lenient", task=rated)


def test_details_are_kept_by_step_and_slices_shown_worst_first(tmp_path):
    slices = [
        {"value": "a", "rows": 9, "auc": 0.7, "log_loss": 0.1, "calibration": 1.0, "other": False},
        {"value": "b", "rows": 5, "auc": None, "log_loss": 0.1, "calibration": 1.0, "other": False},
        {"value": "c", "rows": 3, "auc": 0.6, "log_loss": 0.1, "calibration": 1.0, "other": True},
    ]
    for step in (10, 20, 10):
        write_details({"by C1": slices, "buckets": []}, tmp_path, step)
    held = json.loads((tmp_path / "details.json").read_text())["validations"]
    assert [one["step"] for one in held] == [20, 10]
    details = read_details(tmp_path, 20)
    ((column, found),) = slices_of(details)
    assert column == "C1" and [one["value"] for one in found] == ["c", "a", "b"]
    assert read_details(tmp_path / "none") == read_details(tmp_path, 30) == {}
    assert read_details(tmp_path)["step"] == 10


def test_details_of_the_best_step_are_kept_however_many_come_later(tmp_path):
    for step in range(1, KEPT + 10):
        write_details({"buckets": []}, tmp_path, step, best=min(step, 3))
    held = json.loads((tmp_path / "details.json").read_text())["validations"]
    assert [one["step"] for one in held] == [3, *range(10, KEPT + 10)]


def test_a_number_of_details_that_is_not_finite_is_null_and_has_no_interval(tmp_path, capsys):
    found = {"bootstrap": {"metrics": {"auc": [0.5, math.nan], "mae": [0.1, 0.2]}}}
    write_details(found, tmp_path, 0)
    assert "NaN" not in (tmp_path / "details.json").read_text()
    details = read_details(tmp_path)
    assert details["bootstrap"]["metrics"] == {"auc": [0.5, None], "mae": [0.1, 0.2]}
    assert set(intervals(details, "val")) == {"val_mae_low", "val_mae_high"}
    assert capsys.readouterr().err.startswith("auc: no interval, as it cannot be computed on some")


def test_a_page_shows_calibration_and_the_worst_slices():
    buckets = [{"rows": 5.0, "predicted": n / 10, "clicks": n / 11} for n in range(1, 6)]
    slices = [
        {"value": f"v{n}", "rows": n, "auc": n / 20 if n else None, "other": n == 12}
        for n in range(13)
    ]
    page = "".join(part_of_page({"buckets": buckets, "by C1": slices, "bootstrap": {}}))
    assert "Calibration by bucket" in page and "Worst slices by C1" in page
    assert page.index(">v1<") < page.index(">v2<") and "0.05000" in page and ">v0<" not in page
    assert part_of_page({}) == []
