"""TorchRec's classes around a model for inference: the factory that makes the model, and the module
that a server calls.

recapp's own servers need neither (`python -m recapp.export`, `python -m recapp.serve`). The classes
are for programs with their own server.
"""

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class BatchingMetadata:
    """Describes the batching of one input of requests.

    Args:
        type: The kind of the input, such as "dense" or "sparse".
        device: "cpu" or "cuda".
        pinned: The suffixes of the tensors in page-locked memory; "" for all.
    """

    type: str
    device: str
    pinned: list[str]


@dataclass
class QualNameMetadata:
    """Describes the call of a method of the model.

    Args:
        need_preproc: Whether the input needs preprocessing.
    """

    need_preproc: bool


class PredictFactory(ABC):
    """Makes a model for inference, and describes its requests and answers."""

    @abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model with its weights, sharded if there are several ranks."""

    @abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return the batching of requests, by the name of the input."""

    @abstractmethod
    def result_metadata(self) -> str:
        """Return the kind of the model's output, by which a server splits it into answers."""

    @abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that need no weights. The name is TorchRec's."""

    @abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after transformations that need its weights."""

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata()` as JSON."""
        return _json(self.batching_metadata())

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return the descriptions of the model's methods, by name."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata()` as JSON."""
        return _json(self.qualname_metadata())

    def model_inputs_data(self) -> dict[str, Any]:
        """Return the data from which a benchmark makes inputs."""
        return {}


class PredictModule(nn.Module, ABC):
    """Wraps a model for calls with a dict of tensors; a subclass implements `predict_forward`.

    Args:
        module: The model; the constructor puts it into evaluation mode.
        device: The device of the inputs; None takes the current GPU, or the CPU if there is none.
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
        """Return the device of the inputs."""
        if self._device is not None:
            return self._device
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Call the model with a batch, and return its output as a dict of tensors."""

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Return the output for a batch, in inference mode."""
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model, without a prefix in its names."""
        return self._module.state_dict(*args, **kwargs)


def _json(metadata: dict[str, Any]) -> str:
    return json.dumps({name: asdict(value) for name, value in metadata.items()})
