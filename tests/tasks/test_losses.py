"""The losses of clicks and ratings against their formulas, sample by sample and pair by pair."""

import math

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.checkpoint import checkpoint

from recapp.errors import ConfigError
from recapp.run.constructors import build_task
from recapp.settings.records import Constructor
from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tasks import losses
from recapp.tasks.losses import click_loss, mean_of_pairs
from recapp.tasks.task import ClickTask, RatingTask

CLOSE = {"rtol": 1e-12, "atol": 1e-14}


def batch_of(labels, weights=None):
    labels_B = torch.as_tensor(labels, dtype=torch.float32)
    rows = len(labels_B)
    sparse = KeyedJaggedTensor(
        ["C1"], torch.arange(rows), lengths=torch.ones(rows, dtype=torch.int64)
    )
    given = None if weights is None else {"label": torch.as_tensor(weights)}
    return Batch(torch.zeros(rows, 0), sparse, labels_B, given)


def samples(rows=23, soft=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_B = torch.randn(rows, generator=generator, dtype=torch.float64) * 3
    labels_B = torch.rand(rows, generator=generator, dtype=torch.float64)
    weights_B = torch.rand(rows, generator=generator, dtype=torch.float64) * 2
    return logits_B, labels_B if soft else (labels_B > 0.6).double(), weights_B


def one_by_one(logit, label, smoothing, factor, focal):
    """The loss of a sample as its papers write it."""
    label = label * (1 - smoothing) + smoothing / 2
    p = 1 / (1 + math.exp(-logit))
    of_click = -factor * label * (1 - p) ** focal * math.log(p)
    return of_click - (1 - label) * p**focal * math.log(1 - p)


def pair_by_pair(logits_B, labels_B, weights_B):
    """The pairwise loss as two loops."""
    total = loss = 0.0
    for i, label_i in enumerate(labels_B):
        for j, label_j in enumerate(labels_B):
            weight = weights_B[i] * label_i * weights_B[j] * (1 - label_j)
            loss += weight * torch.log1p((logits_B[j] - logits_B[i]).exp())
            total += weight
    return loss / total


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    ("smoothing", "factor", "focal"), [(0, 1, 0), (0.2, 1, 0), (0, 3, 0), (0, 1, 2), (0.1, 0.5, 1)]
)
def test_the_loss_of_samples_is_their_formula(smoothing, factor, focal, soft):
    logits_B, labels_B, weights_B = samples(soft=soft)
    found = click_loss(
        logits_B, labels_B, weights_B, label_smoothing=smoothing, pos_weight=factor, focal=focal
    )
    each = [
        float(weight) * one_by_one(float(logit), float(label), smoothing, factor, focal)
        for logit, label, weight in zip(logits_B, labels_B, weights_B, strict=True)
    ]
    assert found.item() == pytest.approx(sum(each) / len(each), rel=1e-12)


def test_a_focal_loss_of_extreme_logits_has_finite_gradients():
    logits_B = torch.tensor([-200.0, -30.0, 0.0, 30.0, 200.0], requires_grad=True)
    loss = click_loss(logits_B, torch.tensor([1.0, 0, 1, 0, 1]), None, focal=2)
    loss.backward()
    assert loss.isfinite() and logits_B.grad.isfinite().all()


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("block", [1, 7, 2**22])
def test_pairs_have_the_loss_and_gradient_of_two_loops_in_blocks_of_any_size(
    monkeypatch, soft, block
):
    monkeypatch.setattr(losses, "BLOCK_PAIRS", block)
    logits_B, labels_B, weights_B = samples(rows=11, soft=soft)
    found_B, wanted_B = (logits_B.clone().requires_grad_() for _ in range(2))
    found = mean_of_pairs(found_B, labels_B, weights_B)
    wanted = pair_by_pair(wanted_B, labels_B, weights_B)
    (3 * found).backward()
    (3 * wanted).backward()
    torch.testing.assert_close(found, wanted, **CLOSE)
    torch.testing.assert_close(found_B.grad, wanted_B.grad, **CLOSE)


def test_a_share_of_the_loss_is_that_of_pairs_and_the_rest_that_of_samples():
    logits_B, labels_B, weights_B = samples()
    alone = click_loss(logits_B, labels_B, weights_B)
    pairs = mean_of_pairs(logits_B, labels_B, weights_B)
    both = click_loss(logits_B, labels_B, weights_B, ranking=0.25)
    pairs = pairs * weights_B.mean()
    torch.testing.assert_close(both, 0.75 * alone + 0.25 * pairs, **CLOSE)
    torch.testing.assert_close(click_loss(logits_B, labels_B, weights_B, ranking=1), pairs)
    doubled = click_loss(logits_B, labels_B, 2 * weights_B, ranking=0.25)
    torch.testing.assert_close(doubled, 2 * both, **CLOSE)
    none = torch.zeros(0)
    assert click_loss(none, none, none, ranking=0.25) == 0


@pytest.mark.parametrize("labels", [[], [1.0, 1.0], [0.0]])
def test_a_batch_without_a_pair_has_a_pairwise_loss_and_gradient_of_zero(labels):
    logits_B = torch.zeros(len(labels), requires_grad=True)
    loss = mean_of_pairs(logits_B, torch.tensor(labels))
    loss.backward()
    assert loss == 0 and (logits_B.grad == 0).all()


def test_pairs_of_half_precision_are_computed_in_fp32_also_under_autocast():
    logits_B, labels_B, _ = samples()
    narrow_B = logits_B.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = mean_of_pairs(narrow_B, labels_B.float())
    assert found.dtype == torch.float32
    wanted = mean_of_pairs(narrow_B.detach().float(), labels_B.float())
    torch.testing.assert_close(found, wanted)
    found.backward()
    assert narrow_B.grad.dtype == torch.bfloat16


def test_the_default_loss_of_a_click_has_the_bits_of_the_cross_entropy():
    logits_B = torch.randn(301)
    batch = batch_of((torch.rand(301) > 0.5).float(), torch.rand(301))
    weights_B = batch.weights["label"]
    wanted = binary_cross_entropy_with_logits(logits_B, batch.labels_B, weights_B, reduction="sum")
    assert torch.equal(ClickTask().loss({"logit": logits_B}, batch), wanted / 301)


def test_settings_of_the_task_reach_the_loss_and_leave_the_metrics_alone():
    settings = {"label_smoothing": 0.1, "pos_weight": 2.0, "focal": 1.5, "ranking": 0.3}
    task = build_task(Constructor("recapp.tasks.task.ClickTask", settings))
    logits_B, labels_B, _ = samples()
    batch = batch_of(labels_B)
    wanted = click_loss(logits_B, batch.labels_B, None, **settings)
    assert torch.equal(task.loss({"logit": logits_B}, batch), wanted)
    metrics = task.make_metrics(sync_on_compute=False)
    task.update(metrics, {"logit": logits_B}, batch)
    plain = binary_cross_entropy_with_logits(logits_B.float().double(), labels_B)
    torch.testing.assert_close(metrics["log_loss"].compute(), plain, **CLOSE)


def test_a_loss_that_is_no_log_loss_is_not_drawn_with_it():
    assert ClickTask().measures.get("log_loss").training == "train_loss"
    assert ClickTask(pos_weight=2).measures.get("log_loss").training is None
    assert ClickTask(pos_weight=2).measures.get("auc").training == "train_auc"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"label_smoothing": 1.0},
            r"task\.label_smoothing=1\.0: must be a number from 0 to below 1",
        ),
        (
            {"label_smoothing": -0.1},
            r"task\.label_smoothing=-0\.1: must be a number from 0 to below 1",
        ),
        ({"pos_weight": 0}, r"task\.pos_weight=0: must be a number from 1e-6 to 1e6"),
        ({"pos_weight": math.inf}, r"task\.pos_weight=inf: must be a number from 1e-6 to 1e6"),
        ({"pos_weight": 1e300}, r"task\.pos_weight=1e\+300: must be a number from 1e-6 to 1e6"),
        ({"pos_weight": 1e-300}, r"task\.pos_weight=1e-300: must be a number from 1e-6 to 1e6"),
        (
            {"label_smoothing": 1 - 1e-12},
            r"task\.label_smoothing=0\.999999999999: must be a number from 0",
        ),
        ({"focal": -1}, r"task\.focal=-1: must be a number from 0 to 20"),
        ({"focal": 1e6}, r"task\.focal=1000000\.0: must be a number from 0 to 20"),
        ({"ranking": 1.5}, r"task\.ranking=1\.5: must be a share, from 0 to 1"),
        ({"ranking": "some"}, r"task\.ranking=some: must be a share, from 0 to 1"),
        (
            {"ranking": 1, "pos_weight": 2},
            r"task\.pos_weight=2: does nothing with task\.ranking=1, the loss of pairs alone: l",
        ),
        ({"ranking": 1.0, "focal": 2}, r"task\.focal=2: does nothing with task\.ranking=1\.0"),
        ({"ranking": math.nan}, r"task\.ranking=nan: must be a share, from 0 to 1"),
    ],
)
def test_a_number_out_of_its_range_is_refused(given, says):
    with pytest.raises(ConfigError, match=rf"^{says}"):
        ClickTask(**given)


def test_a_rating_has_the_mean_squared_error_and_its_metrics():
    task = build_task(Constructor("recapp.tasks.task.RatingTask"))
    labels_B = torch.tensor([3.5, -1.0, 2.0])
    weights_B = torch.tensor([1.0, 0.5, 2.0])
    outputs = {"rating": torch.tensor([3.0, 1.0, 2.5])}
    batch = batch_of(labels_B, weights_B)
    squares = 0.25 + 0.5 * 4 + 2 * 0.25
    assert task.loss(outputs, batch).item() == pytest.approx(squares / 3)
    assert task.loss({"rating": torch.zeros(0)}, batch_of([])) == 0
    metrics = task.make_metrics(sync_on_compute=False)
    task.update(metrics, outputs, batch)
    assert metrics["rmse"].compute().item() == pytest.approx(math.sqrt(squares / 3.5))
    assert metrics["mae"].compute().item() == pytest.approx((0.5 + 0.5 * 2 + 2 * 0.5) / 3.5)
    assert torch.equal(task.scores(outputs)["score"], outputs["rating"])
    assert (task.measures.objective, task.measures.mode) == ("val_rmse", "min")
    assert task.check_labels(["stars"])[0] == ("stars",)
    assert RatingTask(["mae"]).measures.best == "rmse"


def test_labels_between_0_and_1_are_read_only_if_they_are_wanted():
    assert ClickTask(soft_labels=True).check_labels(["clicked"])[1] == ("clicked",)
    assert ClickTask(soft_labels=True, label="b").check_labels(["a", "b"])[1] == ("b",)
    assert (
        ClickTask().check_labels(["clicked"])[1] == RatingTask().check_labels(["clicked"])[1] == ()
    )


def test_logits_of_pairs_may_be_computed_again_in_backward():
    logits_B = torch.randn(4, requires_grad=True)
    labels_B = torch.tensor([1.0, 0, 1, 0])
    loss = mean_of_pairs(logits_B, labels_B)
    again = checkpoint(mean_of_pairs, logits_B, labels_B, use_reentrant=False)
    (slope_B,) = torch.autograd.grad(loss, logits_B)
    (again_B,) = torch.autograd.grad(again, logits_B, create_graph=True)
    torch.testing.assert_close(again_B, slope_B)
