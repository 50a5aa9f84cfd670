"""A dict of modules whose names come from data: logs have columns called `items`, `type` or
`user.id`.

torch refuses such names, because submodules are attributes too (`module.items` is a method, a dot
separates a path). Here a module is found by its key, and in the state dict as
`<dict>.<name>.weight` with a slash for each dot of the name, but not as an attribute.
"""

from typing import Any

from torch import nn


class ModuleByName(nn.ModuleDict):
    """`torch.nn.ModuleDict` for any names without slashes."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, whatever its name."""
        modules: dict[str, nn.Module | None] = self._modules  # type: ignore[assignment]
        modules[key_of(name)] = module

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(key_of(name))

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(key_of(str(name)))


def key_of(name: str) -> str:
    """Return the form of a name in the state dict."""
    return name.replace(".", "/")
