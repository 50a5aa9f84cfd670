"""The settings of a prediction's input: the rows to score, and the sizes of batches and parts."""

from dataclasses import dataclass

from recapp.errors import ConfigError
from recapp.settings.values import Paths, Positive

SCORE = "score"
"""The column of the scores."""
ROWS_PER_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class ScoringSettings:
    """The rows to score, and the sizes of batches and parts.

    Args:
        input: A directory, a glob, a file, or a list of these.
        columns: The columns of the input to keep beside the scores.
        rows_per_batch: The rows of a batch of one rank.
        rows_per_part: The rows of a score part, a multiple of `rows_per_batch`; None takes a 64th
            of the input, in whole batches, at most 262,144 rows.

    Raises:
        ConfigError: The numbers do not fit together, or a column cannot be kept.
    """

    input: Paths | None = None
    columns: tuple[str, ...] = ()
    rows_per_batch: Positive = ROWS_PER_BATCH
    rows_per_part: Positive | None = None

    def __post_init__(self) -> None:
        size = self.rows_per_batch
        if size < 1:
            raise ConfigError(f"rows_per_batch={size}: 1 or more is allowed")
        part = self.rows_per_part
        if part is not None and (part < size or part % size):
            near = max(1, round(part / size)) * size
            raise ConfigError(
                f"rows_per_part={part}: a part is whole batches, so a multiple of "
                f"rows_per_batch={size} is allowed; set {near}"
            )
        for name in self.columns:
            if name == SCORE:
                raise ConfigError(score_is_kept(name))
            if list(self.columns).count(name) > 1:
                raise ConfigError(f"columns: {name} is named more than once; leave one of them")


def score_is_kept(name: str) -> str:
    """Return the text of the error for a kept column with the name of a column of scores."""
    return (
        f"columns: {name} is the column of the scores, so a column of the input with that name "
        "cannot be kept; leave it out, or rename it in the input"
    )
