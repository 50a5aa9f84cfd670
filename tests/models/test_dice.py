"""Dice against its paper's formula, in training, evaluation and without rows."""

import pytest
import torch
from transcription import check_model, random_vectors

from recapp.models.layers import ADDED, MLP, MOMENTUM, Dice

ROWS = 5
COLUMNS = 3


def columns_of(parameters, input_NU, mean, variance, slope=lambda p, u: p["slope_U"][u]):
    made = []
    for u in range(COLUMNS):
        s_N = input_NU[:, u]
        p_N = 1 / (1 + torch.exp(-(s_N - mean(s_N, u)) / torch.sqrt(variance(s_N, u) + ADDED)))
        made.append(p_N * s_N + (1 - p_N) * slope(parameters, u) * s_N)
    return torch.stack(made, 1)


def of_batch(parameters, input_NU, **more):
    def mean(s_N, _):
        return s_N.sum() / ROWS

    def variance(s_N, _):
        return ((s_N - s_N.sum() / ROWS) ** 2).sum() / ROWS

    return columns_of(parameters, input_NU, **({"mean": mean, "variance": variance} | more))


def test_training_takes_the_statistics_of_the_batch():
    faults = {
        "a PReLU, which bends at 0": lambda p, x: torch.where(x > 0, x, p["slope_U"] * x),
        "the mean is left out": lambda p, x: of_batch(p, x, mean=lambda s, u: s.sum() * 0),
        "an unbiased variance": lambda p, x: of_batch(p, x, variance=lambda s, u: s.var()),
        "one slope for all columns": lambda p, x: of_batch(
            p, x, slope=lambda p, u: p["slope_U"][0]
        ),
    }
    check_model(Dice(COLUMNS), of_batch, faults, [random_vectors(ROWS, COLUMNS)])


def test_evaluation_takes_the_running_statistics():
    dice = Dice(COLUMNS).double()
    input_NU = random_vectors(ROWS, COLUMNS)
    dice(input_NU)
    torch.testing.assert_close(dice.mean_U, MOMENTUM * input_NU.mean(0))
    expected_U = (1 - MOMENTUM) + MOMENTUM * input_NU.var(0, unbiased=False)
    torch.testing.assert_close(dice.variance_U, expected_U)
    dice.eval()
    check_model(
        dice,
        lambda p, x: columns_of(
            p, x, lambda s_N, u: p["mean_U"][u], lambda s_N, u: p["variance_U"][u]
        ),
        {"the statistics of the batch": of_batch},
        [input_NU],
    )


def test_no_rows_and_one_row_are_defined():
    dice = Dice(COLUMNS)
    assert dice(torch.empty(0, COLUMNS)).shape == (0, COLUMNS)
    assert dice.mean_U.tolist() == [0] * COLUMNS
    assert torch.equal(dice(torch.ones(1, COLUMNS)), torch.full((1, COLUMNS), 0.5))
    assert dice.mean_U.isfinite().all() and dice.variance_U.isfinite().all()


@pytest.mark.parametrize("rows", [1, 500])
def test_rows_that_differ_little_keep_their_digits(rows):
    torch.manual_seed(0)
    input_NU = 3 + 0.01 * torch.randn(rows, COLUMNS)
    exact_NU = Dice(COLUMNS).double()(input_NU.double()) / input_NU.double()
    share_NU = (Dice(COLUMNS)(input_NU) / input_NU).double()
    torch.testing.assert_close(share_NU, exact_NU, rtol=1e-6, atol=2e-6)


def test_a_tower_makes_dice_for_its_columns():
    tower = MLP(2, [5, 4, 1], last_relu=False, activation="dice")
    assert [len(m.slope_U) for m in tower if isinstance(m, Dice)] == [5, 4]
