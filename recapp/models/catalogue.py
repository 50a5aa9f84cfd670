"""The models of recapp: their constructors, collections and checks.

    _target_ of the settings -> KnownModel    what it needs, and whether its settings fit the tables

A file of settings may name these models without `trust`. A command checks their layers before it
starts ranks; so this file does not import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recapp.models import cross_checks, widths
from recapp.tables.named_collections import BAGS

Check = Callable[[Mapping[str, Any], Sequence[int]], None]
"""A check of a model's arguments and of the dims of its vectors, one for each lookup that pools. It
raises `ConfigError`."""


@dataclass(frozen=True)
class KnownModel:
    """A model of recapp.

    Args:
        check: The check of its arguments and of the dims of its vectors.
        needs: The collections that its constructor requires.
    """

    check: Check
    needs: tuple[str, ...] = (BAGS,)


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
}
"""The models by their `_target_`."""
