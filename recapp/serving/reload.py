"""A new model in the place of the old one, without an answer lost.

    load (beside the old one) -> check (its example, its features) -> take its place
                              -> or say why not: the old one stays in service

Taking the place is one assignment. Requests that were read for the old model are computed by it;
when the last of them is answered it is gone.
"""

import asyncio
from collections.abc import Callable

from recapp.console import note
from recapp.errors import ConfigError, RankError, RecappError
from recapp.inference.scorer import Scorer
from recapp.processes.process_memory import give_back_unused
from recapp.serving.limits import Refused, bad, busy
from recapp.serving.metrics_text import Counts
from recapp.serving.served_model import Served, check_model


class ModelInService:
    """The model that answers, and the way to another one.

    Args:
        load: Loads the model anew, from the path that the server was started with.
        name: The name that it is served under; None takes the model's own.
        counts: Where reloads are counted.

    Raises:
        ConfigError: No path can have the name.
        RecappError: The first model cannot be loaded, or fails its check.
    """

    def __init__(self, load: Callable[[], Scorer], name: str | None, counts: Counts) -> None:
        self._load = load
        self._counts = counts
        self._loads = False
        scorer = load()
        check_model(scorer)
        self._served = Served(_checked(name or scorer.name), scorer)

    def current(self) -> Served:
        """Return the model in service."""
        return self._served

    @property
    def loads(self) -> bool:
        """Return whether another model is being loaded."""
        return self._loads

    async def reload(self) -> Served:
        """Load the model anew and put it into service, while the old one answers.

        Raises:
            Refused: It cannot be loaded or fails its check, and the old one stays; or another is
                being loaded.
        """
        if self._loads:
            raise Refused(409, "a model is being loaded already: wait for it")
        self._loads = True
        before = self._served
        try:
            scorer = await asyncio.to_thread(self._loaded)
        except Exception as error:
            self._counts.reloads["refused"] += 1
            kind = "" if isinstance(error, RecappError) else f"{type(error).__name__}: "
            text = (
                f"not loaded, version {before.version} stays in service: "
                f"{kind}{' '.join(str(error).split())}"
            )
            note(text)
            raise (busy(text) if isinstance(error, RankError) else bad(text)) from error
        finally:
            self._loads = False
        self._served = Served(before.name, scorer)
        self._counts.reloads["loaded"] += 1
        note(f"version {scorer.version} is in service, {before.version} was before")
        del before
        await asyncio.to_thread(give_back_unused)
        return self._served

    def _loaded(self) -> Scorer:
        scorer = self._load()
        check_model(scorer, self._served.scorer)
        return scorer


def _checked(name: str) -> str:
    """Return a name that can stand in a path of HTTP.

    Raises:
        ConfigError: It cannot.
    """
    if "/" in name or name in (".", "..") or not name.isprintable():
        raise ConfigError(
            f"name={name}: no request could call a model so, because its name is a part of a path: "
            "choose a name of printable letters without a slash"
        )
    return name
