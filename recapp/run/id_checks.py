"""Check before ranks start that the files of a run have no id outside of a table whose id rule is
`error`, as far as the footers of its files tell.

It loads no library that other checks of a training have not loaded before.
"""

from recapp.processes.rank_environment import started_externally
from recapp.run.recipe import Train
from recapp.settings.values import Paths
from recapp.tables.config import IdRule, TableLookup

MOST_LOOKS = 20_000  # at the range of a column in a row group: some tenths of a second


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
        _check_split(recipe, f"dataset.{split}", getattr(recipe.dataset.scaled, split), strict)


def _check_split(
    recipe: Train, setting: str, paths: Paths | None, strict: dict[str, TableLookup]
) -> None:
    """Check the files of one split. Footers that tell of an id that no row has are not believed."""
    from recapp.dataset.files import file_names
    from recapp.dataset.footers import first_outside, place_of_id
    from recapp.dataset.source import open_files

    schema = recipe.labelled_schema
    tables = {feature: lookup.table for feature, lookup in strict.items()}
    limits = {f: range(t.min_key, t.min_key + t.num_embeddings) for f, t in tables.items()}
    looks = 0
    for name in file_names(paths, setting=setting) if paths is not None else ():
        source = open_files([name], schema, setting=setting)
        looks += len(source.segments) * len(limits)
        found = first_outside(source, schema, limits)
        if found and (place := place_of_id(source, schema, *found)):
            from recapp.tables.ids import OutsideTable  # imports torch

            raise OutsideTable(tables[found[0]], found[0], 0, found[1], f" in {place} ({setting})")
        if looks > MOST_LOOKS:
            return
