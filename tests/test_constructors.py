"""Constructors that settings name: whatever one raises is a line that names its setting."""

import pytest

from recapp.errors import ConfigError
from recapp.run.constructors import make
from recapp.settings.records import Constructor


class Anything(Exception):
    """A package's own kind of error."""


def fails(error):
    raise error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("too\n small"), "too small"),
        (ImportError("no mlflow"), "no mlflow"),
        (KeyError("betas"), "KeyError: 'betas' (FILE:15)"),
        (AssertionError(), "AssertionError (FILE:15)"),
        (RuntimeError("of torch"), "RuntimeError: of torch (FILE:15)"),
        (OSError(13, "Denied"), "PermissionError: [Errno 13] Denied (FILE:15)"),
        (Anything("a\nb"), "Anything: a b (FILE:15)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_of_a_constructor_is_one_line_that_names_the_setting(error, says):
    target = f"{__name__}.fails"
    with pytest.raises(ConfigError) as caught:
        make(Constructor(target, {"error": error}), "logger.mine")
    assert str(caught.value) == f"logger.mine ({target}): {says.replace('FILE', __file__)}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = {}['a']", "KeyError: 'a' (FILE:1)"),
        ("import nowhere", "no such constructor: "),
        ("x = (", "SyntaxError: '(' was never closed (own_broken.py, line 1) ("),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(text, says, tmp_path, monkeypatch):
    (tmp_path / "own_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        make(Constructor("own_broken.Logger"), "logger.mine")
    assert "\n" not in str(caught.value)
    assert says.replace("FILE", str(tmp_path / "own_broken.py")) in str(caught.value)
