"""The compressed interaction network against the paper's double sums."""

import pytest
import torch
from transcription import check_model, random_vectors

from recapp.errors import ConfigError
from recapp.models.fm import CIN


def layer(weight_HGF, last_BGD, first_BFD):
    """Return X^k: equation 6, one vector h and one pair i, j after the other."""
    vectors = []
    for weight_GF in weight_HGF:
        vector_BD = torch.zeros_like(first_BFD[:, 0])
        for i in range(last_BGD.shape[1]):
            for j in range(first_BFD.shape[1]):
                vector_BD = vector_BD + weight_GF[i, j] * last_BGD[:, i] * first_BFD[:, j]
        vectors.append(vector_BD)
    return torch.stack(vectors, 1)


def layers_of(p, prefix=""):
    names = [n for n in p if n.startswith(prefix) and n.endswith("weight_HGF")]
    return [p[name] for name in sorted(names)]


def cin(p, v, prefix="", step=layer, pool=lambda layers: layers):
    """Return p+, equations 6 to 8."""
    last = v
    layers = []
    for weight in layers_of(p, prefix):
        last = step(weight, last, v)
        layers.append(last)
    return torch.cat([x.sum(2) for x in pool(layers)], 1)


def with_itself(weight_HGF, last_BGD, first_BFD):
    return layer(weight_HGF, last_BGD, last_BGD)


def swapped(weight_HGF, last_BGD, first_BFD):
    return layer(weight_HGF.mT, last_BGD, first_BFD)


def relu(weight_HGF, last_BGD, first_BFD):
    return layer(weight_HGF, last_BGD, first_BFD).relu()


def summed_over_columns(weight_HGF, last_BGD, first_BFD):
    """The outer product is summed over columns, and every column gets the same."""
    dots_BGF = torch.einsum("bgd,bfd->bgf", last_BGD, first_BFD)
    sums_BH = torch.einsum("hgf,bgf->bh", weight_HGF, dots_BGF)
    return sums_BH[:, :, None].expand(-1, -1, first_BFD.shape[2])


def summed_over_vectors(p, v):
    """The layers are summed over vectors, and not over columns: fits if H = D."""
    last = v
    sums = []
    for weight in layers_of(p):
        last = layer(weight, last, v)
        sums.append(last.sum(1))
    return torch.cat(sums, 1)


def test_a_cin_is_the_papers():
    faults = {
        "a layer meets itself, not the first": lambda p, v: cin(p, v, step=with_itself),
        "weights of i and j are swapped": lambda p, v: cin(p, v, step=swapped),
        "layers have a ReLU": lambda p, v: cin(p, v, step=relu),
        "products are summed over columns": lambda p, v: cin(p, v, step=summed_over_columns),
        "layers are summed over vectors": summed_over_vectors,
    }
    check_model(CIN(4, [4, 4]), cin, faults, [random_vectors(5, 4, 4)])


def test_both_orders_of_the_double_sum_are_the_papers():
    narrow_then_wide = CIN(4, [3, 6, 4])
    check_model(narrow_then_wide, cin, {}, [random_vectors(5, 4, 2)])


def test_a_cin_of_no_samples_has_zero_gradients():
    vectors = torch.ones(0, 3, 2, requires_grad=True)
    network = CIN(3, [2, 5])
    sums = network(vectors)
    sums.sum().backward()
    assert sums.shape == (0, 7)
    assert all(p.grad.abs().sum() == 0 for p in network.parameters())


def test_the_columns_of_a_vector_stay_apart():
    vectors = random_vectors(2, 3, 4).requires_grad_()
    network = CIN(3, [2, 3]).double()
    last = vectors.transpose(1, 2)
    for part in network.layers:
        last = part(last, vectors.transpose(1, 2))
    last[:, 0].sum().backward()
    assert vectors.grad[:, :, 0].abs().min() > 0
    assert vectors.grad[:, :, 1:].abs().sum() == 0


@pytest.mark.parametrize("layers", [[], [0], 4])
def test_a_width_that_cannot_be_is_named_with_its_setting(layers):
    with pytest.raises(ConfigError, match=r"^model.cin_layers="):
        CIN(4, layers, setting="model.cin_layers")
