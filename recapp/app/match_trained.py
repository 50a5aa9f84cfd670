"""A recipe that fits a trained model: ids of the same text, tables of the same size."""

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from recapp.console import note, short_path
from recapp.processes.rank_environment import external_rank
from recapp.recipe.recipe import Recipe
from recapp.tables.table_settings import TablesOfDataset

if TYPE_CHECKING:
    from recapp.stored.manifest import Manifest

R = TypeVar("R", bound=Recipe)


def match_stored(recipe: R, manifest: "Manifest") -> R:
    """Return a recipe under which a stored model reads the same ids into tables of the same size.

    Tables that would be sized by the ids of the data set keep the stored sizes. A checkpoint of an
    earlier recapp does not say how it read text ids; it read all of them as hexadecimal, so they
    are read in this way again, which is noted.

    Args:
        recipe: That of a run that loads the model.
        manifest: That of the checkpoint or artefact.

    Raises:
        CheckpointError: Text ids would be read otherwise than they were in training.
    """
    from recapp.dataset.schema import TEXT_HASH

    sparse = recipe.schema.sparse
    stored = manifest.info.get("ids")
    if "ids" not in manifest.info:
        stored = {"text": TEXT_HASH, "hex": list(sparse)}
        hex = recipe.dataset.hex or sparse
        recipe = replace(recipe, dataset=replace(recipe.dataset, hex=hex))
        if not external_rank():
            note(
                f"{short_path(manifest.folder)} does not say how text ids were read: "
                "it was as hexadecimal, so it is now"
            )
    if stored is not None:
        recipe.schema.check_id_encoding(stored, str(manifest.folder))
    rows = {name: shape.rows for name, shape in manifest.shapes.items() if shape.rows}
    dataset = recipe.dataset
    sized = dataset.table_rows or dataset.cardinality or dataset.generate
    known = all(name in rows for name in sparse)
    if sized or not known or not isinstance(recipe.tables, TablesOfDataset):
        return recipe
    return recipe.sized([rows[name] for name in sparse])
