"""TorchRec's classes around a model that answers requests: who makes it, and how it is called.

recapp's own servers need neither (`python -m recapp.export`, `python -m recapp.serve`); these are
for programs that call what they made themselves.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class BatchingMetadata:
    """How requests of one input are put together.

    Args:
        type: The kind of the input, such as "dense" or "sparse".
        device: "cpu" or "cuda".
        pinned: Suffixes of tensors that lie in page-locked memory; "" for all.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """How a method of the model is called.

    Args:
        need_preproc: Whether its input is prepared first.
    """

    need_preproc: bool


class PredictFactory(ABC):
    """Makes a model that answers requests, and says of what form they are."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model with its weights; sharded, where there are several ranks."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return how requests are put together, by the name of the input."""

    @abstractmethod
    def result_metadata(self) -> str:
        """Return the kind of the answer, by which it is split into those of requests."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model changed in ways that need no weights. The name is TorchRec's."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model changed in ways that need its weights."""

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata()` as JSON."""
        return _json(self.batching_metadata())

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return how methods of the model are called, by their names."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata()` as JSON."""
        return _json(self.qualname_metadata())

    def model_inputs_data(self) -> dict[str, Any]:
        """Return what is needed to make inputs for a measurement."""
        return {}


class PredictModule(nn.Module, ABC):
    """A model and how it is called with a dict of tensors: override `predict_forward`.

    Args:
        module: The model; it is put into evaluation mode.
        device: The device of calls; None takes the current GPU, or the CPU where there is none.
    """

    def __init__(self, module: nn.Module, device: str | torch.device | None = None) -> None:
        super().__init__()
        self._module = module.eval()
        self._device = None if device is None else torch.device(device)

    @property
    def predict_module(self) -> nn.Module:
        """Return the model."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Return the device of calls."""
        if self._device is not None:
            return self._device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Call the model with a batch, and return its answer as a dict of tensors."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the answer to a batch; nothing is recorded for gradients."""
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model, under its own names."""
        return self._module.state_dict(*args, **kwargs)


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps({name: asdict(value) for name, value in metadata.items()})
