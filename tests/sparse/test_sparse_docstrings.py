"""The examples in the docstrings of the jagged tensors are run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["jagged_tensor", "keyed_jagged_tensor"])
def test_the_examples_in_the_docstrings_are_true(name):
    result = doctest.testmod(importlib.import_module(f"recapp.sparse.{name}"))
    assert result.attempted and not result.failed
