"""Models against slow transcriptions of their papers' formulas, and against known faults.

A transcription is a function of the parameters and the inputs that follows the paper symbol by
symbol: loops over fields, pairs and columns, no trick. `check_model` compares outputs and all
gradients in float64. A fault is a second transcription, with a mistake that other implementations
made; it must differ, which shows that the comparison could fail.

    def paper(p, vectors_BFD):                     # p: parameters and buffers by name
        pairs = itertools.combinations(range(vectors_BFD.shape[1]), 2)
        return sum((vectors_BFD[:, i] * vectors_BFD[:, j]).sum(1) for i, j in pairs)

    check_model(PairSum(), paper, {"pairs counted twice": twice}, [random_vectors(5, 4, 3)])

Whole models get a collection of float64 tables and a batch:

    tables = tables_of({"a": 4, "b": 4})
    check_model(FM(tables, ...), paper, faults, [samples_of(["a", "b"], dense=2)])
    # in the transcription: pooled(p, batch, "a") is the pooled vector of feature a, [B, D]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recapp.sparse.keyed_jagged_tensor import Batch, KeyedJaggedTensor
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import EmbeddingBagConfig

Parameters = Mapping[str, Tensor]
Transcription = Callable[..., Any]
"""(parameters and buffers by name, *inputs) -> a tensor, or tensors by name."""

ROWS = 7
AGREES = 1e-9
"""The largest difference of a right transcription, relative to the largest entry."""
DIFFERS = 1e-3
"""The smallest difference of a fault, relative to the largest entry."""


def check_model(
    part: nn.Module,
    transcription: Transcription,
    faults: Mapping[str, Transcription],
    inputs: Sequence[Any],
    *,
    spread: float = 0.5,
) -> None:
    """Compare a model, or a part of one, with a transcription, and check that faults differ.

    Outputs are compared, and the gradients of a random sum of outputs with respect to all floating
    inputs and all parameters.

    Args:
        part: The module. Its parameters become float64 and are drawn anew, so that start values of
            zero or one hide nothing.
        transcription: The paper's formulas.
        faults: Transcriptions with a mistake, by what is wrong.
        inputs: The inputs of `part.forward`, e.g. tensors of float64 or a batch.
        spread: The standard deviation of the drawn parameters.
    """
    draw = torch.Generator().manual_seed(1)
    part.double()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.normal_(0, spread, generator=draw)
    own = _answer(lambda _, *given: part(*given), part, inputs, dict(part.named_parameters()))
    right = _answer(transcription, part, inputs)
    assert own.keys() == right.keys(), f"the outputs are {list(own)} and {list(right)}"
    for name, value in right.items():
        assert _difference(own[name], value) < AGREES, f"{name} is not the transcription's"
    unused = [name for name, value in right.items() if not value.abs().sum()]
    assert not unused, f"the test says nothing about {unused}, which are all zero"
    for what, fault in faults.items():
        wrong = _answer(fault, part, inputs)
        differences = [
            DIFFERS * 2 if name not in wrong else _difference(wrong[name], value)
            for name, value in right.items()
        ]
        assert max(differences) > DIFFERS, f"the comparison does not see this fault: {what}"


def _answer(
    function: Transcription,
    part: nn.Module,
    inputs: Sequence[Any],
    parameters: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return outputs and gradients by name."""
    if parameters is None:
        parameters = {n: p.detach().clone().requires_grad_() for n, p in part.named_parameters()}
    given = [x.detach().clone().requires_grad_() if _is_real(x) else x for x in inputs]
    outputs = function({**dict(part.named_buffers()), **parameters}, *given)
    if not isinstance(outputs, Mapping):
        outputs = {"output": outputs}
    draw = torch.Generator().manual_seed(2)
    total = sum(
        (x * torch.randn(x.shape, generator=draw, dtype=x.dtype)).sum() for x in outputs.values()
    )
    read = {f"gradient of input {i}": x for i, x in enumerate(given) if _is_real(x)}
    read |= {f"gradient of {name}": x for name, x in parameters.items()}
    gradients = torch.autograd.grad(total, list(read.values()), allow_unused=True)
    return {name: x.detach() for name, x in outputs.items()} | {
        name: torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(read.items(), gradients, strict=True)
    }


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest entry of the second."""
    if left.shape != right.shape:
        return float("inf")
    return float((left - right).abs().max() / right.abs().max().clamp(min=1e-30))


def random_vectors(*shape: int, seed: int = 3) -> Tensor:
    """Return normal numbers of float64, the same for the same seed."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tables_of(dims: Mapping[str, int], rows: int = ROWS) -> EmbeddingBagCollection:
    """Return float64 tables named like the features that read them.

    Args:
        dims: The columns of each table.
        rows: The rows of each table.
    """
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=[name],
                data_type="fp64",
            )
            for name, dim in dims.items()
        ]
    )


def samples_of(
    features: Sequence[str], dense: int = 0, samples: int = 6, rows: int = ROWS
) -> Batch:
    """Return samples with float64 numbers; all bags have one id, but some have none or two.

    Args:
        features: The names of the features.
        dense: The number of dense features.
        samples: The number of samples.
        rows: Ids are below this number.
    """
    draw = torch.Generator().manual_seed(4)
    lengths = torch.ones(len(features) * samples, dtype=torch.int64)
    lengths[0] = 2
    lengths[-1] = 0
    ids_L = torch.randint(rows, (int(lengths.sum()),), generator=draw)
    dense_BI = torch.randn(samples, dense, generator=draw, dtype=torch.float64)
    sparse = KeyedJaggedTensor(list(features), ids_L, lengths=lengths)
    return Batch(dense_BI, sparse, torch.ones(samples))


def pooled(
    parameters: Parameters, batch: Batch, feature: str, collection: str = "embedding_bag_collection"
) -> Tensor:
    """Return the sums of the vectors of a feature's ids, [B, D], one sample after the other.

    Args:
        parameters: Parameters by name.
        batch: The samples.
        feature: The feature, which is also the name of its table.
        collection: The path of the collection in the model.
    """
    weight = parameters[f"{collection}.embedding_bags.{feature}.weight"]
    bags = batch.sparse[feature]
    ids = iter(bags.values().tolist())
    sums = []
    for length in bags.lengths().tolist():
        total = weight.new_zeros(weight.shape[1])
        for _ in range(length):
            total = total + weight[next(ids)]
        sums.append(total)
    return torch.stack(sums)
