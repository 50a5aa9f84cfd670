"""Ids and numbers that text spells, compiled.

Digits are read eight at once (`recapp/kernels/numba_text.py`). Fewer are loaded with the bytes
before them, which then count as the digit 0. Where Arrow has a dictionary that is no longer than
the column, its entries are decoded, and rows look them up.

Ids have the rules of `recapp/dataset/decode.py`. A number has digits and perhaps a point, as most
have: up to 2^53 without the point, so that one division gives the nearest float64. A column with
any other text, which may be a number or none, is left to Arrow.

Letters: N rows of a column, D entries of a dictionary, C columns, S rows of a matrix.
"""

from typing import Any

import numpy as np
from numba import carray

from recapp.dataset.compiled_columns import BYTES, LONG, MISSING, SHORT, column_of, element, pointer
from recapp.kernels.numba_cache import compiled
from recapp.kernels.numba_text import ZEROS, of_digits, of_hex, word_at, xxh64
from recapp.kernels.simd import get, put

jit = compiled()
inline = compiled(forceinline=True)
HASHED, INTEGERS, HEX = range(3)  # the rules of ids
ZERO, NINE, MINUS, POINT = b"09-."
WORD = 8
WORDS = np.zeros(0, np.uint64)  # of types
HEX_DIGITS = 16  # the most
INTEGER_DIGITS = 19  # of the largest int64
NUMBER_SIGNS = 18  # so that no number passes 64 bits
EXACT = np.uint64(2**53)
POWERS = 10.0 ** np.arange(NUMBER_SIGNS)


@inline
def last_word(data: Any, first: Any, last: Any) -> Any:
    """Return the bytes first .. last, or the last eight of them, behind digits 0.

    Args:
        data: The address of the first byte that may be read.
        first: The address of the first byte.
        last: The address behind the last byte, of at least one.
    """
    size = last - first
    if size >= WORD:
        return word_at(last - WORD)
    if last - data >= WORD:
        bits = np.uint64(8 * size)
        before = np.uint64(64) - bits
        return word_at(last - WORD) >> before << before | ZEROS >> bits
    word = ZEROS
    for at in range(first, last):
        word = word >> np.uint64(8) | np.uint64(element(at, BYTES)) << np.uint64(56)
    return word


@inline
def digits_of(data: Any, first: Any, last: Any, is_hex: Any) -> Any:
    """Return whether bytes first .. last are digits, and their value; arguments as for
    `last_word`.
    """
    value = np.uint64(0)
    scale = np.uint64(1)
    good = last > first
    while last > first:
        word = last_word(data, first, last)
        are_digits, part = of_hex(word) if is_hex else of_digits(word)
        good &= are_digits
        value += part * scale
        scale *= np.uint64(2**32 if is_hex else 10**8)
        last -= WORD
    return good, value


@inline
def of_hash(hash: Any) -> Any:
    """Return a hash as an id; that of missing ids becomes the next one."""
    id = np.int64(hash)
    return MISSING + 1 if id == MISSING else id


@inline
def id_of(data: Any, first: Any, last: Any, rule: Any) -> Any:
    """Return whether text has an id by a rule, and its id; arguments as for `last_word`."""
    is_hex = rule == HEX
    minus = not is_hex and element(first, BYTES) == MINUS
    begin = first + minus
    size = last - begin
    good: Any = False
    value = np.uint64(0)
    if size <= (HEX_DIGITS if is_hex else INTEGER_DIGITS):
        good, value = digits_of(data, begin, last, is_hex)
    if good and not is_hex:
        good = element(begin, BYTES) != ZERO or (size == 1 and not minus)
        good &= value <= np.uint64(2**63 - 1) + np.uint64(minus)
    id = np.int64(np.uint64(0) - value if minus else value)
    if not good and rule == HASHED:
        text_C = carray(pointer(first, BYTES), last - first)
        return True, of_hash(xxh64(text_C, 0, last - first))
    return good and id != MISSING, id


@inline
def number_of(first: Any, last: Any) -> Any:
    """Return whether bytes first .. last are digits, and perhaps a point between two of them, and
    their value. Where two digits begin with 0, and for -0, that is left to others.
    """
    begin = first + (element(first, BYTES) == MINUS)
    good: Any = 0 < last - begin <= NUMBER_SIGNS
    point = last
    value = np.uint64(0)
    for at in range(begin, last if good else begin):
        sign = element(at, BYTES)
        if ZERO <= sign <= NINE:
            value = value * np.uint64(10) + np.uint64(sign - ZERO)
        else:
            good &= sign == POINT and point == last and begin < at < last - 1
            point = at
    good = good and value <= EXACT and (value > 0 or begin == first)
    good = good and (point == begin + 1 or element(begin, BYTES) != ZERO)
    number = np.float64(value) / get(POWERS, max(last - point - 1, 0))
    return good, -number if begin > first else number


@jit
def write_values(
    bound_D1: Any,
    data: Any,
    code_N: Any,
    is_coded: Any,
    there_N: Any,
    rule: Any,
    absent: Any,
    out_N: Any,
) -> Any:
    """Write the ids or numbers of texts; return the first row of a text that has none, or -1.

    Args:
        bound_D1: Text d has the bytes bound[d] .. bound[d + 1].
        data: The address of the bytes.
        code_N: The text of each row.
        is_coded: Whether rows have the text of `code_N`; else row n has text n.
        there_N: Whether each row has a text.
        rule: A rule of ids; None for numbers.
        absent: What is written for a row without a text, or with an empty one.
        out_N: The values that are written.
    """
    for n in range(len(out_N)):
        at = np.int64(get(code_N, n)) if is_coded else n
        if not get(there_N, n):
            put(out_N, n, absent)
            continue
        if not 0 <= at < len(bound_D1) - 1:
            return n
        first = data + get(bound_D1, at)
        last = data + get(bound_D1, at + 1)
        good = True
        if first == last:
            out_N[n] = absent
        elif rule is None:
            good, out_N[n] = number_of(first, last)
        else:
            good, out_N[n] = id_of(data, first, last, rule)
        if not good:
            return n
    return -1


@jit
def write_hex(bound_D1: Any, data: Any, out_D: Any) -> Any:
    """Write the ids of texts of eight hexadecimal digits each; return whether all are such texts.
    They are one array of words, which LLVM reads some at once.
    """
    first = data + bound_D1[0]
    good = first % WORD == 0
    for d in range(len(out_D)):
        good &= bound_D1[d + 1] - bound_D1[d] == WORD
    word_D = carray(pointer(first, WORDS), len(out_D) if good else 0)
    for d in range(len(word_D)):
        fine, value = of_hex(word_D[d])
        good &= fine
        out_D[d] = np.int64(value)
    return good


@jit
def look_up(code_N: Any, there_N: Any, entry_D: Any, entries: Any, out_N: Any) -> Any:
    """Write the entry of each row; that behind the last one if it has none. Return the first row
    whose entry does not exist, or -1.
    """
    most: Any = np.int64(0)  # entries that rows have
    last = np.uint32(entries)
    for n in range(len(out_N)):
        code = np.uint32(get(code_N, n))
        there = get(there_N, n) != 0
        most = max(most, np.int64(code) + 1 if there else 0)
        out_N[n] = get(entry_D, np.int64(min(code, last) if there else last))
    return 0 if most > entries else -1


@jit
def decode_texts(
    batch: Any, number_C: Any, row_C: Any, like: Any, rule: Any, absent: Any, out_SN: Any
) -> Any:
    """Write columns of text, plain or with dictionaries, as ids or numbers.

    Args:
        batch: The address of the record batch, as for `column_of`.
        number_C: The numbers of the columns.
        row_C: The row of `out_SN` for each.
        like: An array of the type of bounds between texts.
        rule: A rule of ids; None for numbers.
        absent: What is written where there is no text, or an empty one.
        out_SN: The values that are written.

    Returns:
        For each column -1, or the first row that has no value; where a dictionary has a text
        without value, 0.
    """
    bad_C = np.full(len(number_C), -1)
    rows = out_SN.shape[1]
    space_N = np.empty(rows + 16, np.uint8)
    one_N = np.ones(rows, np.uint8)
    entry_D = np.empty(rows + 1, out_SN.dtype)
    for c in range(len(number_C)):
        out_N = out_SN[row_C[c]]
        code_N, there_N = column_of(batch, number_C[c], SHORT, space_N)
        array = element(element(batch + 48, LONG) + number_C[c] * 8, LONG)
        dictionary = element(array + 56, LONG)
        size, nulls, first = carray(pointer(dictionary if dictionary else array, LONG), 3)
        buffers = element((dictionary if dictionary else array) + 40, LONG)
        bits, bounds, data = carray(pointer(buffers, LONG), 3)
        bound_D1 = carray(pointer(bounds, like), first + size + 1)[first:]
        if not dictionary or size > rows:
            bad_C[c] = write_values(
                bound_D1, data, code_N, dictionary != 0, there_N, rule, absent, out_N
            )
            continue
        part_D = entry_D[:size]
        good = nulls == 0 or bits == 0
        if good and not (rule == HEX and write_hex(bound_D1, data, part_D)):
            good = write_values(bound_D1, data, code_N, False, one_N, rule, absent, part_D) < 0
        bad_C[c] = 0
        if good:
            entry_D[size] = absent
            bad_C[c] = look_up(code_N, there_N, entry_D, size, out_N)
    return bad_C


@jit
def hash_rows(row_NC: Any, id_N: Any) -> None:
    """Write the hash of the bytes of each row of a matrix as an id."""
    for n in range(len(id_N)):
        id_N[n] = of_hash(xxh64(row_NC[n], 0, row_NC.shape[1]))
