"""Checkpoints of collections with dynamic tables, written and loaded as the trainer does."""

from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.stored_model import load_blocks, read_manifest


def write(path, collection, comm):
    shared = collection.shared
    info = {"updates": [shared.updates], "dynamic": shared.rows_of_stretches()}
    write_checkpoint(path, list(shared.blocks()), comm=comm, meta={}, manifest=info, parameters={})


def fill(path, collection):
    manifest = read_manifest(path)
    shared = collection.shared
    load_blocks(path, shared.blocks_to_load(manifest.dynamic, manifest.updates[0]))
    shared.loaded()
    shared.updates = manifest.updates[0]
