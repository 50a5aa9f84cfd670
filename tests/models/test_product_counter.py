"""The operations of layers are those of their products, or have no number."""

import pytest
import torch
from torch import nn

from recapp.models.layer_table import PROBE_ROWS, ProductCounter, layer_table


def operations(run):
    with ProductCounter() as counter:
        run()
    assert counter.unknown == 0
    return counter.operations


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_linear_layer_costs_its_product(mode):
    with mode():
        assert operations(lambda: nn.Linear(8, 5)(torch.rand(3, 5, 8))) == 2 * 3 * 5 * 8 * 5


def test_attention_is_counted_where_torch_would_compute_it_by_one_function():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(6, 2, 16, batch_first=True)

        def forward(self, batch):
            return self.encoder(batch.dense_BI.view(-1, 5, 6))

    rows, failure = layer_table(Model(), 30)
    attention = 5 * 4 * 6 * 6 + 2 * 5 * 5 * 6
    assert failure is None and rows[-1]["flops"] == 2 * (attention + 5 * 2 * 6 * 16)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        (nn.Conv1d(4, 6, 3), [(5, 4, 10)]),
        (nn.LSTM(8, 6), [(3, 5, 8)]),
        (nn.Bilinear(4, 5, 6), [(3, 4), (3, 5)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_convolutions_recurrent_and_bilinear_layers_have_no_number(layer, shapes):
    with torch.no_grad(), ProductCounter() as counter:
        layer.eval()(*[torch.rand(shape) for shape in shapes])
    assert counter.unknown


def test_a_layer_of_another_packages_functions_has_no_number():
    library = torch.library.Library("test_product_counter", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CPU")

    class Twice(nn.Module):
        def forward(self, x_BK):
            return torch.ops.test_product_counter.twice(x_BK).sum(1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.twice = Twice()

        def forward(self, batch):
            return self.twice(self.first(batch.dense_BI))

    rows, failure = layer_table(Model(), 3)
    assert failure is None and PROBE_ROWS > 1
    assert [(r["layer"], r["flops"]) for r in rows] == [
        ("first", 2 * 3 * 4),
        ("twice", None),
        ("all", None),
    ]
    library._destroy()
