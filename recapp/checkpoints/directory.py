"""A checkpoint is a directory of logical tables: it loads under any plan and on any number of ranks, and nothing in it is run as code.

    best.ckpt/
      manifest.json             written last; config, plan, schema, metrics, position, and per stored block: table, tensor, rectangle,
                                dtype, file, byte range, checksum
      meta.pt                   the dense part and Lightning's state, plain types (torch.load with weights_only=True)
      rank-00000.safetensors    blocks of the tables and of their optimiser state, as rank 0 held them
      rank-00001.safetensors

A save goes to `best.ckpt.tmp` and takes its name when it is whole. An earlier checkpoint of that name is moved to `best.ckpt.old` for the
moment between two renames; whoever is killed right there loses nothing, because readers look there too and the next save moves it back.
Saving is for all ranks together; loading is each rank's own business. What is loaded has been compared with its checksum.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from recapp.checkpoints.block_files import check_bytes, fill_blocks, write_blocks
from recapp.checkpoints.manifest import Manifest, from_json, to_json
from recapp.checkpoints.plain import plain
from recapp.checkpoints.rectangles import Stored, check_tiling
from recapp.distributed.comm import Comm
from recapp.errors import CheckpointError, RankError, suggest
from recapp.sharding.layout import Block

MANIFEST, META = "manifest.json", "meta.pt"
T = TypeVar("T")


# ---- writing


def write_checkpoint(path: str | Path, blocks: Iterable[Block], *, comm: Comm, meta: Mapping[str, Any],
                     manifest: Mapping[str, Any]) -> None:
    """Save the tables of all ranks and what else belongs to a checkpoint. Every rank calls it; all return or all raise.

    Args:
        path: the directory to make; one file system for all ranks. A checkpoint of that name is replaced.
        blocks: what this rank holds; of several copies the owner's is written.
        comm: the ranks.
        meta: of rank 0; anything that `plain` can make plain.
        manifest: of rank 0; the same, and no tensors but numbers. Keys of the format itself are taken.

    Raises:
        CheckpointError: it could not be written, or the blocks do not cover their tables; what was there before is untouched.
        RankError: another rank could not write.
    """
    path = Path(path).absolute()
    unfinished = _beside(path, "tmp")
    first = comm.rank == 0
    try:
        _together(comm, path, lambda: _prepare(path, unfinished) if first else None)
        written = _together(comm, path, lambda: write_blocks(unfinished, f"rank-{comm.rank:05d}.safetensors", blocks))
        stored = [s for of_rank in written for s in of_rank]
        _together(comm, path, lambda: _finish(path, unfinished, stored, meta, manifest) if first else None)
    except Exception:
        if first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _together(comm: Comm, path: Path, do: Callable[[], T]) -> list[T]:
    """Do something on every rank and learn every rank's outcome: nobody waits for a rank that has failed."""
    mine: T | None = None
    failure: Exception | None = None
    try:
        mine = do()
    except OSError as error:
        failure = CheckpointError(f"{path} could not be written: {error.strerror or error}")
        failure.__cause__ = error
    except Exception as error:
        failure = error
    outcomes = comm.gather((mine, failure and f"{type(failure).__name__}: {failure}"))
    if failure:
        raise failure
    for rank, (_, said) in enumerate(outcomes):
        if said:
            raise RankError(f"rank {rank} could not write {path}: {said}")
    return [outcome for outcome, _ in outcomes]


def _prepare(path: Path, unfinished: Path) -> None:
    """Room for a save: nothing left of killed ones, nothing in its place that is not ours."""
    aside = _beside(path, "old")
    if not os.path.lexists(path) and aside.exists():
        aside.rename(path)
    if os.path.lexists(path) and not is_checkpoint(path):
        raise CheckpointError(f"{path} exists and is no checkpoint: move it away or save under another name")
    _remove(aside)
    _remove(unfinished)
    unfinished.mkdir(parents=True)


def _finish(path: Path, unfinished: Path, stored: list[Stored], meta: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    _write_meta(unfinished / META, meta)
    files: dict[str, dict[str, Any]] = {file: {"bytes": (unfinished / file).stat().st_size} for file in sorted({s.file for s in stored})}
    files[META] = {"bytes": (unfinished / META).stat().st_size, "crc32": _crc32(unfinished / META)}
    whole = Manifest(unfinished, dict(manifest), tuple(stored), files)
    for of_tensor in whole.tensors.values():
        check_tiling(of_tensor)
    _write_synced(unfinished / MANIFEST, to_json(whole).encode())
    _sync_folder(unfinished)
    aside = _beside(path, "old")
    if os.path.lexists(path):
        path.rename(aside)
    unfinished.rename(path)
    _sync_folder(path.parent)
    _remove(aside)


def _write_meta(file: Path, meta: Mapping[str, Any]) -> None:
    with open(file, "wb") as out:
        torch.save(plain(meta), out)
        out.flush()
        os.fsync(out.fileno())
    _read_meta(file)        # what cannot be read back must not replace a checkpoint that can


def _crc32(file: Path) -> str:
    return f"{zlib.crc32(file.read_bytes()):08x}"


def _write_synced(file: Path, content: bytes) -> None:
    with open(file, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    """Make names durable: synced files may still lose a rename with the power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- reading


def read_manifest(path: str | Path) -> Manifest:
    """What a checkpoint says of itself; its files are there and have their sizes, which is all that is read of them.

    Raises:
        CheckpointError: no checkpoint, an incomplete one, one of a later version.
    """
    folder = _settled(Path(path))
    try:
        text = (folder / MANIFEST).read_text()
    except OSError as error:
        raise CheckpointError(_why_none(Path(path), folder)) from error
    manifest = from_json(text, folder)
    for file in {*manifest.files, *(s.file for s in manifest.blocks), META}:
        size = (folder / file).stat().st_size if (folder / file).is_file() else None
        wanted = manifest.files.get(file, {}).get("bytes", 0)
        if size is None or size != wanted:
            state = "is missing" if size is None else f"has {size:,} of {wanted:,} bytes"
            raise CheckpointError(f"checkpoint {path} is incomplete: {file} {state}")
    return manifest


def _why_none(path: Path, folder: Path) -> str:
    if folder.is_dir():
        below = [str(p) for p in find_checkpoints(folder)]
        hint = f"; below it there is {below[-1]}" if below else ""
        return f"{path} is no checkpoint, or an incomplete one: it has no {MANIFEST}, which is written last{hint}"
    if folder.is_file():
        return f"{path} is a file: a checkpoint of recapp is a directory with a {MANIFEST}"
    beside = [p.name for p in path.parent.glob("*.ckpt")] if path.parent.is_dir() else []
    return f"there is no checkpoint {path}" + (f": {suggest(path.name, beside)}" if beside else "")


def read_meta(path: str | Path) -> dict[str, Any]:
    """The plain part: dense parameters, Lightning's state; tensors on the CPU.

    Raises:
        CheckpointError: no checkpoint, a damaged file, or one that holds more than plain types.
    """
    manifest = read_manifest(path)
    _check_meta(manifest)
    return _read_meta(manifest.folder / META)


def _check_meta(manifest: Manifest) -> None:
    if _crc32(manifest.folder / META) != manifest.files[META].get("crc32"):
        raise CheckpointError(f"{manifest.folder / META} is damaged: its bytes are not those that were saved; use another checkpoint")


def _read_meta(file: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:      # unpickling a damaged file can raise anything
        raise CheckpointError(f"{file} cannot be read as plain types: {str(error).splitlines()[0]}") from error
    return meta


def load_blocks(path: str | Path, blocks: Iterable[Block]) -> None:
    """Fill what this rank holds, whatever plan and number of ranks the checkpoint was saved under. Ranks call it by themselves.

    Args:
        path: the checkpoint.
        blocks: to be filled, copies and all. Leave optimiser state out where it is not wanted.

    Raises:
        CheckpointError: a table, tensor or shape that is not the checkpoint's, a hole, a damaged file.
    """
    manifest = read_manifest(path)
    fill_blocks(manifest.folder, manifest.blocks, blocks)


def load_table(path: str | Path, table: str, tensor: str = "weight") -> Tensor:
    """A whole logical table, for notebooks: no plan, no ranks, no model.

    Args:
        path: the checkpoint.
        table: its name.
        tensor: "weight" or a state of the optimiser, such as "sum".

    Returns:
        [R, D], or [R, 1] for a state that is kept by row, in the stored dtype.

    Raises:
        CheckpointError: a table or tensor that is not in the checkpoint.
    """
    manifest = read_manifest(path)
    stored = manifest.tensors.get((table, tensor))
    shape, dtype = (stored[0].shape, getattr(torch, stored[0].dtype)) if stored else ((1, 1), torch.float32)
    data = torch.empty(shape, dtype=dtype)
    fill_blocks(manifest.folder, manifest.blocks, [Block(table, tensor, shape, range(shape[0]), range(shape[1]), data, True)])
    return data


def verify(path: str | Path) -> int:
    """Read all of a checkpoint and compare every checksum.

    Returns:
        The bytes read.

    Raises:
        CheckpointError: naming what is missing or damaged.
    """
    manifest = read_manifest(path)
    for of_tensor in manifest.tensors.values():
        check_tiling(of_tensor)
    _check_meta(manifest)
    return check_bytes(manifest.folder, manifest.blocks) + int(manifest.files[META]["bytes"])


# ---- directories


def is_checkpoint(path: str | Path) -> bool:
    """Whether a whole checkpoint lies there (a killed save leaves none)."""
    return (_settled(Path(path)) / MANIFEST).is_file()


def find_checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints below a directory, oldest first; links to others are left out."""
    found = [*Path(folder).rglob("*.ckpt"), *(p.with_suffix("") for p in Path(folder).rglob("*.ckpt.old"))]
    held = {p for p in found if not p.is_symlink() and is_checkpoint(p)}
    return sorted(held, key=lambda p: ((_settled(p) / MANIFEST).stat().st_mtime_ns, p.name))


def remove_checkpoint(path: str | Path) -> None:
    """Delete a checkpoint, or a link to one; nothing there is fine. One rank calls it.

    Raises:
        CheckpointError: something else lies there.
    """
    path = Path(path)
    if os.path.lexists(path) and not path.is_symlink() and not is_checkpoint(path):
        raise CheckpointError(f"{path} is no checkpoint and was not removed")
    for name in (path, _beside(path, "old")):
        if os.path.lexists(name):       # first out of the way at once: half of a directory must not be taken for a whole one
            _remove(_beside(path, "tmp"))
            name.rename(_beside(path, "tmp"))
            _remove(_beside(path, "tmp"))


def _beside(path: Path, suffix: str) -> Path:
    """The name of a checkpoint while it is written ("tmp") or replaced ("old")."""
    return path.with_name(f"{path.name}.{suffix}")


def _settled(path: Path) -> Path:
    """Where a checkpoint is, also when a save was killed between its two renames."""
    return _beside(path, "old") if not path.exists() and _beside(path, "old").exists() else path


def _remove(path: Path) -> None:
    """Delete a directory, a file, a link or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
