"""Check before ranks start that the files of a run have no id outside of a table whose id rule is
`error`, as far as the footers of its files tell.

It loads no library that other checks of a training have not loaded before.
"""

from recapp.dataset.data_settings import DataSettings
from recapp.processes.rank_environment import started_externally
from recapp.recipe.recipe import Train
from recapp.tables.config import IdRule
from recapp.tables.lookups import TableLookup

MOST_LOOKS = 50_000  # at the range of a column in a row group: some tenths of a second


def check_ids(recipe: Train) -> None:
    """Check the ids of training and validation files.

    Raises:
        OutsideTable: An id has no row; the text names table, feature, id, file and row.
    """
    if started_externally() or recipe.dataset.generate is not None:
        return
    strict = {
        lookup.feature: lookup
        for collection in recipe.model_tables.collections.values()
        for lookup in collection.lookups
        if lookup.table.id_rule is IdRule.ERROR and lookup.table.dynamic is None
    }
    for split in ("path", "val_path") if strict else ():
        _check_split(recipe, recipe.dataset.scaled, split, strict)


def _check_split(
    recipe: Train, dataset: DataSettings, split: str, strict: dict[str, TableLookup]
) -> None:
    """Check the files of one split."""
    from recapp.dataset.files import file_names
    from recapp.dataset.places_of_ids import first_outside, place_of_id
    from recapp.dataset.source import open_files

    paths = getattr(dataset, split)
    schema = recipe.labelled_schema
    limits = {
        feature: range(x.table.min_key, x.table.min_key + x.table.num_embeddings)
        for feature, x in strict.items()
    }
    looks = 0
    for name in file_names(paths, setting=f"dataset.{split}") if paths is not None else ():
        source = open_files([name], schema, setting=f"dataset.{split}")
        looks += len(source.segments) * len(limits)
        found = first_outside(source, schema, limits)
        if found is not None:
            from recapp.tables.ids import OutsideTable  # imports torch

            feature, number = found
            where = f" in {place_of_id(source, schema, feature, number)} (dataset.{split})"
            raise OutsideTable(strict[feature].table, feature, 0, number, where)
        if looks > MOST_LOOKS:
            return
