"""From settings to the rows of a data set, and what a plan on paper needs of them: no rank is
started, and Lightning is not imported.

settings (plain dict) -> rows -> sizes of tables, statistics of ids
"""

from collections.abc import Sequence

from recapp.app.build import Settings, counts_ids
from recapp.dataset.click_rows import ClickRows, open_rows
from recapp.dataset.data_scale import scaled
from recapp.dataset.data_settings import DataSettings
from recapp.dataset.first_rows import COUNTED_ROWS
from recapp.dataset.schema import schema_from
from recapp.errors import DataError
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.dynamic import DYNAMIC, EXPECTED_ROWS
from recapp.tables.lookups import TableLookup
from recapp.tables.statistics import TableStatistics


def data_settings(settings: Settings) -> DataSettings:
    """Return which rows come in which order.

    Args:
        settings: Those of a command.
    """
    small = scaled(settings["dataset"])
    return DataSettings(**{key: small[key] for key in DataSettings.__dataclass_fields__})


def rows_of(settings: Settings) -> ClickRows:
    """Return the rows of the data set.

    Args:
        settings: Those of a command.

    Raises:
        DataError: Its files are not here.
    """
    return open_rows(data_settings(settings), schema_from(settings), settings["seed"])


def most_rows(tables: Settings) -> int | None:
    """Return the most rows of a table that is sized by its ids; None where tables grow, or none is
    sized so.
    """
    return None if tables.get("num_embeddings") == DYNAMIC else tables.get("max_rows")


def build_statistics(
    settings: Settings,
    tables: Sequence[EmbeddingBagConfig],
    lookups: Sequence[TableLookup] | None = None,
) -> dict[str, TableStatistics]:
    """Return id statistics of the data set's first training rows, by table; nothing where its files
    do not exist.
    """
    features = {f for t in tables for f in t.feature_names}
    if not features <= set(schema_from(settings).sparse):
        return {}  # tables that this data set does not have
    try:
        rows = rows_of(settings)
    except DataError:
        return {}
    return rows.statistics(tables, lookups)


def size_on_paper(settings: Settings) -> str:
    """Size tables by their ids as training would, and return a note of what was assumed or counted.

    Nothing is counted where `statistics=assumed`, or where the data do not exist. The note is empty
    where sizes do not depend on ids.

    Args:
        settings: Those of a command; `dataset.table_rows` is set in them.
    """
    if not counts_ids(settings):
        return ""
    why = "statistics=assumed"
    most = most_rows(settings["tables"])
    if settings["statistics"] != "assumed":
        try:
            settings["dataset"]["table_rows"] = rows_of(settings).table_rows(most)
            return (
                f"tables are sized by the distinct ids of the first {COUNTED_ROWS:,} "
                "training rows, as in training"
            )
        except DataError as error:
            why = str(error)
    if settings["tables"].get("num_embeddings") == DYNAMIC:
        return f"every dynamic table is assumed to have {EXPECTED_ROWS:,} rows: {why}"
    return f"every table is assumed to have tables.max_rows={most} rows, no ids were counted: {why}"
