"""Every rule on the compiled backends changes rows as the reference does, whole rows and strips."""

import pytest
import torch
from optim.dense_rules import CASES, rule_of_case

from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.kernels.reference import TorchBackend

ROWS = 12
TOUCHED = 5


@pytest.fixture(params=["numba", "triton"])
def kernels(request):
    return (
        request.getfixturevalue("interpreted")
        if request.param == "triton"
        else backend(request.param, torch.device("cpu"))
    )


def trained(kernels, rule, width, dtype, given):
    generator = torch.Generator().manual_seed(3)
    weights_RD = torch.randn(ROWS, width, generator=generator, dtype=dtype)
    state = [
        torch.full((ROWS, width if kind == "element" else 1), start, dtype=dtype)
        for _, kind, start in rule.starts()
    ]
    row_U = torch.tensor([7, 2, 11, 0, 5])
    sums = []
    for t in (1, 2):
        gradients = torch.randn(2 * TOUCHED * width, generator=generator, dtype=dtype)
        links = Links(
            (width * torch.arange(2 * TOUCHED)).int(),
            (2 * torch.arange(TOUCHED + 1)).int(),
            torch.rand(2 * TOUCHED, generator=generator, dtype=dtype),
            None,
            TOUCHED,
        )
        rate = rule.rate_of(rule.lr, t)
        arguments = (row_U, weights_RD, state, dtype, rate, rule)
        sums.append(kernels.row_squares(gradients, links, *arguments))
        mean = None
        if given and rule.means:  # as strips of a row get it
            mean = torch.rand(rule.means, TOUCHED, generator=generator, dtype=dtype)
        kernels.update(gradients, links, row_U, mean, weights_RD, state, dtype, rate, rule)
    return weights_RD, *state, *sums


def check(kernels, case, width, dtype, given):
    rule = rule_of_case(case)
    expected = trained(TorchBackend(), rule, width, dtype, given)
    found = trained(kernels, rule, width, dtype, given)
    torch.testing.assert_close(found, expected)


FIRST = {name: case for case in reversed(CASES) for name in [case[0]]}


@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        pytest.param(kernels, case, marks=[] if case in of_default else pytest.mark.full)
        for kernels, of_default in (
            ("numba", list(FIRST.values())[::2]),
            ("triton", list(FIRST.values())[1::2]),
        )
        for case in CASES
    ],
    indirect=["kernels"],
    ids=str,
)
def test_a_rule_changes_rows_as_the_reference_does(kernels, case):
    check(kernels, case, 5, torch.float32, given=False)


OTHERS = [(5, torch.float64, True), (150, torch.float32, False), (150, torch.float64, True)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "width", "dtype", "given"),
    [(case, *OTHERS[number % len(OTHERS)]) for number, case in enumerate(CASES)],
    ids=str,
)
def test_a_rule_changes_rows_of_another_width_and_type_as_the_reference_does(
    kernels, case, width, dtype, given
):
    check(kernels, case, width, dtype, given)
