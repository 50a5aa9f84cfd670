"""A model of FuxiCTR in a Python of its own: `python fuxictr_worker.py FILE.npz SPEC`.

    FILE.npz         rows to train on, in their order, then rows to measure on
    SPEC             {"model": "dlrm", "widths": {...}, "dim": 16, "batch_size": 1024, "seed": 1,
                      "features": {"C1": {"rows": 9, "table": "C1", "list": false}}, "warm_up": 10}
    standard output  {"samples_per_cpu_second": 20000.0, "peak_bytes": ..., ...}
    FILE.npy         the probabilities of the rows to measure on

The models are put together from the layers of FuxiCTR's package, whose training step also runs
them: Adam at 1e-3 over all parameters, gradients clipped at norm 10. They have the forms of
FuxiCTR's models: each number is a vector times the number, but for DLRM, which has a bottom MLP.
Numbers are scaled to 0 to 1 on the rows to train on, as for Criteo_x1 of FuxiCTR's BARS. Widths are
those of recapp's settings. This file imports nothing of recapp.

Shapes: B rows of a batch, I numbers, F fields, D columns of a vector, L ids of lists.
"""

import json
import sys
import time
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from fuxictr.features import FeatureMap
from fuxictr.pytorch.layers import (
    CompressedInteractionNet,
    CrossNet,
    CrossNetV2,
    FactorizationMachine,
    FeatureEmbedding,
    InnerProductInteraction,
    LogisticRegression,
    MLP_Block,
)
from fuxictr.pytorch.models import BaseModel
from torch import nn

LEARNING_RATE = 1e-3
TINY = 1e-12  # of a number's range
LARGEST_NORM = 10.0  # of gradients, FuxiCTR's own default
MEASURED_AT_ONCE = 4096


class Model(BaseModel):
    """A model of FuxiCTR: vectors of fields, and the part that `build` adds."""

    def __init__(self, features: FeatureMap, dim: int, widths: dict[str, Any]) -> None:
        super().__init__(
            features, gpu=-1, verbose=0, model_root=".", metrics=["AUC"], model_id="model"
        )
        self._max_gradient_norm = LARGEST_NORM
        self.numbers = [n for n, spec in features.features.items() if spec["type"] == "numeric"]
        self.fields = len(features.features)
        self.dim = dim
        self.build(features, widths)
        self.compile("adam", "binary_crossentropy", LEARNING_RATE)
        self.reset_parameters()
        self._start_linear_weights(features)

    def _start_linear_weights(self, features: FeatureMap) -> None:
        """Start the linear weights of columns that share a table like those of other columns.
        FuxiCTR gives them tables of their own, and leaves these at start values of deviation 1.
        """
        for module in self.modules():
            layers = getattr(module, "embedding_layers", {})
            for name, layer in layers.items():
                owner = features.features[name].get("share_embedding")
                if owner is not None and layer is not layers[owner]:
                    nn.init.normal_(layer.weight.data[1:], std=1e-4)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the probabilities of a batch, as FuxiCTR's training step wants them."""
        return {"y_pred": torch.sigmoid(self.logits(self.get_inputs(inputs)))}


class DLRM(Model):
    """A bottom MLP of the numbers, dots of all pairs of vectors, a top MLP."""

    def build(self, features: FeatureMap, widths: dict[str, Any]) -> None:
        """Make the layers."""
        self.embedding = FeatureEmbedding(
            features, self.dim, not_required_feature_columns=self.numbers
        )
        fields = self.fields - len(self.numbers) + bool(self.numbers)
        if self.numbers:
            *hidden, last = widths["bottom_layers"]
            self.bottom = MLP_Block(
                len(self.numbers), hidden, output_dim=last, output_activation="ReLU"
            )
        self.dots = InnerProductInteraction(fields, output="inner_product")
        width = fields * (fields - 1) // 2 + self.dim * bool(self.numbers)
        self.top = MLP_Block(width, widths["top_layers"][:-1], output_dim=1)

    def logits(self, x: dict[str, Any]) -> Any:
        """Return the logits of a batch, [B, 1]."""
        vectors_BFD = self.embedding(x)
        if not self.numbers:
            return self.top(self.dots(vectors_BFD))
        numbers_BD = self.bottom(torch.cat([x[name] for name in self.numbers], 1))
        dots = self.dots(torch.cat([vectors_BFD, numbers_BD.unsqueeze(1)], 1))
        return self.top(torch.cat([dots, numbers_BD], 1))


class DeepFM(Model):
    """A factorisation machine and an MLP over the same vectors."""

    def build(self, features: FeatureMap, widths: dict[str, Any]) -> None:
        """Make the layers."""
        self.embedding = FeatureEmbedding(features, self.dim)
        self.fm = FactorizationMachine(features)
        self.mlp = MLP_Block(self.fields * self.dim, list(widths["layers"]), output_dim=1)

    def logits(self, x: dict[str, Any]) -> Any:
        """Return the logits of a batch, [B, 1]."""
        vectors_BFD = self.embedding(x)
        return self.fm(x, vectors_BFD) + self.mlp(vectors_BFD.flatten(1))


class XDeepFM(Model):
    """A linear part, a compressed interaction network and an MLP."""

    def build(self, features: FeatureMap, widths: dict[str, Any]) -> None:
        """Make the layers."""
        self.embedding = FeatureEmbedding(features, self.dim)
        self.linear = LogisticRegression(features)
        self.cin = CompressedInteractionNet(self.fields, list(widths["cin_layers"]))
        self.mlp = MLP_Block(self.fields * self.dim, list(widths["layers"]), output_dim=1)

    def logits(self, x: dict[str, Any]) -> Any:
        """Return the logits of a batch, [B, 1]."""
        vectors_BFD = self.embedding(x)
        return self.linear(x) + self.cin(vectors_BFD) + self.mlp(vectors_BFD.flatten(1))


class DCNv2(Model):
    """A cross network of matrices beside an MLP."""

    crosses = CrossNetV2

    def build(self, features: FeatureMap, widths: dict[str, Any]) -> None:
        """Make the layers."""
        width = self.fields * self.dim
        layers = list(widths["layers"])
        self.embedding = FeatureEmbedding(features, self.dim)
        self.cross = self.crosses(width, widths["cross_layers"])
        self.mlp = MLP_Block(width, layers, batch_norm=widths["batch_norm"])
        self.score = nn.Linear(width + layers[-1], 1)

    def logits(self, x: dict[str, Any]) -> Any:
        """Return the logits of a batch, [B, 1]."""
        vectors_BK = self.embedding(x, flatten_emb=True)
        return self.score(torch.cat([self.cross(vectors_BK), self.mlp(vectors_BK)], 1))


class DCN(DCNv2):
    """A cross network of vectors beside an MLP."""

    crosses = CrossNet


MODELS = {"dlrm": DLRM, "deepfm": DeepFM, "xdeepfm": XDeepFM, "dcn": DCN, "dcnv2": DCNv2}


def feature_map(spec: dict[str, Any], numbers: int, longest: dict[str, Any]) -> FeatureMap:
    """Return FuxiCTR's description of the columns.

    Args:
        spec: The spec of the run.
        numbers: The number of numbers.
        longest: The longest list of each feature of lists.
    """
    found = FeatureMap("rows", ".")
    found.labels = ["label"]
    found.default_emb_dim = spec["dim"]
    specs = [(f"number_{i}", {"source": "", "type": "numeric"}) for i in range(numbers)]
    for name, feature in spec["features"].items():
        own = {"source": "", "type": "categorical", "vocab_size": feature["rows"]}
        own["padding_idx"] = None
        if feature["list"]:
            own |= {"type": "sequence", "max_len": longest[name], "padding_idx": 0}
            own["feature_encoder"] = "layers.MaskedSumPooling()"
        if feature["table"] != name:
            own["share_embedding"] = feature["table"]
        specs.append((name, own))
    # FuxiCTR makes the tables in this order, and a shared one must be there before it is shared
    specs.sort(key=lambda named: "share_embedding" in named[1])
    found.features = OrderedDict(specs)
    found.num_fields = len(specs)
    found.set_column_index()
    return found


class Rows:
    """The rows of a run, and its batches."""

    def __init__(self, path: str, spec: dict[str, Any]) -> None:
        with np.load(path) as given:
            arrays = {name: torch.from_numpy(given[name]) for name in given.files}
        train_MI = arrays["dense"][: spec["rows_train"]]
        low_I = train_MI.amin(0)
        range_I = train_MI.amax(0) - low_I
        self.dense_NI = (arrays["dense"] - low_I) / range_I.clamp_min(TINY)
        self.label_N = arrays["label"]
        self.single = [n for n, feature in spec["features"].items() if not feature["list"]]
        self.lists = [n for n, feature in spec["features"].items() if feature["list"]]
        self.ids_NS = arrays["ids"]
        self.padded = {name: arrays[f"list_{name}"] for name in self.lists}

    def batch(self, first: int, last: int) -> dict[str, Any]:
        """Return the columns of rows [first, last)."""
        columns = zip(self.single, self.ids_NS[first:last].T.contiguous(), strict=True)
        numbers_BI = self.dense_NI[first:last]
        return {
            **{f"number_{i}": numbers_BI[:, i : i + 1] for i in range(numbers_BI.shape[1])},
            **dict(columns),
            **{name: padded[first:last] for name, padded in self.padded.items()},
            "label": self.label_N[first:last],
        }


def peak_bytes() -> int:
    """Return the largest memory of this process. getrusage would count that of the process that
    started it, too: Linux keeps it over exec.
    """
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def main(path: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Train one epoch, score the other rows, and return what was measured."""
    torch.set_num_threads(1)
    torch.manual_seed(spec["seed"])
    rows = Rows(path, spec)
    longest = {name: padded.shape[1] for name, padded in rows.padded.items()}
    features = feature_map(spec, rows.dense_NI.shape[1], longest)
    model = MODELS[spec["model"]](features, spec["dim"], spec["widths"])
    model.train()
    ends = [*range(0, spec["rows_train"], spec["batch_size"]), spec["rows_train"]]
    began = clock = cpu = 0.0
    measured = 0
    for step, (first, last) in enumerate(pairwise(ends)):
        if step in (0, spec["warm_up"]):
            measured = 0
            clock = time.perf_counter()
            cpu = time.process_time()
            began = began or clock
        model.train_step(rows.batch(first, last))
        measured += last - first
    cpu = time.process_time() - cpu
    clock = time.perf_counter() - clock
    train_seconds = time.perf_counter() - began
    model.eval()
    end = len(rows.label_N)
    with torch.no_grad():
        scores = [
            model(rows.batch(first, min(first + MEASURED_AT_ONCE, end)))["y_pred"].view(-1)
            for first in range(spec["rows_train"], end, MEASURED_AT_ONCE)
        ]
    np.save(path.replace(".npz", ".npy"), torch.cat(scores).numpy())
    kinds = {True: 0, False: 0}
    for name, weights in model.named_parameters():
        kinds["embedding_layers" in name and weights.dim() == 2 and "number_" not in name] += (
            weights.numel()
        )
    return {
        "samples_per_second": measured / clock,
        "samples_per_cpu_second": measured / cpu,
        "train_seconds": train_seconds,
        "peak_bytes": peak_bytes(),
        "table_parameters": kinds[True],
        "dense_parameters": kinds[False],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
