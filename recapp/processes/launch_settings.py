"""The settings for starting ranks: the group `launch`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from recapp.settings.values import Timeout, Within


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """The group `launch`.

    Args:
        start_method: The way to start a rank's process.
        port: The port at which ranks meet; 0 takes a free one.
        grace: Seconds in which ranks may save after a signal.
        timeout: Seconds after which a rank that waits for another one gives up.
    """

    start_method: Literal["auto", "forkserver", "spawn"] = "auto"
    port: Annotated[int, Within(0, 65535)] = 0
    grace: Annotated[float, Within(0, 31_536_000)] = 60
    timeout: Timeout = 1800
