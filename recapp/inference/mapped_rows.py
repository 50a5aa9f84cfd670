"""Map the row files of an artefact into memory: pages are read on first use, and processes share
them.
"""

import mmap

import torch
from torch import Tensor

from recapp.engine.read_only_store import Held
from recapp.inference.held_tables import HeldTable, HeldTables
from recapp.inference.storage import held, row_bytes
from recapp.stored.model_manifests import StoredTable
from recapp.stored.stored_model import Artefact


def mapped_tables(artefact: Artefact) -> HeldTables:
    """Return the tables of an artefact.

    Raises:
        ArtefactError: A file is missing, smaller than its tables, or of another data type.
    """
    raw = {file: _map(artefact, file) for file in _files_of(artefact)}
    rows: dict[str, Held] = {}
    keys: dict[str, Tensor] = {}
    tables = {}
    kinds: dict[str, tuple[object, ...]] = {}
    for t in artefact.manifest.tables:
        kind = (t.storage, t.dim, t.keys)
        if kinds.setdefault(t.file, kind) != kind:
            raise artefact.damaged(f"table {t.name} is not stored as the other tables of {t.file}")
        if t.file not in rows:
            rows[t.file] = _rows(artefact, t, raw[t.file])
        end = t.first_row + t.rows
        if len(raw[t.file]) < end * row_bytes(t.data_type, t.dim):
            raise artefact.damaged(f"table {t.name} has rows that {t.file} has not")
        if t.keys is not None:
            if t.keys not in keys:
                keys[t.keys] = _keys(artefact, t.keys, raw[t.keys])
            if len(keys[t.keys]) < end:
                raise artefact.damaged(f"table {t.name} has keys that {t.keys} has not")
        tables[t.name] = HeldTable(
            t.data_type,
            t.dim,
            rows[t.file],
            t.first_row,
            t.rows,
            None if t.keys is None else keys[t.keys],
            t.start_hash,
            t.start_range,
        )
    return HeldTables(tables)


def _files_of(artefact: Artefact) -> list[str]:
    files = {
        file for t in artefact.manifest.tables for file in (t.file, t.keys) if file is not None
    }
    return sorted(files)


def _rows(artefact: Artefact, table: StoredTable, raw: Tensor) -> Held:
    """Return all rows of a table's file."""
    width = row_bytes(table.data_type, table.dim)
    if len(raw) % width:
        raise artefact.damaged(f"{table.file} has no whole number of rows of table {table.name}")
    return held(raw.view(-1, width), table.data_type, table.dim)


def _keys(artefact: Artefact, file: str, raw: Tensor) -> Tensor:
    """Return the positions of all keys of a file."""
    if len(raw) % torch.int64.itemsize:
        raise artefact.damaged(f"{file} has no whole number of keys")
    return raw.view(torch.int64)


def _map(artefact: Artefact, file: str) -> Tensor:
    """Return the bytes of a file as a mapped tensor."""
    if not artefact.manifest.files[file]["bytes"]:
        return torch.empty(0, dtype=torch.uint8)
    # a private map is writable; torch requires writable memory
    mapped = mmap.mmap(artefact.opened(file).fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)
