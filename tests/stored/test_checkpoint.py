"""A checkpoint is whole or it is none, whoever is killed when; what is in it is plain; what is
wrong with it is said in one line.
"""

import json
import os
import pkgutil
import signal
import zipfile
import zlib
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from enum import Enum, IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from tables import blank, block, edit, save, whole

from recapp.errors import CheckpointError, RankError
from recapp.stored import block_files, checkpoint, plain_parts
from recapp.stored.checkpoint import remove_checkpoint
from recapp.stored.plain_parts import plain
from recapp.stored.store import is_checkpoint
from recapp.stored.stored_model import load_blocks, load_table, read_manifest, read_meta, verify
from recapp.transport.communicator import Comm


def table(value, rows=8):
    return whole("A", "weight", torch.full((rows, 2), float(value)))


def halves(value):
    values = torch.full((8, 2), float(value))
    return [
        [block("A", "weight", values, range(4), range(2))],
        [block("A", "weight", values, range(4, 8), range(2))],
    ]


def value_of(path):
    verify(path)
    (value,) = load_table(path, "A").unique().tolist()
    assert read_meta(path)["value"] == value == read_manifest(path).info["value"]
    return value


def save_value(path, value, meta=None):
    return save(
        path,
        halves(value),
        meta={"value": float(value), **(meta or {})},
        manifest={"value": float(value)},
    )


def test_one_process_saves_without_threads_or_a_process_group(tmp_path):
    checkpoint.write_checkpoint(
        tmp_path / "a.ckpt",
        [table(4)],
        comm=Comm(),
        meta={"step": 3},
        manifest={"plan": {"name": "mixed"}},
    )
    assert load_table(tmp_path / "a.ckpt", "A").unique().tolist() == [4]
    assert read_meta(tmp_path / "a.ckpt") == {"step": 3}
    assert read_manifest(tmp_path / "a.ckpt").info == {"plan": {"name": "mixed"}}


def test_saving_again_replaces_the_earlier_one_and_leaves_nothing_beside_it(tmp_path):
    assert (
        save(tmp_path / "a.ckpt", [[table(1)], [], []], {"value": 1.0}, {"value": 1.0})
        == [None] * 3
    )
    assert save_value(tmp_path / "a.ckpt", 2) == [None] * 2
    assert value_of(tmp_path / "a.ckpt") == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    assert sorted(p.name for p in (tmp_path / "a.ckpt").iterdir()) == [
        "manifest.json",
        "meta.pt",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]


# ---- a save that does not end


def patched(monkeypatch, name, instead, after=0):
    """Replace the call of a function that comes after its first `after` calls."""
    module, _, attribute = f"recapp.stored.{name}".rpartition(".")
    owner = pkgutil.resolve_name(module)
    whole_function = getattr(owner, attribute)
    calls = []

    def replacement(*args, **kwargs):
        calls.append(args)
        return instead() if len(calls) == after + 1 else whole_function(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, replacement)


def full_disk():
    raise OSError(28, "No space left on device")


STEPS = [
    ("block_files.zlib.crc32", 0, 1),
    ("block_files.zlib.crc32", 1, 1),
    ("plain_parts.torch.save", 0, 1),
    ("checkpoint.to_json", 0, 1),
    ("store.sync", 0, 1),
    ("store.Path.rename", 0, 1),
    ("store.Path.rename", 1, 1),
    ("store.sync", 1, 2),
]
"""Calls of a save in the order in which they are made, how many of that name come before, and which
checkpoint has the name at that time.
"""


@pytest.mark.parametrize(("name", "after", "left"), STEPS)
def test_an_error_in_the_middle_of_a_save_leaves_the_earlier_checkpoint_whole(
    tmp_path, monkeypatch, name, after, left
):
    save_value(tmp_path / "a.ckpt", 1)
    with monkeypatch.context() as patches:
        patched(patches, name, full_disk, after)
        errors = save_value(tmp_path / "a.ckpt", 2)
    assert {type(e) for e in errors} == {CheckpointError, RankError}
    assert all(f"the disk under {tmp_path} is full" in str(e) for e in errors)
    assert value_of(tmp_path / "a.ckpt") == left
    assert save_value(tmp_path / "a.ckpt", 3) == [None] * 2
    assert value_of(tmp_path / "a.ckpt") == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("name", "after", "left"), STEPS)
def test_a_killed_save_leaves_the_earlier_checkpoint_whole(
    tmp_path, monkeypatch, name, after, left
):
    path = tmp_path / "a.ckpt"
    save_value(path, 1)
    child = os.fork()
    if child == 0:
        # a name that is not there would make a second pytest of the child
        patched(monkeypatch, name, die, after)
        checkpoint.write_checkpoint(
            path, [table(2)], comm=Comm(), meta={"value": 2.0}, manifest={"value": 2.0}
        )
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert is_checkpoint(path)
    assert value_of(path) == left
    assert save_value(path, 3) == [None] * 2
    assert value_of(path) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_first_save_that_is_killed_leaves_no_checkpoint(tmp_path, monkeypatch):
    child = os.fork()
    if child == 0:
        patched(monkeypatch, "store.Path.rename", die)
        checkpoint.write_checkpoint(
            tmp_path / "a.ckpt", [table(2)], comm=Comm(), meta={}, manifest={}
        )
        os._exit(0)
    os.waitpid(child, 0)
    assert not is_checkpoint(tmp_path / "a.ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt.tmp"]


def test_a_killed_removal_leaves_a_whole_checkpoint_or_none(tmp_path, monkeypatch):
    save_value(tmp_path / "a.ckpt", 1)
    with monkeypatch.context() as patches:
        patched(patches, "store.shutil.rmtree", full_disk)
        with pytest.raises(OSError, match="No space"):
            remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    assert save_value(tmp_path / "a.ckpt", 2) == [None] * 2


def test_the_rank_that_fails_says_why_and_the_others_name_it(tmp_path):
    errors = save(
        tmp_path / "a.ckpt", [[table(1)], [table(1)._replace(data=torch.zeros(3, 2))], []]
    )
    assert isinstance(errors[1], AssertionError)
    assert [type(e) for e in (errors[0], errors[2])] == [RankError] * 2
    assert "rank 1 could not write" in str(errors[0])
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_checkpoint_is_neither_overwritten_nor_removed(tmp_path):
    (tmp_path / "a.ckpt").mkdir()
    (tmp_path / "a.ckpt" / "notes.txt").write_text("mine")
    for error in save_value(tmp_path / "a.ckpt", 1):
        assert "exists and is no checkpoint" in str(error)
    with pytest.raises(CheckpointError, match="is no checkpoint and was not removed"):
        remove_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt" / "notes.txt").read_text() == "mine"


def test_links_are_followed_when_read_and_only_themselves_replaced_and_removed(tmp_path):
    save_value(tmp_path / "a.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "a.ckpt")
    assert value_of(tmp_path / "last.ckpt") == 1
    save_value(tmp_path / "last.ckpt", 2)
    assert (value_of(tmp_path / "a.ckpt"), value_of(tmp_path / "last.ckpt")) == (1, 2)
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "a.ckpt")
    remove_checkpoint(tmp_path / "link.ckpt")
    remove_checkpoint(tmp_path / "link.ckpt")
    assert value_of(tmp_path / "a.ckpt") == 1


# ---- what is wrong with it


@pytest.fixture
def saved(tmp_path):
    save_value(tmp_path / "best.ckpt", 1)
    return tmp_path / "best.ckpt"


def block_entry(saved, **entries):
    first, *others = json.loads((saved / "manifest.json").read_text())["blocks"]
    return [first | entries, *others]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda p: (p / "manifest.json").unlink(),
            "is no checkpoint, or an incomplete one: it has no manifest.json",
        ),
        (lambda p: (p / "meta.pt").unlink(), "is incomplete: meta.pt is missing"),
        (
            lambda p: (p / "rank-00001.safetensors").unlink(),
            "is incomplete: rank-00001.safetensors is missing",
        ),
        (
            lambda p: os.truncate(p / "rank-00000.safetensors", 100),
            "is incomplete: rank-00000.safetensors has 100 of",
        ),
        (lambda p: (p / "manifest.json").write_text("{"), "is damaged: JSONDecodeError"),
        (lambda p: (p / "manifest.json").write_text("[]"), "is damaged: "),
        (lambda p: edit(p, blocks=[{"table": "A"}]), "is damaged: KeyError"),
        (lambda p: edit(p, blocks=block_entry(p, file="../../secret")), "is damaged: ValueError"),
        (lambda p: edit(p, blocks=block_entry(p, dtype="load")), "is damaged: ValueError"),
        (
            lambda p: edit(p, version=99),
            "has format recapp 99, but this recapp reads format recapp 4: use a later recapp",
        ),
    ],
)
def test_an_incomplete_checkpoint_is_refused_in_one_line(saved, spoil, said):
    spoil(saved)
    with pytest.raises(CheckpointError) as error:
        read_manifest(saved)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_missing_checkpoint_names_the_close_one(saved):
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint .*bast.ckpt: did you mean best.ckpt\?"
    ):
        read_manifest(saved.with_name("bast.ckpt"))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere/x.ckpt$"):
        read_manifest(saved.parent / "nowhere" / "x.ckpt")


def test_a_file_of_that_name_has_an_error_of_its_own(tmp_path):
    (tmp_path / "a.ckpt").write_text("")
    with pytest.raises(CheckpointError, match="is a file: a checkpoint of recapp is a directory"):
        read_manifest(tmp_path / "a.ckpt")


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00001.safetensors", "meta.pt"])
def test_verify_finds_one_flipped_bit_and_names_the_file(saved, file):
    assert verify(saved) > 8 * 2 * 4
    raw = bytearray((saved / file).read_bytes())
    raw[-1] ^= 1
    (saved / file).write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{file} is damaged"):
        verify(saved)


@pytest.mark.parametrize("wanted", [range(8), range(3, 7), range(7, 8)])
def test_damaged_rows_are_never_loaded_whichever_rows_of_their_block_are_wanted(saved, wanted):
    held = blank(block("A", "weight", torch.zeros(8, 2), wanted, range(1)))
    load_blocks(saved, [held])
    assert held.data.unique().tolist() == [1]
    raw = bytearray((saved / "rank-00001.safetensors").read_bytes())
    raw[-9] ^= 1  # in row 6; the block holds rows 4 to 7
    (saved / "rank-00001.safetensors").write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=r"rank-00001\.safetensors is damaged: table A, weight, rows 4-8"
    ) as error:
        load_blocks(saved, [held])
    assert "\n" not in str(error.value)
    # the other file is whole
    load_blocks(saved, [blank(block("A", "weight", torch.zeros(8, 2), range(4), range(2)))])


def test_a_damaged_meta_is_never_read(saved):
    raw = bytearray((saved / "meta.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (saved / "meta.pt").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"meta\.pt is damaged"):
        read_meta(saved)


def test_a_manifest_that_points_beside_the_blocks_is_an_error_not_wrong_rows(saved):
    edit(saved, blocks=block_entry(saved, rows=[1, 5]))
    with pytest.raises(CheckpointError, match=r"overlap|cannot be read"):
        load_table(saved, "A")


def test_a_header_that_is_no_header_is_an_error(saved):
    raw = bytearray((saved / "rank-00000.safetensors").read_bytes())
    raw[:8] = b"\xff" * 8
    (saved / "rank-00000.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors cannot be read"):
        load_table(saved, "A")


class Evil:
    def __reduce__(self):
        return (os.system, ("touch pwned",))


def test_code_in_meta_is_never_run(saved, monkeypatch):
    monkeypatch.chdir(saved.parent)
    torch.save({"x": Evil()}, saved / "meta.pt")
    crc32 = f"{zlib.crc32((saved / 'meta.pt').read_bytes()):08x}"
    edit(
        saved,
        files={
            **read_manifest_files(saved),
            "meta.pt": {"bytes": (saved / "meta.pt").stat().st_size, "crc32": crc32},
        },
    )
    with pytest.raises(CheckpointError, match="cannot be read as plain types"):
        read_meta(saved)
    assert not Path("pwned").exists()


def read_manifest_files(saved):
    return json.loads((saved / "manifest.json").read_text())["files"]


# ---- plain types


class Colour(Enum):
    RED = "red"


class Number(IntEnum):
    ONE = 1


class Text(str):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int32(3), 3),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        (Number.ONE, 1),
        (Text("t"), "t"),
        (deque([1]), [1]),
        (range(3), [0, 1, 2]),
        (Point(1, np.int64(2)), (1, 2)),
        (frozenset({1}), {1}),
        (defaultdict(list, a=[Colour.RED]), {"a": ["red"]}),
        (UserDict({Colour.RED: UserList([1])}), {"red": [1]}),
        (None, None),
        (2j, 2j),
        (b"x", b"x"),
    ],
)
def test_what_states_are_full_of_becomes_plain_and_reads_back(tmp_path, value, expected):
    made = plain({"state": [value]})
    torch.save(made, tmp_path / "x.pt")
    (read,) = torch.load(tmp_path / "x.pt", weights_only=True)["state"]
    assert (type(read), read) == (type(expected), expected)


def test_a_state_dict_stays_ordered_with_its_version_numbers(tmp_path):
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    save(tmp_path / "a.ckpt", [[table(1)]], meta={"state_dict": state})
    read = read_meta(tmp_path / "a.ckpt")["state_dict"]
    assert type(read) is OrderedDict and list(read) == list(state)
    assert read._metadata == state._metadata
    assert all(torch.equal(read[k], state[k]) for k in state)


def test_a_view_does_not_take_its_whole_storage_along(tmp_path):
    save(
        tmp_path / "a.ckpt",
        [[table(1)]],
        meta={"row": torch.zeros(1000, 1000, requires_grad=True)[7]},
    )
    assert (tmp_path / "a.ckpt" / "meta.pt").stat().st_size < 20_000
    assert not read_meta(tmp_path / "a.ckpt")["row"].requires_grad


def test_a_private_object_is_refused_with_its_place_and_nothing_is_saved(tmp_path):
    save_value(tmp_path / "a.ckpt", 1)
    errors = save_value(tmp_path / "a.ckpt", 2, meta={"callbacks": {"mine": [0, Evil()]}})
    assert isinstance(errors[0], CheckpointError)
    assert "meta.callbacks.mine.1 is a test_checkpoint.Evil: a checkpoint keeps plain types" in str(
        errors[0]
    )
    assert value_of(tmp_path / "a.ckpt") == 1


def test_meta_that_cannot_be_read_back_is_an_error_when_it_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_parts, "plain", lambda value: {"x": Evil()})
    (error,) = save(tmp_path / "a.ckpt", [[table(1)]])
    assert isinstance(error, CheckpointError) and "cannot be read as plain types" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_takes_single_numbers_of_any_kind_and_no_tensors(tmp_path):
    numbers = {
        "metrics": {
            "val_auc": torch.tensor(0.75, dtype=torch.float64),
            "n": np.int64(3),
            "kind": Colour.RED,
        }
    }
    assert save(tmp_path / "a.ckpt", [[table(1)]], manifest=numbers) == [None]
    assert read_manifest(tmp_path / "a.ckpt").info == {
        "metrics": {"val_auc": 0.75, "n": 3, "kind": "red"}
    }
    (error,) = save(tmp_path / "b.ckpt", [[table(1)]], manifest={"x": torch.zeros(3)})
    assert isinstance(
        error, CheckpointError
    ) and "a Tensor is no number, text, list or dict" in str(error)


def test_a_manifest_can_be_read_line_by_line(tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "BLOCK_BYTES", 8)
    save(tmp_path / "a.ckpt", [[table(1)]], manifest={"plan": {"name": "mixed"}})
    lines = (tmp_path / "a.ckpt" / "manifest.json").read_text().splitlines()
    assert '"plan": {"name": "mixed"},' in lines
    assert sum('"table": "A"' in line for line in lines) == 8
    assert zipfile.is_zipfile(tmp_path / "a.ckpt" / "meta.pt")
