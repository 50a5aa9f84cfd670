"""Checkpoints of collections with dynamic tables, written and loaded as the trainer does."""

from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.stored_model import load_blocks, read_manifest


def write(path, collection, comm):
    shared = collection.shared
    info = {"updates": [shared.updates], "dynamic": shared.rows_of_stretches()}
    write_checkpoint(path, list(shared.blocks()), comm=comm, meta={}, manifest=info, parameters={})


def fill(path, collection, table=None):
    """Load a checkpoint, of a table alone or of all tables."""
    manifest = read_manifest(path)
    shared = collection.shared
    counts = {t: n for t, n in manifest.dynamic.items() if table in (None, t)}
    load_blocks(path, shared.blocks_to_load(counts, manifest.updates[0], table))
    shared.loaded()
    shared.updates = manifest.updates[0]
