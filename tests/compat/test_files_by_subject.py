"""The room's own page."""

import re
from pathlib import Path

from recapp import compat


def test_the_page_of_the_room_names_every_file():
    rows = [line.split("|")[2] for line in compat.__doc__.splitlines() if line.startswith("| ")]
    named = [name for row in rows[1:] for name in re.findall(r"\w+", row)]
    files = [path.stem for path in Path(compat.__file__).parent.rglob("*.py")]
    assert sorted(named) == sorted(set(files) - {"__init__"})
