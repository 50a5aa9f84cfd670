"""Packed rows: what a row of floats becomes, that it depends on nothing but the row, and
that strips and mapped files hold the same values.
"""

import copy
import mmap
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recapp.kernels import quantised
from recapp.kernels.backend import backend
from recapp.kernels.links import Links
from recapp.kernels.quantised import (
    QuantisedRows,
    bytes_of_packed_row,
    dequantise,
    empty_rows,
    quantise,
)

BITS = pytest.mark.parametrize("bits", [8, 4])
bits_of = st.sampled_from([8, 4])
widths = st.one_of(st.integers(1, 20), st.integers(1, 257))
shapes = st.tuples(st.integers(0, 9), widths)


def rows_of(shape, seed, spread=1.0):
    """Rows of very different sizes and offsets, some of one value."""
    generator = torch.Generator().manual_seed(seed)
    rows_RD = torch.randn(*shape, generator=generator)
    size_R1 = 10 ** torch.empty(shape[0], 1).uniform_(-6, 3, generator=generator) * spread
    offset_R1 = torch.randn(shape[0], 1, generator=generator)
    varies_R1 = torch.rand(shape[0], 1, generator=generator) > 0.2
    return rows_RD * varies_R1 * size_R1 + offset_R1 * size_R1.sqrt()


def values(rows):
    return dequantise(rows, torch.arange(len(rows)))


@given(shapes, bits_of, st.integers(0, 99))
def test_a_value_moves_by_half_a_scale_and_what_rounding_the_scale_and_bias_adds(shape, bits, seed):
    rows_RD = rows_of(shape, seed)
    made = quantise(rows_RD, bits)
    moved_RD = (values(made).double() - rows_RD.double()).abs()
    scale_R1, bias_R1 = made.scale_R.double()[:, None], made.bias_R.double()[:, None]
    digits, least = (2.0**-24, 2.0**-149) if bits == 8 else (2.0**-11, 2.0**-25)
    top = 2**bits - 1
    of_the_type = bias_R1.abs() * digits + top * (scale_R1 * digits + least) + least
    of_fp32 = 4 * 2.0**-24 * (bias_R1.abs() + top * scale_R1)
    assert bool((moved_RD <= scale_R1 / 2 + of_the_type + of_fp32).all())


@given(shapes, bits_of, st.integers(0, 99), st.data())
def test_packed_rows_do_not_depend_on_how_rows_are_cut(shape, bits, seed, data):
    rows_RD = rows_of(shape, seed)
    whole = quantise(rows_RD, bits)
    made = empty_rows(*shape, bits)
    made.packed_RK.fill_(77)
    edges = sorted([0, shape[0], *data.draw(st.lists(st.integers(0, shape[0]), max_size=4))])
    order = data.draw(st.permutations(range(len(edges) - 1)))
    for n in order:
        made.fill(edges[n], rows_RD[edges[n] : edges[n + 1]])
    assert torch.equal(made.packed_RK, whole.packed_RK)


def test_parts_of_bounded_memory_are_the_whole(monkeypatch):
    rows_RD = rows_of((50, 7), 1)
    whole = quantise(rows_RD, 4)
    strip = whole.strip_of(range(50), range(1, 6))
    monkeypatch.setattr(quantised, "PART_ELEMENTS", 21)
    assert torch.equal(quantise(rows_RD, 4).packed_RK, whole.packed_RK)
    assert torch.equal(whole.strip_of(range(50), range(1, 6)).packed_RK, strip.packed_RK)
    rows_RD[40, 2] = torch.nan
    with pytest.raises(ValueError, match="row 40 holds a value that is not finite"):
        quantise(rows_RD, 4)


@given(shapes, bits_of, st.integers(0, 99), st.data())
def test_strips_have_the_values_of_the_whole_bit_for_bit(shape, bits, seed, data):
    whole = quantise(rows_of(shape, seed), bits)
    first, last = sorted(data.draw(st.lists(st.integers(0, shape[0]), min_size=2, max_size=2)))
    edges = sorted({0, shape[1], *data.draw(st.lists(st.integers(0, shape[1]), max_size=4))})
    strips = [whole.strip_of(range(first, last), range(a, b)) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat([values(s) for s in strips], 1), values(whole)[first:last])
    for strip in strips:
        assert strip.packed_RK.shape == (last - first, bytes_of_packed_row(strip.width, bits))
        assert torch.equal(strip.scale_R, whole.scale_R[first:last])
    again = strips[0].strip_of(range(last - first), range(strips[0].width))
    assert again.packed_RK.data_ptr() == strips[0].packed_RK.data_ptr(), "a view, no copy"


@given(widths, bits_of)
def test_a_packed_row_is_words_of_values_then_scale_then_bias(width, bits):
    size = bytes_of_packed_row(width, bits)
    rows = quantise(torch.linspace(-1, 1, 2 * width).view(2, width), bits)
    assert rows.packed_RK.shape == (2, size) and size % 4 == 0
    packed = -(-width * bits // 8)
    row = rows.packed_RK[1].numpy().tobytes()
    number = np.float32 if bits == 8 else np.float16
    scale, bias = np.frombuffer(row[-2 * number().itemsize :], number)
    assert (scale, bias) == (rows.scale_R[1].item(), rows.bias_R[1].item())
    assert row[:packed] == rows.values_RP[1].numpy().tobytes()
    padding = row[packed : -2 * number().itemsize]
    assert len(padding) < 4 and not any(padding)


def test_smallest_and_largest_of_a_row_use_all_codes_and_even_columns_lie_low():
    rows = quantise(torch.tensor([[0.0, 15.0, 3.0], [-1.0, -1.0, 6.5]]), 4)
    assert rows.values_RP.tolist() == [[0xF0, 0x03], [0x00, 0x0F]]
    assert rows.scale_R.tolist() == [1.0, 0.5] and rows.bias_R.tolist() == [0.0, -1.0]
    assert quantise(torch.tensor([[0.0, 255.0, 3.0]]), 8).values_RP.tolist() == [[0, 255, 3]]


def test_values_halfway_between_two_codes_become_the_even_one():
    rows = quantise(torch.tensor([[0.0, 0.5, 1.5, 2.5, 255.0]]), 8)
    assert rows.values_RP.tolist() == [[0, 0, 2, 2, 255]]


@BITS
def test_a_row_of_one_value_keeps_it(bits):
    assert values(quantise(torch.full((1, 5), -0.75), bits)).tolist() == [[-0.75] * 5]
    assert values(quantise(torch.zeros(1, 5), bits)).tolist() == [[0.0] * 5]


@BITS
def test_a_zero_has_no_sign(bits):
    made = [quantise(torch.tensor([row]), bits) for row in ([0.0, -0.0, 1.0], [-0.0, 0.0, 1.0])]
    assert torch.equal(made[0].packed_RK, made[1].packed_RK)


@BITS
def test_a_copy_has_memory_of_its_own(bits):
    rows = quantise(rows_of((4, 6), 2), bits)
    before = values(rows)
    assert rows.arrays is rows.arrays
    copied = copy.deepcopy(rows)
    rows.fill(0, torch.zeros(4, 6))
    assert torch.equal(values(copied), before) and not torch.equal(values(rows), before)
    assert copied.arrays[0].ctypes.data == copied.packed_RK.data_ptr()


@BITS
def test_no_rows_are_no_packed_rows(bits):
    made = quantise(torch.zeros(0, 5), bits)
    assert len(made) == 0 and values(made).shape == (0, 5)
    assert len(made.strip_of(range(0), range(2))) == 0


def test_large_rows_keep_what_their_type_can_hold():
    rows_RD = torch.tensor([[-1e38, 2e38]])
    torch.testing.assert_close(values(quantise(rows_RD, 8)), rows_RD)
    rows_RD = torch.tensor([[-65504.0, 65504.0]])
    torch.testing.assert_close(values(quantise(rows_RD, 4)), rows_RD, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("bits", "row", "why"),
    [
        (8, [0.0, torch.nan], "holds a value that is not finite"),
        (8, [0.0, torch.inf], "holds a value that is not finite"),
        (4, [-torch.inf, 0.0], "holds a value that is not finite"),
        (8, [-3e38, 3e38], "has values too large for scale and bias in float32"),
        (4, [1e5, 1e5], "has values too large for scale and bias in float16"),
        (4, [0.0, 2e6], "has values too large for scale and bias in float16"),
    ],
)
def test_a_row_that_cannot_be_kept_is_named(bits, row, why):
    rows_RD = torch.zeros(5, 2)
    rows_RD[3] = torch.tensor(row)
    with pytest.raises(ValueError, match=f"^row 1,003 {why}$"):
        empty_rows(2000, 2, bits).fill(1000, rows_RD)


def test_what_no_packed_row_can_be_is_refused():
    with pytest.raises(ValueError, match="bits=2: must be 4 or 8"):
        quantise(torch.zeros(1, 1), 2)
    with pytest.raises(ValueError, match="width=0: must be at least 1"):
        quantise(torch.zeros(1, 0), 8)
    made = empty_rows(3, 6, 8)
    with pytest.raises(
        ValueError, match=r"rows have 6 columns, and the values have the shape \[1, 5\]"
    ):
        made.fill(0, torch.zeros(1, 5))
    with pytest.raises(ValueError, match="2 rows from 2 on do not fit in 3 packed rows"):
        made.fill(2, torch.zeros(2, 6))
    for rows, columns in (
        (range(2, 4), range(6)),
        (range(3), range(4, 7)),
        (range(3), range(2, 2)),
        (range(3), range(0, 6, 2)),
        (range(-1, 3), range(6)),
    ):
        with pytest.raises(ValueError, match="no rectangle of 3 rows x 6 columns"):
            made.strip_of(rows, columns)


def test_memory_that_cannot_be_read_as_packed_rows_is_refused():
    with pytest.raises(ValueError, match=r"uint8 \[rows, 16\]; these are uint8 \[2, 15\]"):
        QuantisedRows(torch.zeros(2, 15, dtype=torch.uint8), 6, 8)
    with pytest.raises(ValueError, match=r"these are int8 \[2, 16\]"):
        QuantisedRows(torch.zeros(2, 16, dtype=torch.int8), 6, 8)
    memory = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"from a multiple of 4 bytes on.*at byte 2 of a word"):
        QuantisedRows(memory[2:34].view(2, 16), 6, 8)
    with pytest.raises(ValueError, match=r"without gaps.*strides \[32, 1\]"):
        QuantisedRows(memory.view(2, 32)[:, :16], 6, 8)


@pytest.fixture
def file_of_rows(tmp_path):
    """A file of packed rows behind a header, written in parts through a map, and their floats."""

    def make(bits, width=5, count=60, header=64):
        rows_RD = rows_of((count, width), 3)
        size = bytes_of_packed_row(width, bits)
        path = tmp_path / f"rows{bits}"
        path.write_bytes(b"\0" * (header + count * size))
        mapped = np.memmap(path, np.uint8, "r+", header, (count, size))
        made = QuantisedRows(torch.from_numpy(mapped), width, bits)
        for first in range(0, count, 17):
            made.fill(first, rows_RD[first : first + 17])
        mapped.flush()
        return path, header, rows_RD

    return make


@BITS
@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.filterwarnings("ignore:The given.*is not writable")
def test_rows_of_a_file_that_is_mapped_read_only_are_pooled(file_of_rows, bits, kernels):
    """A write to the map would end the process."""
    path, header, rows_RD = file_of_rows(bits)
    with open(path, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    flat = torch.frombuffer(held, dtype=torch.uint8)
    shape = len(rows_RD), bytes_of_packed_row(5, bits)
    mapped = QuantisedRows(flat[header:].view(shape), 5, bits)
    assert torch.equal(mapped.packed_RK, quantise(rows_RD, bits).packed_RK)
    links = Links(
        torch.arange(60),
        torch.tensor([0, 0, 11, 60]).int(),
        None,
        None,
        3,
    )
    found, expected = torch.empty(2, 15).unbind()
    kernels = backend(kernels, torch.device("cpu"))
    kernels.pool(mapped, 5, 5, links, found, torch.float32)
    backend("torch", torch.device("cpu")).pool(
        quantise(rows_RD, bits), 5, 5, links, expected, torch.float32
    )
    assert torch.equal(found, expected)
    assert mapped.strip_of(range(5, 9), range(5)).packed_RK.data_ptr() == (
        mapped.packed_RK[5:].data_ptr()
    )
    with pytest.raises(ValueError, match="4 bytes"):
        QuantisedRows(flat[header - 1 : -1].view(shape), 5, bits)


@pytest.mark.parametrize(("bits", "unpack"), [(8, "byte"), (4, "4bit")])
def test_torchs_own_operators_read_packed_rows_without_padding(bits, unpack):
    rows = quantise(rows_of((20, 16), 5), bits)
    found = getattr(torch.ops.quantized, f"embedding_bag_{unpack}_unpack")(rows.packed_RK)
    torch.testing.assert_close(found, values(rows))
