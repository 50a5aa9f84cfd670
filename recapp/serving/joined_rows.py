"""Join the raw rows of several requests into one batch.

A batch has a fixed cost of a good half of a millisecond (39 columns are found, checked and
decoded). So requests whose columns have the same types, usually those of one kind of client, are
joined before they are decoded, not after.
"""

from collections.abc import Sequence
from itertools import groupby

import pyarrow as pa

from recapp.dataset.collate import join_batches
from recapp.dataset.raw_rows import RawTable
from recapp.inference.scorer import Scorer
from recapp.sparse.batch import Batch


def batch_of(tables: Sequence[RawTable], scorer: Scorer) -> Batch:
    """Return the rows of several tables, in their order, as one batch.

    Args:
        tables: Raw rows.
        scorer: The model that decodes the rows.

    Raises:
        DataError: A value cannot be read.
    """
    alike = (list(group) for _, group in groupby(tables, key=lambda table: table.schema))
    return join_batches(
        [scorer.batch(group[0] if len(group) == 1 else pa.concat_tables(group)) for group in alike]
    )
