"""Files of data are opened in one place."""

import ast
from pathlib import Path

import pytest

import recapp
from recapp.dataset.data_file import DataFile, file_facts
from recapp.dataset.parquet import Parquet
from recapp.dataset.storage import Stamp, open_file
from recapp.errors import DataError

ROOM = Path(recapp.__file__).parent / "dataset"
# scores and generated logs are written, and what Python opens is a file of this machine
WRITES = ("scoring.py", "synthetic.py", "storage.py")


def test_only_storage_opens_files_of_data():
    calls = [
        f"{path.name}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(ROOM.glob("*.py"))
        if path.name not in WRITES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("open", "os.stat", "pa.OSFile", "pa.memory_map")
    ]
    assert calls == []


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_that_cannot_be_opened_is_an_error_of_one_short_line(tmp_path, mapped):
    with pytest.raises(FileNotFoundError) as info:
        open_file(str(tmp_path / "gone"), mapped=mapped)
    assert str(info.value) == f"[Errno 2] No such file or directory: '{tmp_path / 'gone'}'"
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        open_file(str(tmp_path), mapped=mapped)


def test_a_file_that_is_gone_when_its_facts_are_compared_is_named(tmp_path):
    path = str(tmp_path / "gone.parquet")
    with pytest.raises(DataError) as info:
        file_facts([DataFile(path, Parquet(), Stamp(1, 1), {}, (0, 1))])
    assert str(info.value) == f"{path}: cannot be read (No such file or directory)"
