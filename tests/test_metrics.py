"""Metrics against their definitions, however samples are dealt to batches and ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recapp.errors import ConfigError
from recapp.metrics import (
    AUC,
    BINS,
    MAE,
    PRAUC,
    RMSE,
    Calibration,
    Lift,
    LogLoss,
    NormalizedEntropy,
    click_metrics,
    logit_bins,
)

EXACT = 1e-12  # rounding of fp64


def exact_auc(logits, labels):
    """Every pair looked at."""
    clicks = logits[labels == 1].double()
    others = logits[labels == 0].double()
    difference = clicks[:, None] - others[None, :]
    return ((difference > 0).double() + (difference == 0).double() / 2).mean().item()


def value(metric, *batches):
    for logits, labels in batches:
        metric.update(logits, labels)
    return metric.compute().item()


def logs(samples, seed=0, scale=1.0, shift=-1.2):
    """Logits of a model that knows something, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, generator=generator) * scale + shift
    return logits, (torch.rand(samples, generator=generator) < logits.sigmoid()).float()


def test_auc_of_few_samples_is_the_share_counted_by_hand():
    # clicks at 2 and 0, others at 1, 0 and -3:
    # right (2,1) (2,0) (2,-3) (0,-3), half (0,0), wrong (0,1)
    logits = torch.tensor([2.0, 1.0, 0.0, 0.0, -3.0])
    labels = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    assert value(AUC(), (logits, labels)) == 4.5 / 6


def error_bound(metric):
    """Half of the pairs of one bin, as a share of all pairs."""
    others_K, clicks_K = metric.counts[:, :-1]
    return float((clicks_K * others_K).sum() / 2 / (others_K.sum() * clicks_K.sum()))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_auc_differs_from_the_exact_one_by_no_more_than_its_bound(scale):
    logits, labels = logs(4000, scale=scale)
    metric = AUC()
    difference = abs(value(metric, (logits, labels)) - exact_auc(logits, labels))
    assert difference <= error_bound(metric) + EXACT


def test_the_bound_of_auc_is_small_for_click_logits_and_large_where_bins_are_too_coarse():
    fine = AUC()
    coarse = AUC()
    fine.update(*logs(200_000))
    coarse.update(*logs(2000, scale=1e-7, shift=1.0))
    assert error_bound(fine) < 2e-5
    assert error_bound(coarse) > 0.1


def test_the_bound_of_auc_is_reached_when_all_pairs_of_a_bin_are_in_the_right_order():
    logits = torch.tensor([1e-6, 2e-6])
    labels = torch.tensor([0.0, 1.0])
    metric = AUC()
    difference = exact_auc(logits, labels) - value(metric, (logits, labels))
    assert difference == error_bound(metric) == 0.5


@settings(max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=50))
def test_bins_never_turn_the_order_of_two_logits(logits):
    ordered = torch.tensor(sorted(logits), dtype=torch.float32)
    bins = logit_bins(ordered)
    assert (bins.diff() >= 0).all()
    assert bins.min() >= 0 and bins.max() < BINS


def test_every_bin_can_be_reached():
    close = torch.linspace(-1, 1, 2**20)
    far = torch.logspace(0, 8, 2**20, base=2) - 1
    assert len(logit_bins(torch.cat([close, far, -far])).unique()) == BINS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_auc_takes_logits_of_any_float_dtype(dtype):
    logits, labels = logs(500)
    metric = AUC()
    assert value(metric, (logits.to(dtype), labels.long())) == pytest.approx(
        exact_auc(logits.to(dtype), labels), abs=1e-5
    )


def test_log_loss_normalized_entropy_and_calibration_equal_their_definitions():
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
    predictions = torch.tensor([0.75, 0.5, 0.25, 0.5], dtype=torch.float64)
    batch = (predictions.logit(), labels)
    loss = -(math.log(0.75) + math.log(0.5) + math.log(0.75) + math.log(0.5)) / 4
    assert value(LogLoss(), batch) == pytest.approx(loss, abs=EXACT)
    assert value(NormalizedEntropy(), batch) == pytest.approx(loss / math.log(2), abs=EXACT)
    assert value(Calibration(), batch) == pytest.approx((0.75 + 0.5 + 0.25 + 0.5) / 2, abs=EXACT)


def test_always_predicting_the_share_of_clicks_has_normalized_entropy_and_calibration_one():
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    batch = (torch.full((5,), 0.2, dtype=torch.float64).logit(), labels)
    assert value(NormalizedEntropy(), batch) == pytest.approx(1, abs=EXACT)
    assert value(Calibration(), batch) == pytest.approx(1, abs=EXACT)


def test_log_loss_of_a_certain_and_wrong_prediction_is_its_logit():
    assert value(LogLoss(), (torch.tensor([80.0]), torch.tensor([0.0]))) == 80.0


def test_sums_do_not_lose_small_batches_beside_large_totals():
    metric = LogLoss()
    metric.loss = torch.tensor(5e8, dtype=torch.float64)
    metric.samples = torch.tensor(1e9, dtype=torch.float64)
    metric.update(torch.tensor([0.5]), torch.tensor([0.0]))
    assert metric.loss.item() - 5e8 == pytest.approx(math.log1p(math.exp(0.5)), abs=1e-6)


def of_all_samples(name, logits, labels, weights, soft):
    """The metric from its definition: one row for each sample, or two for a label between."""
    logits = logits.double()
    labels = labels.double()
    p = logits.sigmoid()
    error = p - labels
    if name in ("rmse", "mae"):
        mean = (weights * (error**2 if name == "rmse" else error.abs())).sum() / weights.sum()
        return (mean.sqrt() if name == "rmse" else mean).item()
    clicks = weights * labels
    others = weights * (1 - labels)
    if name == "auc":
        right = (logits[:, None] > logits) + (logits[:, None] == logits) / 2
        return (clicks @ right.double() @ others / clicks.sum() / others.sum()).item()
    loss = -(clicks @ p.log() + others @ (1 - p).log()) / weights.sum()
    share = (clicks.sum() / weights.sum()).item()
    if name == "log_loss":
        return loss.item()
    if name == "normalized_entropy":
        return loss.item() / -(share * math.log(share) + (1 - share) * math.log(1 - share))
    if name == "calibration":
        return ((weights @ p) / clicks.sum()).item()
    order = logits.argsort(descending=True)
    if name == "lift":
        room = 0.1 * weights.sum().item()
        found = 0.0
        for at in order.tolist():
            taken = min(room, weights[at].item())
            found += clicks[at].item() * taken / weights[at].item()
            room -= taken
        return found / clicks.sum().item() / 0.1
    precision = clicks[order].cumsum(0) / weights[order].cumsum(0)
    return ((clicks[order] @ precision) / clicks.sum()).item()


EVERY = [*click_metrics(), "pr_auc", "lift", "rmse", "mae"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_each_metric_is_its_definition_over_all_samples_of_two_uneven_ranks(name, soft, weighted):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randperm(307, generator=generator) - 150) / 64.0  # no two in one bin
    labels = torch.rand(307, generator=generator)
    labels = labels if soft else (labels < logits.sigmoid()).float()
    weights = torch.rand(307, generator=generator) + 0.1
    cuts = [200, 0, 100, 0, 7]
    ranks = [click_metrics([name], soft_labels=soft)[name] for _ in range(2)]
    parts = zip(logits.split(cuts), labels.split(cuts), weights.split(cuts), strict=True)
    for number, (logits_B, labels_B, weights_B) in enumerate(parts):
        given = {"weights_B": weights_B} if weighted else {}
        ranks[number % 2].update(logits_B, labels_B, **given)
    one = weights.double() if weighted else torch.ones(307, dtype=torch.float64)
    assert merged(ranks) == pytest.approx(of_all_samples(name, logits, labels, one, soft), rel=1e-9)


def merged(ranks):
    """The value of a metric over all ranks: their states are added, as the exchange does."""
    first = ranks[0]
    for state in first._defaults:
        setattr(first, state, sum(getattr(rank, state) for rank in ranks))
    first._update_count = 1
    first._computed = None
    first.sync_on_compute = False
    return first.compute().item()


def test_a_weight_counts_as_so_many_equal_samples():
    logits, labels = logs(60)
    counts = torch.arange(60) % 4
    for name in EVERY:
        weighted = click_metrics([name])[name]
        weighted.update(logits, labels, weights_B=counts.float())
        repeated = (logits.repeat_interleave(counts), labels.repeat_interleave(counts))
        assert weighted.compute().item() == pytest.approx(
            value(click_metrics([name])[name], repeated), abs=EXACT
        ), name


def test_lift_is_the_share_of_clicks_in_the_top_tenth_and_one_without_an_order():
    logits = torch.arange(20.0)
    labels = torch.tensor([1.0, 0.0] * 5 + [1.0] * 2 + [0.0] * 7 + [1.0])
    assert value(Lift(), (logits, labels)) == pytest.approx((1 / 8) / 0.1)
    assert value(Lift(), (torch.zeros(20), labels)) == pytest.approx(1)
    assert value(Lift(0.5), (logits, labels)) == pytest.approx((3 / 8) / 0.5)


def test_errors_of_numbers_take_the_outputs_as_they_are():
    batch = (torch.tensor([3.0, -1.0]), torch.tensor([1.0, -1.0]))
    assert value(RMSE(), batch) == pytest.approx(math.sqrt(2))
    assert value(MAE(), batch) == 1.0


EMPTY = (torch.empty(0), torch.empty(0))


@pytest.mark.parametrize("name", EVERY)
def test_empty_batches_and_other_cuts_change_nothing(name):
    logits, labels = logs(301)
    cuts = [*zip(logits.split(100), labels.split(100), strict=True)]
    whole = value(click_metrics([name])[name], (logits, labels))
    cut = value(click_metrics([name])[name], EMPTY, *cuts, EMPTY)
    assert cut == whole if name == "auc" else cut == pytest.approx(whole, abs=EXACT)


@pytest.mark.parametrize("name", EVERY)
def test_no_samples_at_all_is_nan(name):
    assert math.isnan(value(click_metrics([name])[name], EMPTY))


@pytest.mark.parametrize(
    ("label", "unknown"),
    [(0.0, {"auc", "normalized_entropy", "calibration"}), (1.0, {"auc", "normalized_entropy"})],
)
def test_what_one_class_alone_cannot_tell_is_nan(label, unknown):
    batch = (torch.tensor([0.3, -0.2]), torch.full((2,), label))
    assert {
        name for name, metric in click_metrics().items() if math.isnan(value(metric, batch))
    } == unknown


@pytest.mark.parametrize("name", EVERY)
def test_a_logit_that_is_nan_shows_in_the_result(name):
    logits, labels = logs(50)
    logits[7] = math.nan
    assert math.isnan(value(click_metrics([name])[name], (logits, labels)))


class Peers:
    """Stands in for torchmetrics' gather: answers with the states of all ranks."""

    def __init__(self, ranks):
        self.ranks = ranks

    def __call__(self, state, group=None):
        name = next(n for n in self.ranks[0]._defaults if getattr(self.ranks[0], n) is state)
        return [getattr(rank, name) for rank in self.ranks]


@pytest.mark.parametrize("kind", [AUC, LogLoss, NormalizedEntropy, Calibration, PRAUC, Lift])
def test_uneven_ranks_one_of_them_empty_agree_with_one_process(kind):
    logits, labels = logs(301)
    ranks = [kind(distributed_available_fn=lambda: True) for _ in range(3)]
    ranks[0].dist_sync_fn = Peers(ranks)
    ranks[0].update(logits[:200], labels[:200])
    ranks[1].update(logits[200:], labels[200:])
    ranks[2].update(*EMPTY)
    assert ranks[0].compute().item() == pytest.approx(value(kind(), (logits, labels)), abs=EXACT)
    ranks[0].update(*EMPTY)
    assert ranks[0].compute().item() == pytest.approx(value(kind(), (logits, labels)), abs=EXACT), (
        "a rank keeps its own sums only"
    )


def test_reset_forgets_and_updates_do_not_leak_into_the_next_round():
    for metric in click_metrics().values():
        first = value(metric, logs(100))
        metric.reset()
        metric.update(*logs(100, seed=1))
        metric.reset()
        assert value(metric, logs(100)) == first


def test_forward_gives_the_batch_and_keeps_the_total():
    one = logs(100)
    two = logs(100, seed=1)
    for name, metric in click_metrics().items():
        metric(*one)
        assert metric(*two).item() == pytest.approx(value(click_metrics()[name], two), abs=EXACT)
        assert metric.compute().item() == pytest.approx(
            value(click_metrics()[name], one, two), abs=EXACT
        )


def test_an_unknown_metric_is_refused_with_the_close_match():
    with pytest.raises(ConfigError, match=r"metrics.names has logloss: did you mean log_loss\?"):
        click_metrics(["auc", "logloss"])
