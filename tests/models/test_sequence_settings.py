"""Settings of models with sequences that do not fit the tables are refused before ranks start."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import recipe

from recapp.errors import ConfigError
from recapp.run.run_checks import check_training

ROWS = 64


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    path = tmp_path_factory.mktemp("history") / "logs.parquet"
    item = np.arange(ROWS) % 7
    history = pa.array([[1, 2]] * ROWS, pa.list_(pa.int64()))
    columns = {"label": item % 2, "item": item, "again": item, "history": history}
    pq.write_table(pa.table(columns), path)
    return path


def checked(logs, model, *more):
    wanted = (
        *(f"model={model}", "dataset=custom", f"dataset.path={logs}", "tables.dim=4"),
        *("dataset.sparse=[item,again,history]", "dataset.batch_size=16", "dataset.lanes=4"),
        *("dataset.val_batch_size=16", "tables.max_rows=9"),
    )
    check_training(recipe("train", (*wanted, *more)))


SHARED = ("tables.sequences=[history]", "tables.shared={history: item}")


@pytest.mark.parametrize("model", ["din", "bst"])
def test_a_sequence_of_the_items_table_needs_no_other_setting(model, logs):
    checked(logs, model, *SHARED)


@pytest.mark.parametrize("model", ["din", "bst"])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            (),
            "needs embedding_collection, and the tables have no lookups that do not pool: tables.",
        ),
        (("tables.sequences=[history]",), "model.history=null: no column that pools its ids reads"),
        (
            (SHARED[0], "tables.shared={history: item, again: item}"),
            "model.history=null: item and again read the table of the sequence history: name the",
        ),
        ((*SHARED, "model.history={history: itme}"), "itme is no column that pools its ids; did "),
        (
            (SHARED[0], "dataset.table_dims={history: 8}", "model.history={history: item}"),
            "their vectors have 8 and 4 columns: let them share a table, tables.shared={history: i",
        ),
    ],
)
def test_a_model_without_its_sequence_is_refused_in_one_line(model, more, words, logs):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        checked(logs, model, *more)
    assert "\n" not in str(error.value)


def test_heads_that_do_not_divide_a_step_are_refused(logs):
    words = "model.heads=8: must divide the 4 columns of an item + model.position_dim=3, together=7"
    with pytest.raises(ConfigError, match=re.escape(words)):
        checked(logs, "bst", *SHARED, "model.position_dim=3")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model=autoint model.heads=5", "model.heads=5: must divide model.width=64"),
        ("model=finalmlp model.heads=3", r"model.heads=3: must divide model.first_layers[-1]=400"),
        ("model=finalnet model.first_layers=[3]", "3 is odd, and model.residual=concat makes"),
        ("model=rankmixer model.tokens=7", "model.tokens=7: must divide model.width=128"),
        (
            "model=wukong dataset.table_dims={again: 8}",
            "the interaction of Wukong takes vectors of",
        ),
        ("model=masknet model.form=both", "model.form=both: "),
    ],
)
def test_settings_that_no_layer_can_take_are_refused(setting, words, logs):
    model, setting = setting.removeprefix("model=").split(" ", 1)
    with pytest.raises(ConfigError, match=re.escape(words)):
        checked(logs, model, setting)
