"""The verb `recapp.plan devices`: the number of devices that tables need for serving."""

from dataclasses import replace
from typing import Any

from recapp import console
from recapp.cli.job import Job
from recapp.cli.stored_recipe import recipe_of_stored
from recapp.inference.choose_storage import storage_of
from recapp.inference.storage import QUANTIZE
from recapp.planner.serving import fewest_ranks, stored_as
from recapp.planner.topology import Topology
from recapp.run.commands import OnPaper
from recapp.run.model import meta_model
from recapp.run.plan_of_run import problem_on_paper
from recapp.stored.stored_model import open_artefact
from recapp.tables.collections import embedding_lookups, embedding_tables
from recapp.tables.config import EmbeddingConfig
from recapp.tables.lookups import TableLookup

COLUMNS = (
    console.Column("quantize", "tables\nstored as"),
    console.Column("bytes", "all tables,\nMB", ",.1f", 1e6),
    console.Column("devices", "fewest\ndevices"),
    console.Column("largest", "fullest\ndevice, MB", ",.1f", 1e6),
    console.Column("types", "how they are cut"),
)


def devices(recipe: OnPaper, job: Job) -> None:
    """Print the fewest devices on which the tables fit, for each width or, with `path`, as an
    artefact stores them.
    """
    problem = problem_on_paper(recipe)
    topology = problem.topology
    if recipe.path is None:
        ways = {q: {t.name: str(storage_of(t, q)) for t in problem.tables} for q in QUANTIZE}
        tables = list(problem.tables)
        lookups = list(problem.lookups)
    else:
        tables, lookups = _tables_of(recipe.path)
        ways = {"stored": {}}
    rows = [_row(name, tables, lookups, topology, ways[name]) for name in ways]
    memory = topology.memory_bytes
    if recipe.format == "json":
        console.emit_document({"rows": rows, "memory_bytes": memory and memory[0]})
        return
    assert memory is not None
    free = (memory[0] - topology.reserve_bytes) / 1e6
    title = f"Tables that are only read, on devices with {free:,.1f} MB for them"
    console.print_table(rows, COLUMNS, title=title)


def _tables_of(path: str) -> tuple[list[EmbeddingConfig], list[TableLookup]]:
    """Return the tables of an artefact and their lookups. Dynamic tables have their stored rows."""
    artefact = open_artefact(path).manifest
    model = meta_model(artefact, recipe_of_stored(artefact))
    count = {t.name: max(t.rows, 1) for t in artefact.tables}
    tables = {
        t.name: t if t.dynamic is None else replace(t, num_embeddings=count[t.name], dynamic=None)
        for t in embedding_tables(model)
    }
    read = [replace(x, table=tables[x.table.name]) for x in embedding_lookups(model)]
    return list(tables.values()), read


def _row(
    name: str,
    tables: list[EmbeddingConfig],
    lookups: list[TableLookup],
    topology: Topology,
    data_types: dict[str, str],
) -> dict[str, Any]:
    fit = fewest_ranks(*stored_as(tables, lookups, data_types), topology)
    types = [s.sharding_type for s in fit.plan.tables.values()]
    return {
        "quantize": name,
        "bytes": fit.bytes,
        "devices": fit.ranks,
        "largest": fit.largest,
        "types": ", ".join(f"{types.count(t)} {t}" for t in dict.fromkeys(types)),
    }
