"""Recognise directories of Delta Lake, Apache Iceberg and Apache Hudi, and make Python code that
lists the files that are alive in them.

Such a table keeps the files of its removed and replaced rows for a while, and only its log tells
which files these are. Read as a directory, all of them would train.
"""

from collections.abc import Collection, Iterable
from pathlib import Path

from recapp.dataset.text_files import new_folder
from recapp.errors import DataError
from recapp.settings.values import typed

FILE_LIST = "_file_list.txt"


def refuse_tables(directories: Collection[Path], setting: str, given: str) -> None:
    """Refuse the directory of a table, or directories inside of one.

    Args:
        directories: The directories.
        setting: The setting that names them.
        given: Its value.

    Raises:
        DataError: One belongs to a table. Notes have Python code that lists the files that are
            alive.
    """
    found = _table_around([directory.absolute() for directory in directories])
    if found is None:
        return
    format, place, folder = found
    listing = new_folder(folder.name) / FILE_LIST
    error = DataError(
        f"{setting}={given}: belongs to {folder}, a table of {format}, whose removed "
        "rows are still in its files: run the lines of Python above, then set "
        f"{typed(setting, listing)}"
    )
    for line in _live_files(format, place, listing):
        error.add_note(line)
    raise error


def _table_around(directories: Collection[Path]) -> tuple[str, Path, Path] | None:
    """Return a table to which a directory belongs: the name of its format, its place (of Iceberg
    the newest metadata file) and its directory.
    """
    for folder in dict.fromkeys(one for each in directories for one in (each, *each.parents)):
        if (folder / "_delta_log").is_dir():
            return "Delta Lake", folder, folder
        if (folder / ".hoodie").is_dir():
            return "Hudi", folder, folder
        found = _newest(folder.glob("metadata/*.json"))
        rows = folder / "data"
        if found and any(each == folder or each.is_relative_to(rows) for each in directories):
            return "Iceberg", found, folder
    return None


def _newest(files: Iterable[Path]) -> Path | None:
    """Return the newest metadata file of an Iceberg table: v2.metadata.json, 00002-ID.metadata.json
    or the like.
    """
    known = [file for file in files if file.name.endswith(".metadata.json")]
    return max(known, key=lambda file: (_number(file.name), file.name), default=None)


def _number(name: str) -> int:
    digits = name.removeprefix("v").split("-")[0].split(".")[0]
    return int(digits) if digits.isdecimal() else -1


def _live_files(format: str, place: Path, listing: Path) -> list[str]:
    """Return the lines that write a list of the files that are alive. They fail if such a file
    still has removed rows.
    """
    files = {
        "Delta Lake": [
            "from deltalake import DeltaTable  # pip install deltalake pyarrow",
            f"table = DeltaTable({str(place)!r})",
            "table.to_pyarrow_dataset()  # an error if files have removed rows",
            "files = table.file_uris()",
        ],
        "Iceberg": [
            "from pyiceberg.table import StaticTable  # pip install pyiceberg pyarrow",
            f"table = StaticTable.from_metadata({str(place)!r})",
            "tasks = list(table.scan().plan_files())",
            "assert not any(task.delete_files for task in tasks), 'compact it first'",
            "files = [task.file.file_path for task in tasks]",
        ],
        "Hudi": [
            "from hudi import HudiTableBuilder  # pip install hudi",
            f"folder = Path({str(place)!r})",
            "parts = HudiTableBuilder.from_base_uri(str(folder)).build().get_file_slices()",
            "logs = any(part.log_files_relative_paths() for part in parts)",
            "assert not logs, 'compact it first'",
            "files = [str(folder / part.base_file_relative_path()) for part in parts]",
        ],
    }[format]
    return [
        "from os.path import getmtime",
        "from pathlib import Path",
        *files,
        "files = sorted(file.removeprefix('file://') for file in files)",
        "files.sort(key=getmtime)  # in the order in which they were written",
        f"listing = Path({str(listing)!r})",
        "listing.parent.mkdir(parents=True, exist_ok=True)",
        "listing.write_text('\\n'.join([str(len(files)), *files]))",
    ]
