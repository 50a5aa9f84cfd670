"""The models of recapp: which collections their constructors require.

    _target_ of the settings -> KnownModel

A file of settings may name these models without `trust`. A command makes their tables before it
starts ranks; so this file does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recapp.tables.named_collections import BAGS, SEQUENCES
from recapp.tables.table_settings import WIDE


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
MODELS: Mapping[str, KnownModel] = {
    "recapp.models.published_dlrm.DLRM": PLAIN,
    "recapp.models.dcn.DCN": PLAIN,
    "recapp.models.dcnv2.DCNv2": PLAIN,
    "recapp.models.gdcn.GDCN": PLAIN,
    "recapp.models.dlrm_dcn.DLRM_DCN": PLAIN,
    "recapp.models.edcn.EDCN": PLAIN,
    "recapp.models.fcn.FCN": OF_CLICKS,
    "recapp.models.qnn_alpha.QNNAlpha": OF_CLICKS,
    "recapp.models.logistic.LogisticRegression": KnownModel((WIDE,)),
    "recapp.models.fm.FM": WITH_WIDE,
    "recapp.models.fwfm.FwFM": WITH_WIDE,
    "recapp.models.ffm.FFM": WITH_WIDE,
    "recapp.models.onn.ONN": PLAIN,
    "recapp.models.wide_and_deep.WideAndDeep": WITH_WIDE,
    "recapp.models.deepfm.DeepFM": WITH_WIDE,
    "recapp.models.xdeepfm.XDeepFM": WITH_WIDE,
    "recapp.models.autoint.AutoInt": PLAIN,
    "recapp.models.masknet.MaskNet": PLAIN,
    "recapp.models.finalmlp.FinalMLP": PLAIN,
    "recapp.models.finalnet.FinalNet": OF_CLICKS,
    "recapp.models.wukong.Wukong": PLAIN,
    "recapp.models.rankmixer.RankMixer": KnownModel(
        of_clicks=lambda arguments: arguments.get("experts", 1) != 1
    ),
    "recapp.models.din.DIN": WITH_SEQUENCES,
    "recapp.models.bst.BST": WITH_SEQUENCES,
}
"""The models by their `_target_`."""
