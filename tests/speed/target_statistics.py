"""Statistics of the label by id, for models that take no ids, such as boosted trees.

    ids, labels in the order of time -> for each id: log count before, share of positives before

A training row gets the statistics of the rows before it, never its own label; a later row those of
all training rows.

Shapes: N rows, M training rows, S features of one id, K columns.
"""

import numpy as np
import numpy.typing as npt

from recapp.dataset.decode import Float32Array, Int64Array

PRIOR_ROWS = 10.0
"""Rows of the mean label that are added to each id."""


def target_statistics(ids_NS: Int64Array, labels_M: npt.NDArray[np.floating]) -> Float32Array:
    """Return two columns for each feature, [N, 2 S]: log(1 + rows) and the share of positives.

    Args:
        ids_NS: The ids of all rows, the training rows first.
        labels_M: The labels of the training rows, 0 or 1.
    """
    fitted = len(labels_M)
    mean = float(labels_M.mean()) if fitted else 0.0
    found = np.empty((len(ids_NS), 2 * ids_NS.shape[1]), np.float32)
    for k in range(ids_NS.shape[1]):
        _, place_N = np.unique(ids_NS[:, k], return_inverse=True)
        rows_N = np.empty(len(ids_NS))
        clicks_N = np.empty(len(ids_NS))
        rows_N[:fitted], clicks_N[:fitted] = _before(place_N[:fitted], labels_M)
        size = int(place_N.max()) + 1 if len(place_N) else 0
        of_id = np.bincount(place_N[:fitted], minlength=size)
        clicks = np.bincount(place_N[:fitted], weights=labels_M, minlength=size)
        rows_N[fitted:] = of_id[place_N[fitted:]]
        clicks_N[fitted:] = clicks[place_N[fitted:]]
        found[:, 2 * k] = np.log1p(rows_N)
        found[:, 2 * k + 1] = (clicks_N + PRIOR_ROWS * mean) / (rows_N + PRIOR_ROWS)
    return found


def _before(
    place_M: Int64Array, labels_M: npt.NDArray[np.floating]
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
    """Return the number of earlier rows with the id of each row, and the sum of their labels."""
    order = np.argsort(place_M, kind="stable")
    sorted_place = place_M[order]
    starts = np.flatnonzero(np.r_[True, sorted_place[1:] != sorted_place[:-1]])
    lengths = np.diff(np.r_[starts, len(order)])
    labels_M = labels_M.astype(np.float64)  # float32 would count to 2^24
    sums = np.cumsum(labels_M[order]) - labels_M[order]
    rows = np.empty(len(order))
    clicks = np.empty(len(order))
    rows[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    clicks[order] = sums - np.repeat(sums[starts], lengths) if len(order) else sums
    return rows, clicks
