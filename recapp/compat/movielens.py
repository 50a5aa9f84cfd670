"""TorchRec's reader of MovieLens: the names of the columns and an iterator of rows.

    for row in movielens_25m("ml-25m"):
        row["userId"], row["movieId"], row["rating"], row["timestamp"]

To train on MovieLens with recapp's data sets, convert the files once: `docs/logs.md`.
"""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from recapp.errors import DataError

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES = DEFAULT_RATINGS_COLUMN_NAMES + DEFAULT_MOVIES_COLUMN_NAMES[1:]
TYPES: tuple[Callable[[str], Any], ...] = (int, int, float, int, str, str)

RowMapper = Callable[[list[str]], Any]


class MovieLens(IterableDataset[Any]):
    """The rows of `ratings.csv`, one after the other.

    Args:
        root: The directory of the files.
        include_movies_data: Whether to append title and genres of `movies.csv` to each rating.
        row_mapper: A function that takes the texts of a row; None yields the texts.

    Raises:
        DataError: A file is missing.
    """

    def __init__(
        self, root: str | Path, include_movies_data: bool, row_mapper: RowMapper | None
    ) -> None:
        super().__init__()
        self.ratings = Path(root) / RATINGS_FILENAME
        self.movies = Path(root) / MOVIES_FILENAME if include_movies_data else None
        self.row_mapper = row_mapper
        for path in (self.ratings, self.movies):
            if path is not None and not path.is_file():
                raise DataError(f"movielens: root={root}: there is no {path.name} in it")

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows.

        Raises:
            DataError: A row has the wrong number of columns, a text is no number, or `movies.csv`
                lacks a rated movie; the error names the file and the line.
        """
        movies: Mapping[str, list[str]] | None = None
        if self.movies is not None:
            movies = {row[0]: row[1:] for _, row in _rows(self.movies, 3)}
        for line, row in _rows(self.ratings, len(DEFAULT_RATINGS_COLUMN_NAMES)):
            if movies is not None:
                if row[1] not in movies:
                    raise DataError(
                        f"{self.ratings}:{line}: movieId {row[1]} is not in {MOVIES_FILENAME}"
                    )
                row = row + movies[row[1]]
            try:
                yield row if self.row_mapper is None else self.row_mapper(row)
            except ValueError as error:
                raise DataError(f"{self.ratings}:{line}: {error}") from error


def named_values(row: list[str]) -> dict[str, Any]:
    """Return the values of a row by the names of their columns, as `int`, `float` and `str`.

    Args:
        row: The texts of a rating, with or without those of the movie.
    """
    columns = zip(DEFAULT_COLUMN_NAMES, TYPES, row, strict=False)
    return {name: kind(text) for name, kind, text in columns}


def movielens_20m(
    root: str | Path,
    *,
    include_movies_data: bool = False,
    row_mapper: RowMapper | None = named_values,
) -> MovieLens:
    """Return the rows of MovieLens 20M; the arguments are those of `MovieLens`."""
    return MovieLens(root, include_movies_data, row_mapper)


def movielens_25m(
    root: str | Path,
    *,
    include_movies_data: bool = False,
    row_mapper: RowMapper | None = named_values,
) -> MovieLens:
    """Return the rows of MovieLens 25M; the arguments are those of `MovieLens`."""
    return MovieLens(root, include_movies_data, row_mapper)


def _rows(path: Path, columns: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows after the header, each with the number of its last line."""
    with path.open(newline="", encoding="utf-8") as text:
        reader = csv.reader(text)
        next(reader, None)
        for row in reader:
            if len(row) != columns:
                raise DataError(
                    f"{path}:{reader.line_num}: {len(row)} columns where there must be {columns}"
                )
            yield reader.line_num, row
