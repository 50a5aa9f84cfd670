"""Replace the model in service by a new one without losing a request.

    load (beside the old one) -> check (its example, its features) -> put into service
                              -> or raise an error: the old one stays in service

Putting into service is one assignment. The old model computes the requests that were read for it,
and is freed after the last of them.
"""

import asyncio
from collections.abc import Callable

from recapp.console import note
from recapp.errors import ConfigError, RankError, RecappError
from recapp.inference.scorer import Scorer
from recapp.processes.process_memory import give_back_unused
from recapp.serving.counts import Counts
from recapp.serving.limits import Refused, bad, busy
from recapp.serving.served_model import Served, check_model


class ModelInService:
    """The model in service, and the loader of its successor.

    Args:
        load: Loads the model from the path that the server was started with.
        name: The name under which the server offers the model; None takes the model's own name.
        counts: The counters of the server; reloads are counted there.

    Raises:
        ConfigError: The name cannot be a part of a URL path.
        RecappError: The first model cannot be loaded, or fails its check.
    """

    def __init__(self, load: Callable[[], Scorer], name: str | None, counts: Counts) -> None:
        self._load = load
        self._counts = counts
        self._loads = False
        scorer = load()
        check_model(scorer)
        self._put(Served(_checked(name or scorer.name), scorer))

    def _put(self, served: Served) -> None:
        self._served = served
        self._counts.model({"name": served.name, "version": served.version})

    def current(self) -> Served:
        """Return the model in service."""
        return self._served

    @property
    def loads(self) -> bool:
        """Return whether a reload is running."""
        return self._loads

    async def reload(self) -> Served:
        """Load the model again and put it into service; the old model answers meanwhile.

        Raises:
            Refused: The model cannot be loaded or fails its check, so the old model stays; or
                another reload is running.
        """
        if self._loads:
            raise Refused(409, "a model is being loaded already: wait for it")
        self._loads = True
        before = self._served
        try:
            scorer = await asyncio.to_thread(self._loaded)
        except Exception as error:
            self._counts.reload("refused")
            kind = "" if isinstance(error, RecappError) else f"{type(error).__name__}: "
            text = (
                f"not loaded, version {before.version} stays in service: "
                f"{kind}{' '.join(str(error).split())}"
            )
            note(text)
            raise (busy(text) if isinstance(error, RankError) else bad(text)) from error
        finally:
            self._loads = False
        self._put(Served(before.name, scorer))
        self._counts.reload("loaded")
        note(f"version {scorer.version} is in service instead of {before.version}")
        del before
        await asyncio.to_thread(give_back_unused)
        return self._served

    def _loaded(self) -> Scorer:
        scorer = self._load()
        check_model(scorer, self._served.scorer)
        return scorer


def _checked(name: str) -> str:
    """Return the name if it can be a part of a URL path.

    Raises:
        ConfigError: The name cannot be a part of a URL path.
    """
    if "/" in name or name in (".", "..") or not name.isprintable():
        raise ConfigError(
            f"name={name}: the name of a model is part of the paths of requests: "
            "choose a name of printable letters without a slash"
        )
    return name
