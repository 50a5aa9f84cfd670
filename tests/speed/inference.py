"""`inference`: how fast a trained model scores, beside the same model with tables of
`torch.nn.EmbeddingBag` in fp32 (the baseline of ratios) and beside TorchRec's DLRM after
quantize_embeddings, whose lookups are FBGEMM's inference kernels, in eager; `torchrec_tuned`: with
its allocator tuned. `torchrec_worker.py` gets the shapes of layers and tables, and the rows that
each batch looks up. recapp's own ways are those of `recapp.bench inference`; the costs to load an
artefact (`mapped_memory.py`) are in each row.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recapp.benchmarks.timing import ratio
from recapp.cli.stored_recipe import recipe_of_stored
from recapp.console import note
from recapp.engine.read_only_store import like, values_of
from recapp.engine.sharded_collection import embedding_collections
from recapp.inference.held_tables import mapped_tables, values
from recapp.inference_bench import (
    MOST_STEPS,
    StoredModel,
    cpp_program,
    latency,
    scoring,
    started,
    stored_models,
)
from recapp.model_loading import load_model
from recapp.models.published_dlrm import DLRM
from recapp.run.model import model_to_shard
from recapp.run.trained_model import with_columns_of
from recapp.sparse.keyed_jagged_tensor import Batch
from recapp.stored.stored_model import Artefact
from recapp.tables.collections import EmbeddingBagCollection
from recapp.tables.config import PoolingType

from .lab import Lab
from .mapped_memory import cost_of_loading
from .rivals import beside

BASELINE = "torch"


def run(lab: Lab) -> None:
    """Measure the model of the settings with every way to store its tables."""
    settings = lab.settings
    program = cpp_program(lab.folder / "cpp") if settings.compile else None
    plain = None
    for stored in stored_models(Path(settings.artefact), settings, lab.folder):
        plain = plain or plain_model(stored.path)
        loading = cost_of_loading(stored.path, load_model)
        with torchrec(lab, stored, plain) as others:
            for threads in settings.threads:
                with started(program, stored, threads) as process:
                    for of_size in stored.batches:
                        measure(lab, stored, of_size, threads, process, plain, others, loading)


def measure(lab, stored, of_size, threads, process, plain, others, loading):
    """Time all ways on batches of one size, and add a row for each."""
    for other in others.values():
        other.batches = str(of_size.size)
    ways = stored.contenders(of_size, process) | others
    if plain is not None:
        ways[BASELINE] = scoring(lambda batch: torch.sigmoid(plain(batch)), of_size.decoded)
    title = f"{stored.quantize}, batch {of_size.size}, threads: {threads}"
    measured = lab.measure(title, ways, MOST_STEPS, threads)
    rivals = {BASELINE: measured.get(BASELINE), **beside("torchrec", measured)}
    for way, times in measured.items():
        row = {"quantize": stored.quantize, "batch_size": of_size.size, "threads": threads}
        row |= {"way": way, **latency(times, of_size.size), **loading}
        for name, other in rivals.items():
            row |= ratio(name, other, times)
        lab.add(row)


def torchrec(lab: Lab, stored: StoredModel, plain: nn.Module | None) -> Any:
    """Return the context of TorchRec's contenders. It is empty, with a note, where TorchRec's DLRM
    cannot do the same work.
    """
    why = no_twin(plain)
    if lab.settings.torchrec_python is None or why or stored.quantize == "mixed":
        if why:
            note(f"not compared with TorchRec: {why}")
        return nullcontext({})
    files = {str(b.size): lab.folder / f"batches_{b.size}.npz" for b in stored.batches}
    for of_size in stored.batches:
        write_batches(plain, of_size.decoded, files[str(of_size.size)])
    return lab.rivals("torchrec", [torchrec_spec(plain, stored.quantize, files)])


def plain_model(path: Path) -> nn.Module | None:
    """Return the model of an artefact with tables of `torch.nn.EmbeddingBag` in floats. If a table
    is dynamic, print that and return None.
    """
    artefact = Artefact.at(path)
    model = model_to_shard(artefact, with_columns_of(recipe_of_stored(artefact.manifest), artefact))
    mapped = mapped_tables(artefact).tables
    for _, collection in embedding_collections(model):
        modules: Any = getattr(collection, collection.tables_of)
        for t in collection.tables():
            if t.dynamic is not None:
                note(f"table {t.name} is dynamic: there is no plain torch to compare with")
                return None
            table = mapped[t.name]
            raw = values_of(table.rows)[table.first_row : table.first_row + table.count]
            rows = values(like(table.rows, raw))
            modules[t.name].weight = nn.Parameter(rows, requires_grad=False)
    return model.eval().requires_grad_(False)


def no_twin(model: nn.Module | None) -> str:
    """Return why no DLRM of TorchRec does the same work as a model; empty where one does.

    Args:
        model: The model with its unsharded collection, or None.
    """
    if not isinstance(model, DLRM):
        return "the model is no DLRM of static tables"
    collection = model.embedding_bag_collection
    if not isinstance(collection, EmbeddingBagCollection) or model.bottom is None:
        return "the model has no bags or no dense features"
    lookups = collection.lookups
    if any(x.pooling is not PoolingType.SUM for x in lookups) or len(model.projections):
        return "some bags are not summed, or the tables have several widths"
    if len({x.feature for x in lookups}) < len(lookups) or collection.is_weighted():
        return "a feature reads several tables, or ids have weights"
    return ""


def torchrec_spec(model: Any, quantize: str, files: Mapping[str, Path]) -> dict[str, Any]:
    """Return the spec from which a process of TorchRec builds the twin of a model.

    Args:
        model: A DLRM with its unsharded collection; `no_twin` gives no reason against it.
        quantize: The way to store tables.
        files: The file of each list of batches.
    """
    collection = model.embedding_bag_collection
    read = {
        t.name: [x.feature for x in collection.lookups if x.table.name == t.name]
        for t in collection.tables()
    }
    return {
        "kind": "inference",
        "quantize": quantize,
        "tables": [
            (t.name, t.num_embeddings, t.embedding_dim, read[t.name]) for t in collection.tables()
        ],
        "features": [x.feature for x in collection.lookups],
        "model": {
            "dense": model.dense_in_features,
            "bottom": _widths(model.bottom),
            "top": _widths(model.top),
        },
        "batches": {name: str(path) for name, path in files.items()},
    }


def write_batches(model: Any, batches: Sequence[Batch], path: Path) -> None:
    """Write the numbers and the rows of batches to a file.

    Args:
        model: The model of `torchrec_spec`.
        batches: The batches, all of one size.
        path: The file.
    """
    found = [model.embedding_bag_collection.id_rules(batch.sparse) for batch in batches]
    np.savez(
        path,
        ids=torch.cat([rows.rows_L.long() for rows in found]).numpy(),
        ids_of_batch=np.array([len(rows.rows_L) for rows in found]),
        lengths=torch.stack([rows.lengths_FB.reshape(-1).int() for rows in found]).numpy(),
        dense=torch.stack([batch.dense_BI for batch in batches]).numpy(),
    )


def _widths(layers: nn.Module) -> list[int]:
    return [m.out_features for m in layers.modules() if isinstance(m, nn.Linear)]
