"""Whatever is in a checkpoint's files, reading ends in a whole checkpoint or in one
CheckpointError, and nothing grows beyond its file.
"""

import json
import math
import os
import random
import signal
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from tables import edit, save, whole
from tiers import one_of

from recapp.errors import ArtefactError, CheckpointError
from recapp.sharding.layout import Block
from recapp.stored import manifest as manifests
from recapp.stored.block_files import StoredBlock, check_tiling
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.manifest import CheckpointManifest, from_json, to_json
from recapp.stored.store import CHECKPOINT, Pinned, is_checkpoint
from recapp.stored.stored_model import Artefact, load_table, read_manifest, read_meta, verify
from recapp.transport.communicator import Comm

PLAN = {
    "name": "mixed",
    "world_size": 1,
    "tables": {"A": {"sharding_type": "table_wise", "mode": "unique", "shards": [[0, 0, 8, 0, 2]]}},
}
INFO = {
    "config": {"seed": 1},
    "plan": PLAN,
    "metrics": {"val_auc": 0.75},
    "step": 20,
    "updates": [20],
    "rule": "sgd",
    "position": {"epoch": 1, "batches": 0, "batch_size": 256},
}


@pytest.fixture
def saved(tmp_path):
    assert save(
        tmp_path / "a.ckpt", [[whole("A", "weight", torch.ones(8, 2))]], {"step": 20}, INFO
    ) == [None]
    return tmp_path / "a.ckpt"


def use(path):
    """Read everything that recapp ever reads of a checkpoint."""
    manifest = read_manifest(path)
    verify(path)
    load_table(path, "A")
    read_meta(path)
    return (
        manifest.config,
        manifest.plan,
        manifest.metrics,
        manifest.step,
        manifest.position,
        manifest.updates,
    )


def refused(path):
    """Return the line with which a checkpoint is refused."""
    with pytest.raises(CheckpointError) as raised:
        use(path)
    said = str(raised.value)
    assert len(said.splitlines()) == 1 and len(said) < 600, said
    return said


# ---- bytes


def test_every_flipped_bit_of_a_manifest_is_found(saved):
    file = saved / "manifest.json"
    raw = file.read_bytes()
    for at in range(len(raw)):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << (at * 7 % 8)
        file.write_bytes(flipped)
        assert "is damaged" in refused(saved) or "has format recapp" in refused(saved)
    file.write_bytes(raw)
    use(saved)


def test_any_other_damage_to_a_manifest_is_one_error(saved):
    file = saved / "manifest.json"
    rng = random.Random(1)
    raw = file.read_bytes()
    for number in range(300):
        changed = bytearray(raw)
        at = rng.randrange(len(raw))
        way = number % 4
        if way == 0:
            del changed[at:]
        elif way == 1:
            del changed[at : at + rng.randrange(1, 40)]
        elif way == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 40))
        else:
            changed[at:at] = rng.choice(
                [
                    b"[" * 100_000,
                    b"9" * 5000,
                    b"\xff",
                    b"NaN",
                    b"-Infinity",
                    b"1e999",
                    b"\\ud800",
                    b"\x00",
                ]
            )
        if changed != raw:
            file.write_bytes(changed)
            refused(saved)


WRONG = [
    None,
    True,
    -1,
    1.5,
    1e999,
    10**30,
    "x",
    "\ud800",
    [],
    [1],
    {},
    {"x": []},
    [[[]]],
    ["a", "b"],
    "9" * 100,
]


@pytest.mark.parametrize("key", ["format", "version", "files", "blocks", *INFO])
def test_wrong_types_of_an_entry_are_one_error(saved, key):
    right = json.loads((saved / "manifest.json").read_text())
    for wrong in WRONG:
        if wrong == right[key] or (key, str(wrong)) in (
            ("config", "{}"),
            ("config", "{'x': []}"),
            ("metrics", "{}"),
            ("updates", "[]"),
            ("updates", "[1]"),
            ("rule", str(wrong)),
        ):
            continue
        edit(saved, **{key: wrong})
        refused(saved)


@pytest.mark.parametrize(
    "key", ["table", "tensor", "shape", "rows", "cols", "dtype", "file", "bytes", "crc32"]
)
def test_wrong_types_inside_a_block_are_one_error(saved, key):
    (right,) = json.loads((saved / "manifest.json").read_text())["blocks"]
    for wrong in [
        *WRONG,
        [0, 8, 2],
        [0.0, 8.0],
        [8, 0],
        [0, -1],
        [-8, 0],
        [0, 10**12],
        [False, True],
        [0, 1],
        "../a",
        "/etc/passwd",
        "float16",
    ]:
        if wrong != right[key]:
            edit(saved, blocks=[right | {key: wrong}])
            refused(saved)
    edit(saved, blocks=[{k: v for k, v in right.items() if k != key}])
    refused(saved)


@pytest.mark.parametrize(
    "wrong",
    [
        {"meta.pt": 5},
        {"meta.pt": {"bytes": "x"}},
        {"meta.pt": {"bytes": 1e999}},
        {"../x": {"bytes": 1}},
        {"rank-00000.safetensors": {"bytes": 3}},
    ],
)
def test_wrong_entries_of_files_are_one_error(saved, wrong):
    files = json.loads((saved / "manifest.json").read_text())["files"]
    edit(saved, files=files | wrong)
    refused(saved)


def test_a_metric_that_the_rows_left_open_is_null_in_the_file_and_nan_once_read(tmp_path):
    info = INFO | {"metrics": {"val_auc": math.nan, "val_log_loss": 0.5, "val_x": -math.inf}}
    text = to_json(CheckpointManifest(tmp_path, info, {"meta.pt": {"bytes": 0}}, ()))
    assert json.loads(text, parse_constant=pytest.fail)["metrics"] == {
        "val_auc": None,
        "val_log_loss": 0.5,
        "val_x": None,
    }
    found = from_json(CheckpointManifest, text.encode(), tmp_path).metrics
    assert (
        found["val_log_loss"] == 0.5 and math.isnan(found["val_auc"]) and math.isnan(found["val_x"])
    )


def test_of_all_entries_the_example_alone_may_be_null(tmp_path):
    entries = ("example", "weights", "metrics", "updates", "step")
    manifest = CheckpointManifest(tmp_path, dict.fromkeys(entries), {}, ())
    assert manifest.example == []
    for name in entries[1:]:
        with pytest.raises(CheckpointError, match=f"{name} (is missing|is None)"):
            getattr(manifest, name)


def test_a_manifest_without_a_checksum_is_refused(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest.pop("checksum")
    (saved / "manifest.json").write_text(json.dumps(manifest))
    assert "its bytes are not those that were saved" in refused(saved)


def read_plan():
    return CheckpointManifest(Path(), {"plan": PLAN}, {}, ()).plan


def test_a_manifest_is_parsed_once_however_often_it_is_asked_for(saved):
    manifests.from_json.cache_clear()
    for _ in range(5):
        read_manifest(saved)
    assert manifests.from_json.cache_info().misses == 1


# ---- other files under its names


@pytest.mark.parametrize("file", ["manifest.json", "meta.pt", "rank-00000.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "dangling link", "device", "no rights"])
def test_what_is_no_file_is_an_error_and_is_not_waited_for(saved, file, kind):
    (saved / file).unlink()
    if kind == "pipe":
        os.mkfifo(saved / file)
    elif kind == "directory":
        (saved / file).mkdir()
    elif kind == "no rights":
        os.mkfifo(saved / file, 0)
    else:
        (saved / file).symlink_to("nowhere" if kind == "dangling link" else "/dev/zero")
    signal.alarm(20)  # a pipe is waited for without end
    try:
        refused(saved)
    finally:
        signal.alarm(0)
    assert kind == "device" or file != "manifest.json" or not is_checkpoint(saved)


# ---- what things expand to


def test_a_disk_that_fails_while_a_manifest_is_read_is_one_error(saved):
    (saved / "manifest.json").unlink()
    (saved / "manifest.json").symlink_to("/proc/self/mem")  # a file whose first byte is unreadable
    assert refused(saved) == f"{saved / 'manifest.json'} cannot be read: Input/output error"
    with pytest.raises(ArtefactError, match=r"manifest\.json cannot be read: Input/output error$"):
        Artefact.at(saved)


@pytest.mark.parametrize(
    "read",
    [
        lambda file: file.read(5),
        lambda file: file.readinto(bytearray(9)),
        lambda file: file.readinto(bytearray(1 << 20)),
    ],
)
def test_every_way_of_reading_names_the_file_that_cannot_be_read(read):
    pinned = Pinned(Path("/proc/self"))
    with (
        pinned.open("mem", CHECKPOINT) as file,
        pytest.raises(CheckpointError, match=r"^/proc/self/mem cannot be read: Input/output"),
    ):
        read(file)
    pinned.close()


def forged(saved, meta):
    """Replace `meta.pt` by another file, and correct size and checksum in the manifest."""
    meta(saved / "meta.pt")
    raw = (saved / "meta.pt").read_bytes()
    files = json.loads((saved / "manifest.json").read_text())["files"]
    edit(saved, files=files | {"meta.pt": {"bytes": len(raw), "crc32": f"{zlib.crc32(raw):08x}"}})
    tracemalloc.start()
    try:
        said = refused(saved)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()
    assert "meta.pt cannot be read as plain types" in said
    return said


def sparse():
    index = torch.zeros(1, 1, dtype=torch.int64)
    return torch.sparse_coo_tensor(index, torch.ones(1), (2**40,), check_invariants=True)


def packed(file, **more):
    """Write a plain file of torch's whose zip is compressed."""
    torch.save({"x": torch.zeros(2**24), **more}, file.with_suffix(".big"))
    with (
        zipfile.ZipFile(file.with_suffix(".big")) as source,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    file.with_suffix(".big").unlink()


def lying(file):
    """Write a file whose pickle claims 2^20 values for a storage of 8."""
    torch.save({"x": torch.zeros(8)}, file)
    with zipfile.ZipFile(file) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(file, "w") as target:
        for name, raw in entries.items():
            said = raw.replace(b"K\x08", b"J\x00\x00\x10\x00") if name.endswith("data.pkl") else raw
            assert said != raw or not name.endswith("data.pkl")
            target.writestr(name, said)


@pytest.mark.parametrize(
    "meta",
    [
        lambda f: torch.save({"x": torch.zeros(1).expand(2**28)}, f),
        lambda f: torch.save({"x": torch.zeros(1).expand(2**14, 2**14)}, f),
        lambda f: torch.save({"a": [{"x": torch.zeros(1).as_strided((2**28,), (0,))}]}, f),
        packed,
        lying,
        lambda f: torch.save({"x": torch.zeros(4)}, f, _use_new_zipfile_serialization=False),
        lambda f: torch.save({"x": sparse()}, f),
        lambda f: torch.save({"x": torch.empty(2**40, device="meta")}, f),
        lambda f: torch.save([1], f),
        lambda f: torch.save({"x": bytearray(8)}, f),
        lambda f: torch.save({"x": torch.nn.Linear(2, 2)}, f),
        lambda f: f.write_bytes(b""),
        lambda f: f.write_bytes(b"PK\x05\x06" + bytes(18)),
        lambda f: f.write_bytes(os.urandom(1000)),
    ],
)
def test_a_plain_part_that_is_more_than_its_file_is_refused_before_anything_is_allocated(
    saved, meta
):
    forged(saved, meta)


def test_what_refers_to_itself_again_and_again_is_refused(tmp_path):
    bomb = [torch.zeros(1)]
    for _ in range(60):
        bomb = [bomb, bomb]
    torch.save({"x": bomb}, tmp_path / "bomb.pt")
    raw = (tmp_path / "bomb.pt").read_bytes()
    save(tmp_path / "a.ckpt", [[whole("A", "weight", torch.ones(8, 2))]])
    (tmp_path / "a.ckpt/meta.pt").write_bytes(raw)
    files = json.loads((tmp_path / "a.ckpt/manifest.json").read_text())["files"]
    edit(
        tmp_path / "a.ckpt",
        files=files | {"meta.pt": {"bytes": len(raw), "crc32": f"{zlib.crc32(raw):08x}"}},
    )
    with pytest.raises(CheckpointError, match="values that expand beyond the file"):
        read_meta(tmp_path / "a.ckpt")


def test_blocks_that_share_their_bytes_cannot_make_a_large_table_of_a_small_file(saved):
    (right,) = json.loads((saved / "manifest.json").read_text())["blocks"]
    many = [right | {"shape": [8 * 10**6, 2], "rows": [8 * i, 8 * i + 8]} for i in range(1000)]
    edit(saved, blocks=many)
    assert "hold 64,000 bytes" in refused(saved)
    edit(saved, blocks=[right | {"shape": [2**40, 2]}])
    assert "only 16 of 2,199,023,255,552 values" in refused(saved)


@pytest.mark.parametrize("cut", one_of(3, ["rows", "columns", "grid"]))
def test_many_thousand_blocks_are_checked_in_seconds(cut):
    n = 40_000
    shape = {"rows": (n, 1), "columns": (1, n), "grid": (200, 200)}[cut]
    cells = [(r, c) for r in range(shape[0]) for c in range(shape[1])]
    random.Random(1).shuffle(cells)
    stored = [
        StoredBlock("A", "weight", shape, range(r, r + 1), range(c, c + 1), "float32", "f", 0, 4, 0)
        for r, c in cells
    ]
    began = time.process_time()
    check_tiling(stored)
    assert time.process_time() - began < 10  # comparing each with each takes minutes
    with pytest.raises(CheckpointError, match="overlap"):
        check_tiling([*stored[1:], stored[1]])
    with pytest.raises(CheckpointError, match=r"only 39,999 of 40,000 values"):
        check_tiling(stored[1:])


# ---- weights that are not finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_written_over_a_good_checkpoint(saved, dtype, value):
    weights = torch.ones(8, 2, dtype=dtype)
    weights[5, 1] = value
    (error,) = save(saved, [[whole("A", "weight", weights)]])
    assert isinstance(error, CheckpointError) and len(str(error).splitlines()) == 1
    assert str(error).startswith(
        "table A, rows 0-8: weights that are not finite (NaN or infinity), so this checkpoint "
        "is "
        "not written"
    )
    assert use(saved)[3] == 20 and [p.name for p in saved.parent.iterdir()] == ["a.ckpt"]
    state = whole("A", "sum", weights)
    (error,) = save(saved, [[whole("A", "weight", torch.ones(8, 2)), state]])
    assert str(error).startswith(
        "table A, rows 0-8: sum of the optimiser is not finite (NaN or inf"
    )
    assert use(saved)[3] == 20 and [p.name for p in saved.parent.iterdir()] == ["a.ckpt"]


def test_a_dense_parameter_that_is_not_finite_is_not_written_either(saved):
    block = Block("A", "weight", (8, 2), range(8), range(2), torch.ones(8, 2), True)
    values = torch.tensor([1, torch.nan])
    for given, said in (
        ({"parameters": {"model.top.weight": values}}, "weights that are not finite"),
        ({"states": {"model.top.weight, sum": values}}, "sum of the optimiser is not finite"),
    ):
        with pytest.raises(CheckpointError, match=rf"^model\.top\.weight: {said}"):
            write_checkpoint(saved, [block], comm=Comm(), meta={}, manifest={}, **given)
    assert use(saved)[3] == 20


def test_a_manifest_that_is_written_is_the_one_that_is_read(saved):
    manifest = read_manifest(saved)
    again = from_json(CheckpointManifest, to_json(manifest).encode(), saved)
    assert again == manifest and (saved / "manifest.json").read_text() == to_json(manifest)
