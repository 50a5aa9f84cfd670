"""Prepare the models of `bench inference` by training, export and loading, which only `cli` can do.
`recapp/benchmarks/scoring_speed.py` measures them.

    the command    shape -> logs, settings of recapp.train -> one rank -> checkpoint
    its worker     checkpoint -> export_model for each width -> artefacts
                   validation rows -> the raw rows that batches are cut from
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from recapp import console
from recapp.benchmarks import bench_worker, scoring_speed
from recapp.benchmarks.scoring_speed import Served
from recapp.benchmarks.session import Session
from recapp.benchmarks.workloads import ServedModel
from recapp.cli.job import Job, run_recipe
from recapp.cli.recipe_of_job import recipe_under
from recapp.cli.stored_recipe import recipe_of_stored
from recapp.dataset.raw_rows import RawTable
from recapp.dataset.sequential_rows import example_rows
from recapp.engine.read_only_store import like, values_of
from recapp.engine.sharded_collection import embedding_collections
from recapp.errors import ConfigError
from recapp.inference.build_cpp import build, missing_tools
from recapp.inference.export_settings import Export, Quantize
from recapp.inference.held_tables import mapped_tables
from recapp.inference.storage import values
from recapp.model_export import export_model
from recapp.model_loading import load_model
from recapp.run.model import model_to_shard
from recapp.run.recipe import Recipe
from recapp.run.run_rows import made_up_rows, validation_source, write_generated
from recapp.run.trained_model import with_columns_of
from recapp.settings.values import in_quotes
from recapp.stored.directories import is_artefact
from recapp.stored.stored_model import Artefact, open_artefact
from recapp.tables.collections import embedding_lookups

VALIDATION_SHARE = "7/8"  # of generated rows: batches need many rows, training needs few
MOST_ROWS = 1 << 16  # rows that batches are cut from, at most


def train_generated(model: ServedModel, folder: Path, job: Job) -> Path:
    """Write logs, train a DLRM on them for one step, and return its checkpoint.

    Args:
        model: The model, with the shapes of its tables.
        folder: The directory of logs and checkpoint.
        job: The job of the command.
    """
    recipe = recipe_under(
        "train",
        [
            "dataset=generated",
            f"dataset.path={in_quotes(folder / 'logs')}",
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
            "format=json",
        ],
    )
    write_generated(recipe.dataset)
    directory = folder / "run"
    directory.mkdir(parents=True)
    run_recipe(recipe, replace(job, directory=directory), "recapp.train")
    return directory / "checkpoints" / "last.ckpt"


def run(settings: dict[str, Any], job_dir: Path) -> None:
    """Measure the models of the settings. `bench_worker` writes records and pictures.

    Args:
        settings: The checked settings of `recapp.bench`, with the checkpoint or artefact of each
            model as `served`.
        job_dir: The directory of the records and pictures.
    """
    bench_worker.run(settings, job_dir, measure)


def measure(session: Session) -> None:
    """Measure every model of a session."""
    settings = session.settings
    program = cpp_program(session.folder / "cpp") if settings.compile else None
    for name, path in settings.served.items():
        served = served_model(
            name,
            Path(path),
            settings.quantize,
            settings.compile,
            session.folder,
            program,
        )
        scoring_speed.run(session, served)


def cpp_program(folder: Path) -> Path | None:
    """Build the C++ program. If that fails, print why and return None.

    Args:
        folder: The directory of the program.
    """
    missing = missing_tools()
    if missing:
        console.note(f"the C++ program is left out: {', '.join(missing)} is missing")
        return None
    console.note("building the C++ program (a minute) ...")
    try:
        return build(folder)
    except ConfigError as error:
        console.note(f"the C++ program is left out: {error}")
        return None


def served_model(
    name: str,
    path: Path,
    quantize: Sequence[Quantize],
    compiles: bool,
    folder: Path,
    program: Path | None,
) -> Served:
    """Return a model in every form that is measured.

    Args:
        name: The name of the model in records.
        path: A checkpoint or an artefact. An artefact is measured as it is.
        quantize: The ways to store the tables of a checkpoint.
        compiles: Whether to compile dense parts.
        folder: The directory of artefacts.
        program: The C++ program; None if it was not built.
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
    recipe = with_columns_of(recipe_of_stored(artefact.manifest), artefact)
    return Served(
        name,
        artefacts,
        _rows(recipe, model_to_shard(artefact, recipe)),
        load_model,
        _plain_model(artefact, recipe),
        program,
    )


def _storage_of(artefact: Artefact) -> str:
    """Return how the tables of an artefact are stored, in the words of `quantize`."""
    kinds = {t.storage for t in artefact.manifest.tables}
    return "none" if kinds == {"fp32"} else kinds.pop() if len(kinds) == 1 else "mixed"


def _rows(recipe: Recipe, model: nn.Module) -> RawTable:
    """Return the rows that batches are cut from."""
    schema = recipe.schema
    source = validation_source(recipe)
    if source is not None:
        return example_rows(source, schema, min(source.rows, MOST_ROWS))
    console.note("all batches repeat one made-up row, so its vectors stay in the caches")
    return made_up_rows(schema, embedding_lookups(model))


def _plain_model(artefact: Artefact, recipe: Recipe) -> nn.Module | None:
    """Return the model with tables of `torch.nn.EmbeddingBag` in floats. If a table is dynamic,
    print that and return None.
    """
    held = mapped_tables(artefact).tables
    model = model_to_shard(artefact, recipe)
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
