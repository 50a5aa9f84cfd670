"""The models of recapp: their constructors, collections and checks.

    _target_ of the settings -> KnownModel    what it needs, and whether its settings fit the tables

A file of settings may name these models without `trust`. A command checks their layers before it
starts ranks; so this file does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from recapp.models import model_checks
from recapp.tables.config import TableLookup
from recapp.tables.named_collections import BAGS, SEQUENCES
from recapp.tables.table_settings import WIDE

Check = Callable[[Mapping[str, Any], Sequence[int]], None]
"""A check of a model's arguments and of the dims of its vectors, one for each lookup that pools. It
raises `ConfigError`."""
LookupCheck = Callable[[Mapping[str, Any], Mapping[str, Sequence[TableLookup]], bool], None]
"""A check of a model's arguments and of its lookups by collection. It raises `ConfigError`."""


@dataclass(frozen=True)
class KnownModel:
    """A model of recapp.

    Args:
        check: The check of its arguments and of the dims of its vectors.
        needs: The collections that its constructor requires.
        check_fields: The check of the dims of its vectors together with the number of dense
            features; None if the two need not fit.
        check_lookups: A further check, of its lookups in all collections; its last argument is
            whether their dims are known.
        of_clicks: Whether, with these arguments, it trains with losses that only logits of clicks
            have.
    """

    check: Check
    needs: tuple[str, ...] = (BAGS,)
    check_fields: Callable[[Sequence[int], int], object] | None = None
    check_lookups: LookupCheck | None = None
    of_clicks: Callable[[Mapping[str, Any]], bool] = lambda arguments: False


def _dlrm(arguments: Mapping[str, Any], dims: Sequence[int]) -> None:
    model_checks.check_dlrm(arguments.get("bottom_layers", ()), arguments.get("top_layers", ()))


def _fits(check: Callable[..., None], one_dim: str = "") -> Check:
    """Return the check by a function whose arguments are settings of the model.

    Args:
        check: The function. Without one of these settings the constructor checks alone.
        one_dim: The name of the model, if its vectors must have one dim.
    """
    names = list(signature(check).parameters)

    def checked(arguments: Mapping[str, Any], dims: Sequence[int]) -> None:
        if all(name in arguments for name in names):
            check(**{name: arguments[name] for name in names})
        if one_dim:
            model_checks.check_same_dim(one_dim, dims)

    return checked


def _always(arguments: Mapping[str, Any]) -> bool:
    return True


def _history(
    arguments: Mapping[str, Any], lookups: Mapping[str, Sequence[TableLookup]]
) -> dict[str, str]:
    return model_checks.pair_history(lookups[BAGS], lookups[SEQUENCES], arguments.get("history"))


def _din(
    arguments: Mapping[str, Any], lookups: Mapping[str, Sequence[TableLookup]], dims_known: bool
) -> None:
    _history(arguments, lookups)


def _bst(
    arguments: Mapping[str, Any], lookups: Mapping[str, Sequence[TableLookup]], dims_known: bool
) -> None:
    dims = {x.output: x.dim for x in lookups[SEQUENCES]}
    item = sum(dims[name] for name in _history(arguments, lookups))
    if "heads" in arguments and dims_known:
        position = arguments.get("position_dim")
        model_checks.check_step(item, position or item, arguments["heads"])


MODELS: Mapping[str, KnownModel] = {
    "recapp.models.published_dlrm.DLRM": KnownModel(_dlrm),
    "recapp.models.dcn.DCN": KnownModel(model_checks.check_crosses),
    "recapp.models.dcnv2.DCNv2": KnownModel(model_checks.check_crosses),
    "recapp.models.gdcn.GDCN": KnownModel(model_checks.check_crosses),
    "recapp.models.dlrm_dcn.DLRM_DCN": KnownModel(model_checks.check_crosses),
    "recapp.models.edcn.EDCN": KnownModel(model_checks.check_edcn),
    "recapp.models.fcn.FCN": KnownModel(model_checks.check_fcn, of_clicks=_always),
    "recapp.models.qnn_alpha.QNNAlpha": KnownModel(model_checks.check_qnn_alpha, of_clicks=_always),
    "recapp.models.logistic.LogisticRegression": KnownModel(model_checks.check_nothing, (WIDE,)),
    "recapp.models.fm.FM": KnownModel(model_checks.check_pairs, (BAGS, WIDE)),
    "recapp.models.fwfm.FwFM": KnownModel(model_checks.check_pairs, (BAGS, WIDE)),
    "recapp.models.ffm.FFM": KnownModel(
        model_checks.check_pairs, (BAGS, WIDE), model_checks.check_field_aware
    ),
    "recapp.models.onn.ONN": KnownModel(
        model_checks.check_deep, (BAGS,), model_checks.check_field_aware
    ),
    "recapp.models.wide_and_deep.WideAndDeep": KnownModel(
        model_checks.check_wide_and_deep, (BAGS, WIDE)
    ),
    "recapp.models.deepfm.DeepFM": KnownModel(model_checks.check_deep, (BAGS, WIDE)),
    "recapp.models.xdeepfm.XDeepFM": KnownModel(model_checks.check_xdeepfm, (BAGS, WIDE)),
    "recapp.models.autoint.AutoInt": KnownModel(_fits(model_checks.check_autoint, "AutoInt")),
    "recapp.models.masknet.MaskNet": KnownModel(_fits(model_checks.check_masknet, "MaskNet")),
    "recapp.models.finalmlp.FinalMLP": KnownModel(_fits(model_checks.check_finalmlp, "FinalMLP")),
    "recapp.models.finalnet.FinalNet": KnownModel(
        _fits(model_checks.check_finalnet, "FinalNet"), of_clicks=_always
    ),
    "recapp.models.wukong.Wukong": KnownModel(_fits(model_checks.check_wukong, "Wukong")),
    "recapp.models.rankmixer.RankMixer": KnownModel(
        _fits(model_checks.check_rankmixer),
        of_clicks=lambda arguments: arguments.get("experts", 1) != 1,
    ),
    "recapp.models.din.DIN": KnownModel(
        _fits(model_checks.check_din), (BAGS, SEQUENCES), check_lookups=_din
    ),
    "recapp.models.bst.BST": KnownModel(
        _fits(model_checks.check_bst), (BAGS, SEQUENCES), check_lookups=_bst
    ),
}
"""The models by their `_target_`."""
