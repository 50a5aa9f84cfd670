"""Files of rectangles are what other readers of safetensors expect, and are read a few rows at a
time.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from tables import blank, block, edit, save

from recapp.errors import CheckpointError
from recapp.stored import block_files
from recapp.stored.stored_model import load_blocks, read_manifest

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
]


@pytest.fixture
def saved(tmp_path):
    """Save tables of every dtype, each in four rectangles on two ranks; return the path and the
    values by table.
    """
    values = {f"T{i}": torch.arange(70).reshape(10, 7).to(dtype) for i, dtype in enumerate(DTYPES)}
    cuts = [
        (range(6), range(3)),
        (range(6, 10), range(3)),
        (range(6), range(3, 7)),
        (range(6, 10), range(3, 7)),
    ]
    ranks = [
        [
            block(name, "weight", v, rows, cols)
            for name, v in values.items()
            for rows, cols in cuts[half : half + 2]
        ]
        for half in (0, 2)
    ]
    assert save(tmp_path / "a.ckpt", ranks) == [None, None]
    return tmp_path / "a.ckpt", values


def test_the_safetensors_package_reads_them(saved):
    path, values = saved
    for stored in read_manifest(path).blocks:
        wanted = values[stored.table][
            stored.rows.start : stored.rows.stop, stored.cols.start : stored.cols.stop
        ]
        found = load_file(path / stored.file)[stored.key]
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("bytes_at_once", [1, 50, 1 << 20])
def test_any_slice_is_the_same_however_few_rows_are_read_at_once(saved, monkeypatch, bytes_at_once):
    monkeypatch.setattr(block_files, "READ_BYTES", bytes_at_once)
    path, values = saved
    for rows, cols in (
        (range(10), range(7)),
        (range(5, 7), range(2, 4)),
        (range(1, 9), range(3, 7)),
        (range(6), range(1)),
    ):
        held = [
            blank(block(name, "weight", v, rows, cols))
            if v.dtype != torch.uint8
            else block(name, "weight", v * 0, rows, cols)
            for name, v in values.items()
        ]
        load_blocks(path, held)
        for b in held:
            assert torch.equal(
                b.data, values[b.table][rows.start : rows.stop, cols.start : cols.stop]
            )


def test_a_stored_block_is_read_once_however_many_rectangles_want_rows_of_it(saved, monkeypatch):
    read = []
    pieces = block_files._BlockFile._pieces

    def watched(self, stored):
        read.append(stored.key)
        return pieces(self, stored)

    monkeypatch.setattr(block_files._BlockFile, "_pieces", watched)
    path, values = saved
    load_blocks(
        path,
        [
            blank(block("T1", "weight", values["T1"], range(1, 4), cols))
            for cols in (range(1), range(1, 4))
        ],
    )
    assert read == ["T1/weight/rows 0-6/cols 0-3", "T1/weight/rows 0-6/cols 3-7"]


@pytest.mark.parametrize("header", ["[1]", '"x"', "{", "{}"])
def test_a_file_that_does_not_hold_what_the_manifest_says_is_an_error(saved, header):
    path, values = saved
    file = path / "rank-00000.safetensors"
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    raw[8 : 8 + length] = header.ljust(length).encode()
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors.* cannot be read"):
        load_blocks(path, [blank(block("T0", "weight", values["T0"], range(1), range(1)))])


def test_a_block_whose_values_are_said_to_be_of_another_type_is_an_error(saved):
    path, values = saved
    blocks = json.loads((path / "manifest.json").read_text())["blocks"]
    for entry in blocks:
        # bfloat16, of the same size
        entry["dtype"] = "float16" if entry["table"] == "T3" else entry["dtype"]
    edit(path, blocks=blocks)
    with pytest.raises(CheckpointError, match="the manifest and the file disagree"):
        load_blocks(path, [blank(block("T3", "weight", values["T3"], range(1), range(1)))])
