"""A format of a user's own: columns of fixed width without delimiters, in lines of equal length."""

from dataclasses import dataclass

import pyarrow as pa

from recapp.dataset.data_file import Facts, Format


@dataclass(frozen=True)
class FixedWidth(Format):
    """Read lines of columns whose widths are given."""

    widths: str
    name: str = "fixed width"
    suffixes: tuple[str, ...] = (".fix",)

    @property
    def columns(self):
        """The names and widths of the columns."""
        return {name: int(width) for name, width in (w.split(":") for w in self.widths.split())}

    @property
    def line(self):
        """The bytes of a line."""
        return sum(self.columns.values()) + 1

    def knows(self, begin):
        return False

    def facts(self, path, stamp):
        return Facts(
            pa.schema([(name, pa.string()) for name in self.columns]), [stamp.size // self.line]
        )

    def chunks(self, file, row_group):
        with open(file.path, "rb") as opened:
            lines = opened.read().decode().splitlines()
        columns = {}
        at = 0
        for name, width in self.columns.items():
            columns[name] = [line[at : at + width].strip() for line in lines]
            at += width
        yield pa.record_batch(columns).select(file.read or list(columns)[:1])

    def marks(self, path):
        with open(path, "rb") as opened:
            return opened.read()
