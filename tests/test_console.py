"""Tables and JSON: what a user or a program reads on standard output."""

import json
import pickle

import numpy as np
import pytest

from recapp.console import Column, emit, note, print_table, progress
from recapp.errors import ConfigError, DataError

ROWS = [
    {"table": "C1[0]", "rows": 203931, "share": 0.123456, "where": None},
    {"table": "wide_table", "rows": 4, "share": float("nan"), "where": "rank 0"},
]


def test_text_is_an_aligned_table_with_numbers_at_the_right(capsys):
    emit(ROWS, "text")
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["table", "rows", "share", "where"]
    assert first.split() == ["C1[0]", "203,931", "0.1235", "-"]
    assert first.index("203,931") + len("203,931") == second.index(" 4 ") + 2


def test_a_table_of_many_rows_is_cut_and_says_so(capsys):
    print_table([{"n": n} for n in range(1203)], most=3, rest=": elsewhere")
    assert capsys.readouterr().out.split("\n")[1:] == [
        "0",
        "1",
        "2",
        "and 1,200 more: elsewhere",
        "",
    ]


def test_a_table_away_from_a_terminal_is_plain_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table([{"reason": "word " * 60, "number": 123456}], title="a title")
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.isascii()
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("word") == 60 and "123,456" in out and out.startswith("a title")


def test_a_table_that_is_a_little_too_wide_moves_together_before_a_name_is_broken(
    capsys, monkeypatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    # 82 with two blanks between, 79 with one
    print_table([{letter: letter * 19 for letter in "abcd"}])
    assert capsys.readouterr().out.splitlines()[1] == " ".join(letter * 19 for letter in "abcd")


def test_columns_choose_scale_and_format(capsys):
    print_table([{"bytes": 3_000_000, "hidden": 1}], [Column("bytes", "MB", ".1f", 1e6)])
    assert capsys.readouterr().out.split() == ["MB", "3.0"]


def test_json_is_one_document_with_every_key_and_no_nan(capsys):
    emit(
        [*ROWS, {"size": np.float32(0.5), "parts": (1, float("inf"))}],
        "json",
        [Column("table", "t")],
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0] == ROWS[0]
    assert rows[1]["share"] is None
    assert rows[2] == {"size": 0.5, "parts": [1, None]}


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"format=xml: choose one of text, json"):
        emit(ROWS, "xml")


def test_notes_and_progress_leave_standard_output_alone(capsys):
    note("on the way")
    with progress("writing rows", 10) as advance:
        advance(4)
        advance(6)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["on the way", "writing rows: 10 of 10"]


def test_control_characters_of_files_do_not_reach_the_screen(capsys):
    named = "a\x1b[2J\x07\x9b1m\u202e\udcffb\tc\nd"
    note(named)
    print_table([{named: named}], title=named)
    with progress(named, 1) as advance:
        advance(1)
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert captured.err.startswith("a?[2J??1m??b\tc\nd\n")
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)
    assert shown.count("a?[2J??1m??b") == 5


def test_errors_are_one_line_whatever_a_name_holds():
    said = str(DataError("column 'a\n\x1b[2Jb\u202e\ud800' of é.parquet"))
    assert said == r"column 'a \x1b[2Jb\u202e\ud800' of é.parquet"
    with pytest.raises(DataError, match=r"^a\\x00b$"):
        raise pickle.loads(pickle.dumps(DataError("a\0b")))
