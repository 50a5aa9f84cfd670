"""MovieLens' rows as programs for TorchRec read them, and lines that cannot be read."""

import pytest
from recapp.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DEFAULT_COLUMN_NAMES,
    INT_FEATURE_COUNT,
)
from recapp.datasets.movielens import (
    DEFAULT_RATINGS_COLUMN_NAMES,
    movielens_20m,
    movielens_25m,
)
from torch.utils.data import DataLoader

from recapp.errors import DataError

RATINGS = "userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n1,29,4.0,1112484676\n"
MOVIES = 'movieId,title,genres\n2,"Jumanji, a film (1995)",Fantasy\n29,City,Drama|Sci-Fi\n'


@pytest.fixture
def root(tmp_path):
    (tmp_path / "ratings.csv").write_text(RATINGS)
    (tmp_path / "movies.csv").write_text(MOVIES)
    return tmp_path


def test_ratings_are_numbers_by_their_names(root):
    rows = list(movielens_20m(root))
    assert rows[0] == {"userId": 1, "movieId": 2, "rating": 3.5, "timestamp": 1112486027}
    assert list(rows[1]) == DEFAULT_RATINGS_COLUMN_NAMES and len(rows) == 2
    assert list(movielens_25m(root)) == rows
    (batch,) = DataLoader(movielens_25m(str(root)), batch_size=2)
    assert batch["movieId"].tolist() == [2, 29]


def test_movies_stand_behind_their_ratings(root):
    first, second = movielens_25m(root, include_movies_data=True)
    assert first["title"] == "Jumanji, a film (1995)" and second["genres"] == "Drama|Sci-Fi"
    texts = movielens_25m(root, include_movies_data=True, row_mapper=None)
    assert list(texts)[1] == ["1", "29", "4.0", "1112484676", "City", "Drama|Sci-Fi"]


def test_what_cannot_be_read_is_said(root):
    with pytest.raises(DataError, match=r"the directory has no ratings\.csv"):
        movielens_20m(root / "elsewhere")
    for line, said in (
        ("1,2,3.5", "ratings.csv:4: 3 columns, must have 4"),
        ("1,two,3.5,9", "ratings.csv:4: invalid literal for int"),
        ("1,3,3.5,9", "ratings.csv:4: movieId 3 is not in movies.csv"),
    ):
        (root / "ratings.csv").write_text(f"{RATINGS}{line}\n")
        with pytest.raises(DataError, match=said):
            list(movielens_20m(root, include_movies_data="movieId" in said))
    (root / "movies.csv").unlink()
    with pytest.raises(DataError, match=r"the directory has no movies\.csv"):
        movielens_20m(root, include_movies_data=True)


def test_criteos_columns_are_a_label_numbers_and_categories():
    assert len(DEFAULT_COLUMN_NAMES) == 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT
    assert DEFAULT_COLUMN_NAMES[:2] == ["label", "int_0"] and DEFAULT_COLUMN_NAMES[-1] == "cat_25"
    with pytest.raises(ImportError, match="reads Criteo's logs"):
        exec("from recapp.datasets.criteo import criteo_terabyte")
