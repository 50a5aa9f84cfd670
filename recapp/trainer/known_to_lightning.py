"""recapp as Lightning knows it, where both are imported: a strategy's name, and a reader.

    Trainer(strategy="recapp")                       EmbeddingShardingStrategy()
    Trainer().validate(module, ckpt_path=DIR)        a plain Trainer reads a checkpoint of shards
    Module.load_from_checkpoint(DIR)

Lightning finds no strategy of another package by itself, and reads a checkpoint as one file. So
`import recapp`, and each public name that is loaded, adds both to a Lightning that is there. This
file imports neither torch nor Lightning.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

NAME = "recapp"
# The modules of Lightning that hold its reader of checkpoint files, as `pl_load`.
_READERS = ("lightning.pytorch.core.saving", "lightning.fabric.plugins.io.torch_io")


def make_known() -> None:
    """Add the strategy's name and the reader to Lightning, if it is imported and has not got
    them.
    """
    if not hasattr(sys.modules.get("lightning.pytorch"), "Trainer"):
        return
    registry: Any = vars(sys.modules["lightning.pytorch.strategies"])["StrategyRegistry"]
    if NAME in registry:
        return
    # by name: an import would make every test reach the strategy, as they all import recapp
    registry.register(
        NAME,
        lambda **settings: import_module("recapp.trainer.strategy").EmbeddingShardingStrategy(
            **settings
        ),
        description="tables are sharded, the rest is DDP",
    )
    for path in _READERS:
        module = sys.modules[path]
        vars(module)["pl_load"] = _reader(vars(module)["pl_load"])


def _reader(lightnings: Callable[..., Any]) -> Callable[..., Any]:
    def read(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        stored = import_module("recapp.trainer.sharded_checkpoint")
        checkpoint = stored.read_for_lightning(path_or_url, map_location)
        return (
            lightnings(path_or_url, map_location, weights_only)
            if checkpoint is None
            else checkpoint
        )

    return read
