"""The models that `bench inference` measures, made ready: a generated one is trained for a step, a
checkpoint becomes an artefact for each way to store its tables.

    shape -> logs, settings of recapp.train -> one rank -> checkpoint      (`train_generated`)
    checkpoint -> export_model, width by width -> artefacts                (`served_model`)
    validation rows -> the raw rows that batches are cut from
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from recapp import console
from recapp.app.artefact_model import model_to_shard
from recapp.app.build import write_generated
from recapp.app.chosen_options import command_settings
from recapp.app.command import Job, run_on_ranks
from recapp.app.export_model import Export, export_model
from recapp.app.load_artefact import settings_of_artefact
from recapp.app.load_model import load_model
from recapp.app.validation_rows import made_up_rows, validation_source
from recapp.benchmarks.models import ServedModel
from recapp.benchmarks.scoring_speed import Served
from recapp.dataset.example_rows import example_rows
from recapp.dataset.raw_rows import RawTable
from recapp.dataset.schema import schema_from
from recapp.engine.read_only_store import like, values_of
from recapp.engine.shard_model import embedding_collections
from recapp.inference.mapped_rows import mapped_tables
from recapp.inference.storage import values
from recapp.stored.directories import is_artefact
from recapp.stored.snapshot import Artefact
from recapp.stored.stored_model import open_artefact
from recapp.tables.collections import embedding_lookups

VALIDATION_SHARE = "7/8"  # of generated rows: batches are cut from them, and training needs few
MOST_ROWS = 1 << 16  # that batches are cut from


def train_generated(model: ServedModel, folder: Path, job: Job) -> Path:
    """Write logs, train a DLRM on them for one step, and return its checkpoint.

    Args:
        model: The shape of its tables.
        folder: Where logs and checkpoint are written.
        job: The job of the command.
    """
    settings = command_settings(
        "train",
        [
            "dataset=generated",
            f"dataset.path={folder / 'logs'}",
            f"dataset.table_rows=[{','.join(map(str, model.sizes))}]",
            f"dataset.generate.rows={model.rows}",
            f"dataset.val_share={VALIDATION_SHARE}",
            f"tables.dim={model.dim}",
            "trainer.max_steps=1",
            "trainer.devices=1",
            "trainer.accelerator=cpu",
            "trainer.limit_val_batches=1",
            "trainer.enable_progress_bar=false",
            "logger=none",
            "callbacks=none",
        ],
    ) | {"format": "json"}
    write_generated(settings["dataset"])
    directory = folder / "run"
    directory.mkdir(parents=True)
    run_on_ranks(settings, replace(job, directory=directory), "recapp.worker")
    return directory / "checkpoints" / "last.ckpt"


def served_model(
    name: str,
    path: Path,
    quantize: Sequence[str],
    compiles: bool,
    folder: Path,
    program: Path | None,
) -> Served:
    """Return a model as it is measured.

    Args:
        name: What it is called in records.
        path: A checkpoint, or an artefact, which is measured as it is.
        quantize: How its tables are to be stored, one after the other.
        compiles: Whether dense parts are compiled.
        folder: Where artefacts are written.
        program: The C++ program; None where it is not built.
    """
    artefacts = {}
    if is_artefact(path):
        artefacts[_storage_of(open_artefact(path))] = path
    else:
        for width in quantize:
            options = Export(quantize=width, report_rows=0, compile=compiles, name=name)
            artefacts[width] = folder / f"{name}_{width}"
            export_model(path, artefacts[width], options)
    artefact = open_artefact(next(iter(artefacts.values())))
    settings = settings_of_artefact(artefact.manifest)
    return Served(
        name,
        artefacts,
        _rows(settings, model_to_shard(artefact, settings)),
        load_model,
        _plain_model(artefact, settings),
        program,
    )


def _storage_of(artefact: Artefact) -> str:
    """Return how the tables of an artefact are stored, as settings call it."""
    kinds = {t.storage for t in artefact.manifest.tables}
    return "none" if kinds == {"fp32"} else kinds.pop() if len(kinds) == 1 else "mixed"


def _rows(settings: Mapping[str, Any], model: nn.Module) -> RawTable:
    """Return the rows that batches are cut from."""
    schema = schema_from(settings)
    source = validation_source(settings)
    if source is not None:
        return example_rows(source, schema, min(source.rows, MOST_ROWS))
    console.note("so every row is one and the same, whose vectors stay in the caches")
    return made_up_rows(schema, {x.feature: x.table for x in embedding_lookups(model)})


def _plain_model(artefact: Artefact, settings: dict[str, Any]) -> nn.Module | None:
    """Return the model with tables of `torch.nn.EmbeddingBag` in floats; None where it has tables
    that grew, which is noted.
    """
    held = mapped_tables(artefact).tables
    model = model_to_shard(artefact, settings)
    for _, collection in embedding_collections(model):
        modules: Any = getattr(collection, collection.tables_of)
        for t in collection.tables():
            if t.dynamic is not None:
                console.note(f"table {t.name} is dynamic: there is no plain torch to compare with")
                return None
            own = held[t.name]
            raw = values_of(own.rows)[own.first_row : own.first_row + own.count]
            rows = values(like(own.rows, raw))
            modules[t.name].weight = nn.Parameter(rows, requires_grad=False)
    return model.eval().requires_grad_(False)
