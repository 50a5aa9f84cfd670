"""The model in service, its metadata, and its replacement without losing a request.

    load (beside the old one) -> check (its example, its features) -> put into service
                              -> or raise an error: the old one stays in service

A server offers its model under the name that the server started with; the version identifies the
model. A new model goes into service only if it scores its own example as at the time of its export,
and reads the same features. Other features would make the server refuse its clients' requests.

Putting into service is one assignment. The old model computes the requests that were read for it,
and is freed after the last of them.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from recapp.console import note
from recapp.dataset.schema import TextIds
from recapp.dataset.sequential_rows import plain_value
from recapp.errors import ConfigError, RankError, RecappError
from recapp.inference.scorer import Scorer
from recapp.processes.process_memory import give_back_unused
from recapp.serving.counts import Counts
from recapp.serving.limits import Refused, bad, busy

ROUNDING = 1e-5
"""The tolerance between the scores of the example and those stored with it, relative to max(1,
|score|).
"""

EXAMPLE_ROWS = 4  # rows that the page shows


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
    def named(self) -> dict[str, str]:
        """Return the name and the version of the model, as answers have them."""
        return {"model_name": self.name, "model_version": self.scorer.version}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names that a request may ask for: columns of scores, then outputs."""
        return tuple(
            dict.fromkeys([*columns_of(self.scorer), *(o.name for o in self.scorer.task.outputs)])
        )

    def metadata(self) -> dict[str, Any]:
        """Return the model metadata of the Open Inference protocol."""
        schema = self.scorer.schema
        return {
            "name": self.name,
            "versions": [self.scorer.version],
            "platform": "recapp",
            "inputs": [
                {
                    "name": name,
                    "datatype": self.datatype(name),
                    "shape": [-1, schema.vectors[name]] if name in schema.vectors else [-1],
                }
                for name in schema.inputs
            ],
            "outputs": [{"name": name, "datatype": "FP32", "shape": [-1]} for name in self.outputs],
        }

    def datatype(self, feature: str) -> str:
        """Return the native datatype of a feature; requests may use others."""
        schema = self.scorer.schema
        if feature in schema.dense or feature in schema.vectors:
            return "FP32"
        integers = schema.text_ids(feature) is TextIds.INTEGERS or feature in schema.times
        return "INT64" if integers else "BYTES"

    def example(self) -> list[dict[str, Any]]:
        """Return a few raw rows of the example as JSON; synthetic rows if there is no example."""
        if self.scorer.example is None:
            schema = self.scorer.schema
            row: dict[str, Any] = {
                name: {"FP32": 0.0, "INT64": 0}.get(self.datatype(name), "0")
                for name in schema.inputs
            }
            return [row | {name: [0.0] * width for name, width in schema.vectors.items()}]
        columns = self.scorer.schema.resolve(self.scorer.example.schema, "the example")
        some = self.scorer.example.slice(0, EXAMPLE_ROWS)
        named = pa.table({name: some.column(column) for name, column in columns.items()})
        return [
            {key: plain_value(value) for key, value in row.items()} for row in named.to_pylist()
        ]


def features_of(scorer: Scorer) -> Mapping[str, TextIds | str | int | None]:
    """Return the names of a model's columns, each with its rule for ids of texts, its unit of time
    or its length of vectors.
    """
    schema = scorer.schema
    rules: dict[str, TextIds | str | int | None] = dict.fromkeys(schema.dense)
    rules |= {name: schema.text_ids(name) for name in schema.sparse}
    return rules | dict(schema.times) | dict(schema.vectors)


def columns_of(scorer: Scorer) -> list[str]:
    """Return the names of a model's columns of scores."""
    return [output.column for output in scorer.task.outputs]


def check_model(scorer: Scorer, before: Scorer | None = None) -> None:
    """Check that a model may go into service.

    The model scores its example, or a row without ids. This also compiles the kernels, so the first
    request need not wait.

    Args:
        scorer: The model.
        before: The model that it replaces.

    Raises:
        ConfigError: Its scores differ from those stored with the example, or its features or
            columns of scores differ from those of `before`.
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
    if before is not None and columns_of(scorer) != columns_of(before):
        raise ConfigError(
            f"model {scorer.version} gives the scores {', '.join(columns_of(scorer))}, and "
            f"{before.version}, which is in service, gives {', '.join(columns_of(before))}: start "
            "another server for it"
        )
    if scorer.example is None:
        nothing = pa.table({name: pa.nulls(1) for name in scorer.schema.inputs})
        with suppress(RecappError):  # it may refuse a row without ids
            scorer(scorer.batch(nothing))
        return
    for name, scores_N in scorer.columns(scorer.example).items():
        if scorer.expected is not None:
            expected_N = scorer.expected[name]
            apart_N = (scores_N - expected_N).abs()
            if not bool((apart_N <= ROUNDING * expected_N.abs().clamp(min=1)).all()):
                raise ConfigError(
                    f"model {scorer.version} gives its example scores that differ by "
                    f"{float(apart_N.max()):.2g} from the stored ones: export it again"
                )


class ModelInService:
    """The model in service, and the loader of its successor.

    Args:
        load: Loads the model from the path that the server was started with.
        name: The name under which the server offers the model; None takes the model's own name.
        counts: The counters of the server; reloads are counted there.

    Attributes:
        loads: Whether a reload is running.

    Raises:
        ConfigError: The name cannot be a part of a URL path.
        RecappError: The first model cannot be loaded, or fails its check.
    """

    def __init__(self, load: Callable[[], Scorer], name: str | None, counts: Counts) -> None:
        self._load = load
        self._counts = counts
        self.loads = False
        scorer = load()
        check_model(scorer)
        name = name or scorer.name
        if "/" in name or name in (".", "..") or not name.isprintable():
            raise ConfigError(
                f"name={name}: the name of a model is part of the paths of requests: "
                "choose a name of printable letters without a slash"
            )
        self._put(Served(name, scorer))

    def _put(self, served: Served) -> None:
        self._served = served
        self._counts.model.info({"name": served.name, "version": served.scorer.version})

    def current(self) -> Served:
        """Return the model in service."""
        return self._served

    async def reload(self) -> Served:
        """Load the model again and put it into service; the old model answers meanwhile.

        Raises:
            Refused: The model cannot be loaded or fails its check, so the old model stays; or
                another reload is running.
        """
        if self.loads:
            raise Refused(409, "a model is being loaded already: wait for it")
        self.loads = True
        before = self._served
        try:
            scorer = await asyncio.to_thread(self._loaded)
        except Exception as error:
            self._counts.reloads.labels("refused").inc()
            kind = "" if isinstance(error, RecappError) else f"{type(error).__name__}: "
            text = (
                f"not loaded, version {before.scorer.version} stays in service: "
                f"{kind}{' '.join(str(error).split())}"
            )
            note(text)
            raise (busy(text) if isinstance(error, RankError) else bad(text)) from error
        finally:
            self.loads = False
        self._put(Served(before.name, scorer))
        self._counts.reloads.labels("loaded").inc()
        note(f"version {scorer.version} is in service instead of {before.scorer.version}")
        del before
        await asyncio.to_thread(give_back_unused)
        return self._served

    def _loaded(self) -> Scorer:
        scorer = self._load()
        check_model(scorer, self._served.scorer)
        return scorer
