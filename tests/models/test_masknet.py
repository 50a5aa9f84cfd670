"""MaskNet against the equations of arXiv 2102.07619, and against forms that differ from it."""

import pytest
import torch
from formulas import fields_of, layer_norm, linear, relu, tower
from transcription import check_model, samples_of, tables_of

from recapp.errors import ConfigError
from recapp.models.gated import MaskNet

FEATURES = ("a", "b")


def masknet(
    p,
    batch,
    serial=True,
    normal_masks=False,
    end=lambda mask: mask,
    norm_first=False,
    norm_of_all=False,
    normal_fields=True,
    normal_blocks=True,
):
    """Return logits, equations 4 to 17."""
    fields = fields_of(p, batch, FEATURES)
    raw_BK = torch.cat(fields, 1)
    hidden_BW = raw_BK
    if norm_of_all:
        flat = [p[f"field_norm.{name}_FD"].flatten() for name in ("gain", "bias")]
        hidden_BW = layer_norm(raw_BK, *flat)
    elif normal_fields:
        rows = zip(fields, p["field_norm.gain_FD"], p["field_norm.bias_FD"], strict=True)
        hidden_BW = torch.cat([layer_norm(*row) for row in rows], 1)
    guide_BK = hidden_BW if normal_masks else raw_BK
    outputs = []
    for i in range(2):
        block = f"blocks.{i}"
        aggregated = relu(linear(p, f"{block}.aggregation", guide_BK))
        mask_BW = end(linear(p, f"{block}.projection", aggregated))
        output_BV = linear(p, f"{block}.layer", mask_BW * hidden_BW, bias=False)
        if normal_blocks:
            norm = (p[f"{block}.norm.weight"], p[f"{block}.norm.bias"])
            output_BV = (
                layer_norm(relu(output_BV), *norm)
                if norm_first
                else relu(layer_norm(output_BV, *norm))
            )
        else:
            output_BV = relu(output_BV)
        outputs.append(output_BV)
        if serial:
            hidden_BW = output_BV
    return tower(p, "top", hidden_BW if serial else torch.cat(outputs, 1))[:, 0]


def model(**settings):
    tables = tables_of(dict.fromkeys(FEATURES, 3))
    return MaskNet(tables, 2, **({"block_layers": [5, 4], "ratio": 1.5} | settings))


FAULTS = {
    "masks from normalised fields": {"normal_masks": True},
    "a ReLU behind the mask": {"end": relu},
    "a sigmoid behind the mask": {"end": torch.sigmoid},
    "one normalisation over all fields": {"norm_of_all": True},
    "fields are not normalised": {"normal_fields": False},
    "normalisation behind the ReLU": {"norm_first": True},
    "blocks are not normalised": {"normal_blocks": False},
}


@pytest.mark.parametrize("form", ["serial", "parallel"])
def test_both_forms_are_the_papers(form):
    serial = form == "serial"
    faults = {
        what: lambda p, x, fault=fault: masknet(p, x, serial, **fault)
        for what, fault in FAULTS.items()
    }
    check_model(
        model(form=form, layers=[] if serial else [4]),
        lambda p, x: masknet(p, x, serial),
        faults,
        [samples_of(FEATURES, dense=2)],
    )


def test_without_normalisations_it_is_the_form_of_the_quoted_runs():
    check_model(
        model(norm_fields=False, norm_blocks=False),
        lambda p, x: masknet(p, x, normal_fields=False, normal_blocks=False),
        {},
        [samples_of(FEATURES, dense=2)],
    )


@pytest.mark.parametrize("form", ["serial", "parallel"])
def test_dropout_is_the_last_layer_of_each_block(form):
    batch = samples_of(FEATURES, dense=2)
    made = model(form=form, dropout=0.5).double()
    raw_BK = made.fields(batch).flatten(1)
    assert [block.dropout.p for block in made.blocks] == [0.5, 0.5]
    block = made.blocks[0]
    torch.manual_seed(1)
    dropped = (block(raw_BK, raw_BK) == 0) & (made.eval().blocks[0](raw_BK, raw_BK) > 0)
    assert dropped.any() and not dropped.all()
    block.dropout.register_forward_hook(lambda module, given, output: torch.full_like(output, 3))
    assert (block(raw_BK, raw_BK) == 3).all()


def test_the_mask_is_wider_than_what_it_masks_by_the_ratio():
    made = MaskNet(tables_of(dict.fromkeys(FEATURES, 10)), 0, block_layers=[400, 300])
    widths = [(b.aggregation.out_features, b.layer.in_features) for b in made.blocks]
    assert widths == [(40, 20), (800, 400)]
    assert made.blocks[0].layer.bias is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"form": "seriel"}, "model.form=seriel: did you mean serial"),
        ({"ratio": 0}, "model.ratio=0: must be a number above 0"),
        ({"block_layers": []}, r"model.block_layers=\[\]: must be a list of at least one width"),
        ({"layers": [0]}, "0 is no width"),
        ({"dropout": 1.5}, "model.dropout=1.5"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        model(**settings)
