"""The models of recapp: their constructors, collections and checks.

    _target_ of the settings -> KnownModel    what it needs, and whether its settings fit the tables

A file of settings may name these models without `trust`. A command checks their layers before it
starts ranks; so this file does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recapp.models import cross_checks, fm_checks, widths
from recapp.tables.named_collections import BAGS
from recapp.tables.table_settings import WIDE

Check = Callable[[Mapping[str, Any], Sequence[int]], None]
"""A check of a model's arguments and of the dims of its vectors, one for each lookup that pools. It
raises `ConfigError`."""


@dataclass(frozen=True)
class KnownModel:
    """A model of recapp.

    Args:
        check: The check of its arguments and of the dims of its vectors.
        needs: The collections that its constructor requires.
        check_fields: The check of the dims of its vectors together with the number of dense
            features; None if the two need not fit.
    """

    check: Check
    needs: tuple[str, ...] = (BAGS,)
    check_fields: Callable[[Sequence[int], int], object] | None = None


def _dlrm(arguments: Mapping[str, Any], dims: Sequence[int]) -> None:
    widths.check_dlrm(arguments.get("bottom_layers", ()), arguments.get("top_layers", ()))


MODELS: Mapping[str, KnownModel] = {
    "recapp.models.published_dlrm.DLRM": KnownModel(_dlrm),
    "recapp.models.dcn.DCN": KnownModel(cross_checks.check_crosses),
    "recapp.models.dcnv2.DCNv2": KnownModel(cross_checks.check_crosses),
    "recapp.models.gdcn.GDCN": KnownModel(cross_checks.check_crosses),
    "recapp.models.dlrm_dcn.DLRM_DCN": KnownModel(cross_checks.check_crosses),
    "recapp.models.edcn.EDCN": KnownModel(cross_checks.check_edcn),
    "recapp.models.fcn.FCN": KnownModel(cross_checks.check_fcn),
    "recapp.models.qnn_alpha.QNNAlpha": KnownModel(cross_checks.check_qnn_alpha),
    "recapp.models.logistic.LogisticRegression": KnownModel(fm_checks.check_nothing, (WIDE,)),
    "recapp.models.fm.FM": KnownModel(fm_checks.check_one_dim, (BAGS, WIDE)),
    "recapp.models.fwfm.FwFM": KnownModel(fm_checks.check_one_dim, (BAGS, WIDE)),
    "recapp.models.ffm.FFM": KnownModel(
        fm_checks.check_one_dim, (BAGS, WIDE), fm_checks.check_field_aware
    ),
    "recapp.models.onn.ONN": KnownModel(fm_checks.check_deep, (BAGS,), fm_checks.check_field_aware),
    "recapp.models.wide_and_deep.WideAndDeep": KnownModel(
        fm_checks.check_wide_and_deep, (BAGS, WIDE)
    ),
    "recapp.models.deepfm.DeepFM": KnownModel(fm_checks.check_deep, (BAGS, WIDE)),
    "recapp.models.xdeepfm.XDeepFM": KnownModel(fm_checks.check_xdeepfm, (BAGS, WIDE)),
}
"""The models by their `_target_`."""
