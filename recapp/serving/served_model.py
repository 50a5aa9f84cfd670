"""The model that a server answers with, what it says of itself, and whether it may go into service.

A model is served under the name that the server started with; its version says which it is. A new
one (`recapp/serving/reload.py`) takes its place only if it scores its own example as it did when it
was written, and reads the same features: clients would be refused otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from recapp.dataset.schema import TextIds
from recapp.errors import ConfigError, RecappError
from recapp.inference.scorer import Scorer
from recapp.sparse.batch import Batch

ROUNDING = 1e-5
"""How far the scores of an example may be from those that are kept with it."""

EXAMPLE_ROWS = 4  # that the page shows


@dataclass(frozen=True, slots=True)
class Served:
    """A model in service.

    Args:
        name: The name that requests call it by.
        scorer: The model.
    """

    name: str
    scorer: Scorer

    @property
    def version(self) -> str:
        """Return its version."""
        return self.scorer.version

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of its features, dense ones first."""
        return (*self.scorer.schema.dense, *self.scorer.schema.sparse)

    def metadata(self) -> dict[str, Any]:
        """Return what the protocol calls the metadata of a model."""
        schema = self.scorer.schema
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "recapp",
            "inputs": [
                *({"name": name, "datatype": "FP32", "shape": [-1]} for name in schema.dense),
                *(
                    {"name": name, "datatype": self.datatype(name), "shape": [-1]}
                    for name in schema.sparse
                ),
            ],
            "outputs": [
                {"name": "score", "datatype": "FP32", "shape": [-1]},
                {"name": "logit", "datatype": "FP32", "shape": [-1]},
            ],
        }

    def datatype(self, feature: str) -> str:
        """Return the datatype that a feature has by itself; others are taken too."""
        if feature in self.scorer.schema.dense:
            return "FP32"
        integers = self.scorer.schema.text_ids(feature) is TextIds.INTEGERS
        return "INT64" if integers else "BYTES"

    def example(self) -> list[dict[str, Any]]:
        """Return a few raw rows to try the model with, as JSON; made up where none were kept."""
        if self.scorer.example is None:
            return [
                dict.fromkeys(self.scorer.schema.dense, 0.0)
                | {
                    name: 0 if self.datatype(name) == "INT64" else "0"
                    for name in self.scorer.schema.sparse
                }
            ]
        columns = self.scorer.schema.resolve(self.scorer.example.schema, "the example")
        some = self.scorer.example.slice(0, EXAMPLE_ROWS)
        named = pa.table({name: some.column(own) for name, own in columns.items()})
        return [{key: _plain(value) for key, value in row.items()} for row in named.to_pylist()]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def features_of(scorer: Scorer) -> Mapping[str, TextIds | None]:
    """Return what clients must know of a model's features: names, and how text becomes an id."""
    schema = scorer.schema
    return dict.fromkeys(schema.dense) | {name: schema.text_ids(name) for name in schema.sparse}


def check_model(scorer: Scorer, before: Scorer | None = None) -> None:
    """Check that a model may go into service.

    It scores its example, which also compiles what the first request would wait for.

    Args:
        scorer: The model.
        before: The model that it is to replace.

    Raises:
        ConfigError: Its scores are not those that were kept with the example, or its features are
            others.
        RecappError: The example cannot be scored.
    """
    if before is not None and features_of(scorer) != features_of(before):
        changed = sorted(
            name
            for name in {*features_of(scorer), *features_of(before)}
            if features_of(scorer).get(name, "") != features_of(before).get(name, "")
        )
        raise ConfigError(
            f"model {scorer.version} reads other features than {before.version}, which is in "
            f"service ({', '.join(changed[:5]) or 'their order'}): start another server for it"
        )
    if scorer.example is None:
        _warm_up(scorer)
        return
    scores_N = scorer.predict(scorer.example)
    if not torch.isfinite(scores_N).all():
        raise ConfigError(
            f"model {scorer.version} gives its example scores that are not finite: export it again"
        )
    if scorer.expected is not None:
        apart = float((scores_N - scorer.expected).abs().max())
        if not apart <= ROUNDING:
            raise ConfigError(
                f"model {scorer.version} gives its example scores that are {apart:.2g} from those "
                "that were kept with it: export it again"
            )


def _warm_up(scorer: Scorer) -> None:
    """Compute a row without ids, if the model can: one that refuses it is right to do so."""
    nothing = pa.table(
        {name: pa.nulls(1) for name in (*scorer.schema.dense, *scorer.schema.sparse)}
    )
    try:
        batch: Batch = scorer.batch(nothing)
        scorer(batch)
    except RecappError:
        return
