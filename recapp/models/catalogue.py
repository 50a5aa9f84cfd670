"""The models of recapp: which collections their constructors require.

    _target_ of the settings -> KnownModel

A file of settings may name these models without `trust`. A command makes their tables before it
starts ranks; so this file does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recapp.tables.table_settings import BAGS, SEQUENCES, WIDE


@dataclass(frozen=True)
class KnownModel:
    """A model of recapp.

    Args:
        needs: The collections that its constructor requires.
        of_clicks: Whether, with some arguments, it trains with losses that only logits of clicks
            have.
    """

    needs: tuple[str, ...] = (BAGS,)
    of_clicks: Callable[[Mapping[str, Any]], bool] = lambda arguments: False


PLAIN = KnownModel()
WITH_WIDE = KnownModel((BAGS, WIDE))
WITH_SEQUENCES = KnownModel((BAGS, SEQUENCES))
OF_CLICKS = KnownModel(of_clicks=lambda arguments: True)
# The models by their `_target_`.
MODELS: Mapping[str, KnownModel] = {
    "recapp.models.published_dlrm.DLRM": PLAIN,
    "recapp.models.dcn.DCN": PLAIN,
    "recapp.models.dcn.DCNv2": PLAIN,
    "recapp.models.dcn.GDCN": PLAIN,
    "recapp.models.published_dlrm.DLRM_DCN": PLAIN,
    "recapp.models.dcn.EDCN": PLAIN,
    "recapp.models.fcn.FCN": OF_CLICKS,
    "recapp.models.fcn.QNNAlpha": OF_CLICKS,
    "recapp.models.fm.LogisticRegression": KnownModel((WIDE,)),
    "recapp.models.fm.FM": WITH_WIDE,
    "recapp.models.fm.FwFM": WITH_WIDE,
    "recapp.models.fm.FFM": WITH_WIDE,
    "recapp.models.fm.ONN": PLAIN,
    "recapp.models.fm.WideAndDeep": WITH_WIDE,
    "recapp.models.fm.DeepFM": WITH_WIDE,
    "recapp.models.fm.XDeepFM": WITH_WIDE,
    "recapp.models.attention.AutoInt": PLAIN,
    "recapp.models.gated.MaskNet": PLAIN,
    "recapp.models.gated.FinalMLP": PLAIN,
    "recapp.models.gated.FinalNet": OF_CLICKS,
    "recapp.models.scaling.Wukong": PLAIN,
    "recapp.models.scaling.RankMixer": KnownModel(
        of_clicks=lambda arguments: arguments.get("experts", 1) != 1
    ),
    "recapp.models.attention.DIN": WITH_SEQUENCES,
    "recapp.models.attention.BST": WITH_SEQUENCES,
}
