"""The terms of factorisation machines against their papers' double sums."""

from functools import partial
from itertools import combinations

import pytest
import torch
from transcription import check_model, random_vectors

from recapp.models.fm import FieldAwarePairs, FwFMTerm, fm_term

AWARE = (FieldAwarePairs(4), FieldAwarePairs(4, own_vectors=True))


class Term(torch.nn.Module):
    def forward(self, vectors_BFD):
        return fm_term(vectors_BFD)


def pairs_of(vectors_BFD):
    return list(combinations(range(vectors_BFD.shape[1]), 2))


def dot(left_BD, right_BD):
    return sum(left_BD[:, d] * right_BD[:, d] for d in range(left_BD.shape[1]))


def fm(p, v):
    return sum(dot(v[:, i], v[:, j]) for i, j in pairs_of(v))


def squares_kept(p, v):
    return fm(p, v) + sum(dot(v[:, i], v[:, i]) for i in range(v.shape[1])) / 2


def test_the_fm_term_is_the_sum_over_pairs():
    faults = {
        "the factor 1/2 is missing": lambda p, v: 2 * fm(p, v),
        "the squares of vectors are not taken off": squares_kept,
    }
    check_model(Term(), fm, faults, [random_vectors(5, 4, 3)])


def test_the_gradients_of_the_terms_are_those_of_finite_differences():
    vectors = random_vectors(3, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(fm_term, vectors)
    aware = random_vectors(3, 4, 4, 2).requires_grad_()
    for own in (False, True):
        assert torch.autograd.gradcheck(FieldAwarePairs(4, own), aware)
    weighted = FwFMTerm(4).double()
    assert torch.autograd.gradcheck(weighted, vectors)


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 1, 2)])
def test_a_term_of_nothing_is_zero(shape):
    vectors = torch.ones(shape, requires_grad=True)
    for term in (fm_term, FwFMTerm(shape[1])):
        value = term(vectors)
        value.sum().backward()
        assert value.shape == shape[:1]
        assert value.abs().sum() == vectors.grad.abs().sum() == 0


def test_the_fm_term_of_bf16_vectors_is_computed_in_float32():
    vectors = (1 + torch.rand(8, 40, 16) / 64).bfloat16().requires_grad_()
    term = fm_term(vectors)
    term.sum().backward()
    exact = fm(None, vectors.detach().double())
    torch.testing.assert_close(term.double(), exact, rtol=1e-5, atol=0)
    assert vectors.grad.dtype == torch.bfloat16


def weight_of(p, i, j):
    """Return r_ij for i < j, where the weights stand in the order 12, 13, 23, 14, ..."""
    return p["weight_P"][j * (j - 1) // 2 + i]


def fwfm(p, v):
    return sum(weight_of(p, i, j) * dot(v[:, i], v[:, j]) for i, j in pairs_of(v))


def row_by_row(p, v):
    return sum(p["weight_P"][n] * dot(v[:, i], v[:, j]) for n, (i, j) in enumerate(pairs_of(v)))


def test_the_fwfm_term_weights_each_pair_by_its_own_number():
    faults = {
        "pairs counted twice": lambda p, v: 2 * fwfm(p, v),
        "weights of other pairs": row_by_row,
        "no weights": fm,
    }
    check_model(FwFMTerm(4), fwfm, faults, [random_vectors(5, 4, 3)])


def test_a_fresh_fwfm_term_is_that_of_an_fm_per_field():
    vectors = random_vectors(5, 4, 3)
    torch.testing.assert_close(FwFMTerm(4).double()(vectors), fm_term(vectors) / 4)


def ffm(p, v):
    fields = range(v.shape[1])
    return torch.stack([dot(v[:, i, j], v[:, j, i]) for j in fields for i in fields if i < j], 1)


def own_fields(p, v):
    fields = range(v.shape[1])
    return torch.stack([dot(v[:, i, i], v[:, j, j]) for j in fields for i in fields if i < j], 1)


def same_field(p, v):
    fields = range(v.shape[1])
    return torch.stack([dot(v[:, i, j], v[:, j, j]) for j in fields for i in fields if i < j], 1)


def test_a_field_aware_pair_takes_the_vectors_for_each_other():
    faults = {
        "vectors for the field itself": own_fields,
        "both vectors for the second field": same_field,
        "the order of the triangle above the diagonal": lambda p, v: torch.stack(
            [dot(v[:, i, j], v[:, j, i]) for i, j in pairs_of(v)], 1
        ),
    }
    check_model(FieldAwarePairs(4), ffm, faults, [random_vectors(5, 4, 4, 3)])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [0, 1, 133])
def test_compiled_pairs_are_those_of_torch(own, dim, rows):
    made = random_vectors(rows, 5, 5, dim)
    for vectors in (made.float(), made, made.float().transpose(1, 2), wide(made)[:, :, :, 1:]):
        vectors.requires_grad_()
        fields = range(5)
        parts = [vectors[:, i, i] for i in fields] if own else []
        wanted = torch.cat([*parts, ffm(None, vectors)], 1)
        found = FieldAwarePairs(5, own)(vectors)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        grad = torch.randn_like(wanted)
        (of_wanted,) = torch.autograd.grad(wanted, vectors, grad)
        (of_found,) = torch.autograd.grad(found, vectors, grad)
        torch.testing.assert_close(of_found, of_wanted, rtol=1e-5, atol=1e-6)


def wide(vectors):
    """The vectors behind another column, so that none begins at a multiple of its size."""
    return torch.cat([vectors[..., :1], vectors], 3).float()


def test_vectors_within_other_memory_are_read_where_they_are():
    memory = torch.randn(2 * 4 * 4 * 4 + 3)
    vectors = memory[3:].view(2, 4, 4, 4)  # contiguous, and not at a multiple of 16 bytes
    wanted = ffm(None, vectors)
    torch.testing.assert_close(FieldAwarePairs(4)(vectors), wanted)


@pytest.mark.parametrize("term", [Term(), *AWARE], ids=["fm", "ffm", "onn"])
def test_second_derivatives_are_those_of_finite_differences(term):
    shape = (3, 4, 2) if isinstance(term, Term) else (3, 4, 4, 2)
    vectors = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(term(vectors).sum(), vectors, create_graph=True)
    assert slope.requires_grad, "a gradient penalty would be lost"
    assert torch.autograd.gradgradcheck(term, vectors)


@pytest.mark.parametrize("term", [Term(), *AWARE], ids=["fm", "ffm", "onn"])
def test_several_gradients_at_once_are_those_of_one_after_another(term):
    vectors = torch.randn((3, 4, 2) if isinstance(term, Term) else (3, 4, 4, 2))
    jacobian = partial(torch.autograd.functional.jacobian, term, vectors)
    torch.testing.assert_close(jacobian(vectorize=True), jacobian())


@pytest.mark.parametrize("own", [False, True])
def test_pairs_of_floats_keep_their_digits_under_autocast(own):
    vectors = random_vectors(70, 5, 5, 4).float()
    wanted = FieldAwarePairs(5, own)(vectors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(FieldAwarePairs(5, own)(vectors), wanted)
