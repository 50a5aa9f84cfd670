"""Functions that torch.compile leaves out of its graphs: it breaks the graph there.

Messages and compiled kernels cannot be part of a graph. torch's own decorator would import the
compiler, which takes seconds, in every process that looks rows up.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Forward = TypeVar("Forward", bound=Callable[..., Any])


def outside_graphs(function: Forward) -> Forward:
    """Return a function that torch.compile does not compile, nor anything that it calls."""
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    vars(call)["_torchdynamo_disable"] = True  # what the compiler asks of a function that it meets
    return call  # type: ignore[return-value]
