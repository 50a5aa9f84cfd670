"""Compile the dense part to machine code: `torch.export`, then AOTInductor.

    dense_BI, vectors of each collection --DenseOnly--> outputs, each [B]

The dense part is a function of tensors: a stand-in replaces each collection of tables and returns
vectors that were looked up before. They come from the engine or from the C++ program.

A `.pt2` file holds a shared library. Loading it runs code, so it is loaded only with
`trust_compiled=true`. Without that setting, or if this machine lacks an instruction or has another
torch version, the model's own modules compute (the portable part).

The target is x86-64-v3 (AVX2, FMA), which any server CPU since 2013 has. So the machine that
exports may be newer than the machine that serves.
"""

import copy
import logging
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recapp.engine.sharded_collection import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    sharded_collections,
)
from recapp.errors import ConfigError
from recapp.processes.faults import fault_of_compiler
from recapp.sparse.jagged_tensor import JaggedTensor, KeyedTensor
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.plain_parts import is_a
from recapp.stored.stored_model import Artefact
from recapp.tasks.task import Task

COMPILED = "compiled/dense.pt2"
X86 = "x86_64"
# The CPU flags of x86-64-v3, in the names of Linux.
FLAGS_OF_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
# What loading needs of the manifest's entry.
ENTRY = {"file": str, "torch": str, "machine": str, "flags": list[str], "outputs": list[str]}
# The tolerance between a compiled output and the modules' output, relative to max(1, |output|).
BOUND = 1e-5


class NotCompiled(Exception):
    """The reason why a dense part is not compiled, or why its code is not loaded."""


class DenseInput(NamedTuple):
    """The inputs of the dense part from one collection.

    Args:
        outputs: The output names of the collection's lookups.
        columns: The columns of the vectors of each lookup.
        pooled: Whether the input is one matrix [B, sum of columns]; if not, there are vectors [L,
            D] and lengths [B] for each lookup.
    """

    outputs: tuple[str, ...]
    columns: tuple[int, ...]
    pooled: bool

    @property
    def tensors(self) -> int:
        """Return the number of input tensors."""
        return 1 if self.pooled else 2 * len(self.outputs)


class _Given(nn.Module):
    """Stand in for a collection, and return the vectors that were assigned before."""

    def __init__(self, collection: ShardedCollection) -> None:
        super().__init__()
        self.lookups = tuple(collection.lookups)
        columns = tuple(x.columns or x.dim for x in self.lookups)
        pooled = isinstance(collection, ShardedEmbeddingBagCollection)
        self.spec = DenseInput(tuple(x.output for x in self.lookups), columns, pooled)
        self.vectors: list[Tensor] = []
        self.features: object = None

    def forward(self, features: object) -> Any:
        if features is not self.features:
            raise ConfigError(
                "the model looks up other ids than those of its batch, so its dense part cannot be "
                "compiled"
            )
        if self.spec.pooled:
            return KeyedTensor(self.spec.outputs, self.spec.columns, self.vectors[0])
        return {
            name: JaggedTensor.unchecked(values_LD, None, lengths_B)
            for name, values_LD, lengths_B in zip(
                self.spec.outputs, self.vectors[::2], self.vectors[1::2], strict=True
            )
        }


class DenseOnly(nn.Module):
    """A copy of a model without tables.

    Args:
        model: The model, with sharded collections; it is not changed.
        task: Names the outputs of the model.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.task = task
        collections = sharded_collections(model)
        memo: dict[int, Any] = {id(c): _Given(c) for c in collections}
        self.model = copy.deepcopy(model, memo)
        self._sources = [memo[id(c)] for c in collections]

    @property
    def inputs(self) -> list[DenseInput]:
        """Return the inputs from each collection, in order."""
        return [source.spec for source in self._sources]

    def forward(self, dense_BI: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of a batch in the task's order, each [B].

        Args:
            dense_BI: The dense features of the batch.
            vectors: The tensors of all collections, one collection after the other (`Input`).
        """
        batch = SimpleNamespace(dense_BI=dense_BI, sparse=object(), rows=dense_BI.shape[0])
        left = list(vectors)
        for source in self._sources:
            source.vectors = left[: source.spec.tensors]
            source.features = batch.sparse
            del left[: source.spec.tensors]
        outputs = self.task.picked(self.model(batch), type(self.model).__name__)
        for source in self._sources:
            source.vectors = []
        return tuple(outputs.values())


def looked_up(collections: Sequence[ShardedCollection], batch: Batch) -> list[Tensor]:
    """Look up a batch, and return the inputs of the dense part, one collection after the other.

    The matrices are contiguous, because collections leave no space beside their vectors.
    """
    tensors: list[Tensor] = []
    for collection in collections:
        vectors = collection(batch.sparse)
        if isinstance(vectors, KeyedTensor):
            tensors.append(vectors.values())
        else:
            for jagged in vectors.values():
                tensors += [jagged.values(), jagged.lengths()]
    return tensors


class CompiledModel(nn.Module):
    """A model whose dense part is machine code.

    Args:
        portable: The model, whose tables do the lookups.
        code: The loaded package.
        names: The outputs of the package, in order.
    """

    def __init__(self, portable: nn.Module, code: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.portable = portable
        self.collections = sharded_collections(portable)
        for collection in self.collections:
            if isinstance(collection, ShardedEmbeddingBagCollection):
                collection.leave_room(0)
        self._code: Callable[..., Any] = code
        self._names = names

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of a batch by name, each [B]."""
        vectors = looked_up(self.collections, batch)
        if not batch.rows:
            return dict.fromkeys(self._names, batch.dense_BI.new_zeros(0))
        outputs = self._code(batch.dense_BI, *vectors)
        return dict(zip(self._names, outputs, strict=True))


def compile_dense(model: nn.Module, task: Task, dense: int) -> tuple[bytes, dict[str, Any]]:
    """Compile the dense part of a model on the CPU.

    Args:
        model: The model, with sharded collections, in evaluation mode.
        task: Names the outputs of the model.
        dense: The number of dense features of a sample.

    Returns:
        The package, and its entry for the manifest.

    Raises:
        NotCompiled: The collections have different dtypes, there is no compiler, TMPDIR has
            blanks, or torch cannot export the model; the text gives the reason.
    """
    dtype, *others = dict.fromkeys(c.shared.dtype for c in sharded_collections(model))
    if others:
        both = f"{dtype} and {others[0]}".replace("torch.", "")
        raise NotCompiled(
            f"its collections compute in {both}, and compiled code takes vectors of one type: "
            "give the tables of all collections one data_type"
        )
    if fault := fault_of_compiler():
        raise NotCompiled(fault)
    machine = platform.machine()
    if machine == X86 and (lacking := _lacking(FLAGS_OF_V3)):
        raise NotCompiled(f"this CPU lacks {', '.join(lacking)}, which the compiled code needs")
    part = DenseOnly(model, task).eval()
    inputs, sizes = _example_inputs(part.inputs, dense, dtype)
    native = {"cpp.simdlen": 256, "cpp.march": "x86-64-v3"} if machine == X86 else {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), _quiet():
        try:
            program = torch.export.export(part, tuple(inputs), dynamic_shapes=sizes, strict=False)
            package = torch._inductor.aoti_compile_and_package(
                program, package_path=str(Path(folder) / "dense.pt2"), inductor_configs=native
            )
        except Exception as error:  # torch lets any exception of its passes through
            lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
            raise NotCompiled(f"{type(error).__name__}: {' '.join(lines)[:200]}") from error
        raw = Path(package).read_bytes()
    return raw, {
        "file": COMPILED,
        "torch": _release(torch.__version__),
        "machine": machine,
        "flags": list(FLAGS_OF_V3) if machine == X86 else [],
        "dense": dense,
        "dtype": str(dtype).removeprefix("torch."),
        "inputs": [
            {"outputs": list(x.outputs), "columns": list(x.columns), "pooled": x.pooled}
            for x in part.inputs
        ],
        "outputs": [output.name for output in task.outputs],
    }


def load_compiled(artefact: Artefact, entry: Mapping[str, Any], model: nn.Module) -> CompiledModel:
    """Return a model with its compiled dense part. This runs the code of the artefact, so the
    caller must trust the artefact.

    Args:
        artefact: The artefact.
        entry: The entry of the package in its manifest.
        model: The model, with its tables sharded on the CPU.

    Raises:
        NotCompiled: The package was compiled for another machine or torch, or cannot be loaded.
        ArtefactError: The package is damaged.
    """
    for name, kind in ENTRY.items():
        if not is_a(entry.get(name), kind):
            raise artefact.manifest.damaged(f"compiled: {name!r}")
    if (machine := entry["machine"]) != platform.machine():
        raise NotCompiled(f"it is code for {machine}, and this machine is {platform.machine()}")
    if lacking := _lacking(entry["flags"]):
        raise NotCompiled(f"it needs {', '.join(lacking)}, which this CPU lacks")
    if entry["torch"] != _release(torch.__version__):
        raise NotCompiled(
            f"it was compiled with torch {entry['torch']}, and this is {torch.__version__}"
        )
    artefact.check(entry["file"])
    with _quiet():
        try:
            code = torch._inductor.aoti_load_package(str(artefact.manifest.folder / entry["file"]))
        except RuntimeError as error:  # a full disk, a missing library, or not a package
            why = " ".join(str(error).split())
            raise NotCompiled(f"it cannot be loaded here: {why[:200]}") from error
    return CompiledModel(model, code, entry["outputs"])


def check_compiled(compiled: CompiledModel, outputs: Mapping[str, Tensor], batch: Batch) -> float:
    """Compare the outputs of the compiled model with those of the modules; return the largest
    difference.

    Args:
        compiled: The compiled model.
        outputs: The outputs that the modules have computed, by name.
        batch: The batch of the outputs.

    Raises:
        NotCompiled: They differ by more than `BOUND`.
    """
    worst = 0.0
    with torch.no_grad():
        again = compiled(batch)
    for name, output in outputs.items():
        apart = (again[name].double() - output.double()).abs() / output.double().abs().clamp(min=1)
        if len(apart) and not (worst := max(worst, float(apart.max()))) <= BOUND:
            raise NotCompiled(f"its {name} differs by {worst:.2g}, more than {BOUND:g}")
    return worst


def _example_inputs(
    inputs: Sequence[DenseInput], dense: int, dtype: torch.dtype
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return example tensors of a batch of four samples, with a few ids for each sequence, and
    their dynamic dimensions as `torch.export` takes them.
    """
    samples = torch.export.Dim("B", min=1)
    tensors: list[Tensor] = []
    sizes: list[dict[int, Any]] = []
    for spec in inputs:
        if spec.pooled:
            tensors.append(torch.zeros(4, sum(spec.columns), dtype=dtype))
            sizes.append({0: samples})
            continue
        for width in spec.columns:
            tensors += [torch.zeros(6, width, dtype=dtype), torch.tensor([1, 2, 0, 3])]
            sizes += [{0: torch.export.Dim(f"L{len(sizes)}", min=0)}, {0: samples}]
    return [torch.zeros(4, dense), *tensors], ({0: samples}, tuple(sizes))


def _lacking(flags: tuple[str, ...] | list[str]) -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return list(flags)
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    have = set(lines[0].partition(":")[2].split()) if lines else set()
    return [flag for flag in flags if flag not in have]


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("torch", "torch.export", "torch._inductor")]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)
