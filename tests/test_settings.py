"""The schema of settings: it is what `conf/` holds, what it refuses, and what `--help` says."""

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings, strategies
from jobs import recipe
from omegaconf import OmegaConf
from tiers import one_of

from recapp import train
from recapp.cli.command import run
from recapp.cli.compose import ADDED_GROUPS, compose, to_plain
from recapp.cli.help_text import FIRST_WEEK, comments_of
from recapp.errors import ConfigError, suggest
from recapp.run.recipe import COMMANDS, read_settings, recipe_of
from recapp.run.run_checks import check_training
from recapp.settings.option_files import is_group
from recapp.settings.records import OF_TABLES_THAT_GROW, fields_of, names_of, records_of
from recapp.settings.records import to_plain as plain_of
from recapp.settings.values import Within, read
from recapp.sharding.sharding_types import SHARDING_TYPES, ShardingType
from recapp.tables.config import EmbeddingBagConfig
from recapp.tables.positions import DynamicRows
from recapp.tables.table_settings import ListedTable
from recapp.trainer.trainer_settings import TrainerSettings

CONF = Path(__file__).parents[1] / "conf"
MAPPINGS = (
    "topology.hardware",
    "dataset.table_dims",
    "dataset.text.times",
    "dataset.times",
    "plan.tables",
    "plan.sharding_types",
    "settings_of",
    "histories",
    "sizes",
)
FREE = (
    *MAPPINGS,
    "model",
    "task",
    "optimizer.dense",
    "optimizer.sparse",
    "optimizer.schedule",
    "logger",
    "callbacks",
)


once = cache(compose)


def composed(command, *overrides):
    """The settings of a command, plain, as Hydra composes them."""
    config = once(command, overrides)
    return to_plain(
        OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]), whole=False
    )


def leaves(config, prefix="", free=FREE):
    """The settings in a file, dotted; what stands below a constructor or a free mapping is its
    own.
    """
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in free:
            yield from leaves(value, f"{name}.", free)
        else:
            yield name


def innermost(names):
    """Those that are no groups of others."""
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def written(group):
    """The settings that the options of a group write down."""
    found = set()
    for path in sorted((CONF / group).glob("*.yaml")):
        content = yaml.safe_load(path.read_text()) or {}
        content.pop("defaults", None)
        found |= set(leaves({group: content}))
    return innermost(
        {name for name in found if not any(name.startswith(f"{free}.") for free in FREE)}
    )


# ---- the schema is what conf holds


def test_the_settings_of_the_schema_are_those_that_conf_holds():
    for command in COMMANDS:
        config = composed(command)
        assert set(leaves(config)) <= set(names_of(COMMANDS[command])), command
        for group in (name for name in [*config, "plan"] if (CONF / name).is_dir()):
            if group not in FREE and group in names_of(COMMANDS[command]):
                assert written(group) == innermost(
                    {name for name in names_of(COMMANDS[command]) if name.startswith(f"{group}.")}
                ), group


def test_the_settings_of_a_command_are_those_of_its_file():
    for command, kind in COMMANDS.items():
        own = set(fields_of(kind)) - {"plan"}
        assert own == set(composed(command)), command


@pytest.mark.parametrize("command", COMMANDS)
def test_what_conf_holds_is_allowed_and_complete(command):
    config = composed(command)
    if "???" not in str(config):  # which must be given
        for read in (read_settings, recipe_of):
            assert plain_of(read(config, command)) == config | {"choices": {}}


@pytest.mark.parametrize(
    "group",
    one_of(
        2,
        ["dataset", "tables", "optimizer", "plan", "topology", "logger", "callbacks", "experiment"],
    ),
)
def test_every_option_is_allowed(group):
    for path in (CONF / group).glob("*.yaml"):
        config = composed("train", f"{'+' if group == 'plan' else ''}{group}={path.stem}")
        if "???" not in str(config):
            for read in (read_settings, recipe_of):
                assert plain_of(read(config, "train")) == config | {"choices": {}}


@pytest.mark.parametrize("command", ["train", "export"])
def test_every_group_but_those_that_are_added_has_a_default(command):
    groups = {str(path.parent.relative_to(CONF)) for path in CONF.rglob("*/*.yaml")}
    chosen = compose(command).hydra.runtime.choices
    defaults = {group for group in chosen if not group.startswith("hydra/")}
    assert groups - defaults == {*ADDED_GROUPS}


def test_an_absolute_folder_of_the_command_line_is_no_group(tmp_path):
    (tmp_path / "model").mkdir()
    folders = (tmp_path,)
    assert is_group("model", folders) and not is_group(str(tmp_path / "model"), folders)


def test_words_stand_for_what_the_code_knows():
    assert set(OF_TABLES_THAT_GROW) == {field.name for field in dataclasses.fields(DynamicRows)}
    assert set(SHARDING_TYPES) == {name.value for name in ShardingType}
    bounds = {"max_key", "collection"}
    of_programs = {"init_fn", "need_pos"}
    assert {field.name for field in dataclasses.fields(ListedTable)} == {
        field.name for field in dataclasses.fields(EmbeddingBagConfig)
    } - of_programs - {"member_of"} | bounds


def test_what_recapp_sets_itself_is_what_lightning_takes():
    import inspect

    from lightning.pytorch import Trainer as Lightnings

    assert set(TrainerSettings.refused) <= set(inspect.signature(Lightnings).parameters)


# ---- what is refused, before any rank is started


def refuse_on_rank_0(path, *_, **__):
    """What rank 0 does with the settings of a command before it trains."""
    check_training(recipe_of(yaml.safe_load(Path(path).read_text()), "train"))
    pytest.fail("nothing was refused")


@pytest.fixture
def line(tmp_path, monkeypatch, capfd):
    """`line(*arguments)`: the one line of `python -m recapp.train`, which must not train."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("recapp.cli.job.launch", refuse_on_rank_0)

    def say(*arguments):
        assert train.main(["hydra.run.dir=run", *arguments]) == 1, arguments
        err = capfd.readouterr().err
        assert len(err.splitlines()) == 1 and err.startswith("error: "), err
        return err.removeprefix("error: ").rstrip()

    return say


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            ["dataset=sample", "++dataset.table_rows={user: 400}"],
            "dataset.table_rows={user: 400}: the chosen options have another kind: give a list, "
            "dataset.table_rows=[...]",
        ),
        (
            ["optimizer.sparse=[1, 2]"],
            "optimizer.sparse=[1, 2]: the chosen options have another kind: give a mapping, "
            "optimizer.sparse={NAME: ...}",
        ),
        (
            ["--config-dir", "mine", "experiment=rows"],
            "In 'experiment/rows': a setting is a mapping where the chosen options have a list, or",
        ),
        (["tables=[1]"], "tables=[1]: choose one of "),
        (["+plan=[a,b]"], "+plan=[a,b]: choose one of "),
    ],
)
def test_a_mapping_for_a_list_and_the_reverse_are_one_line(line, tmp_path, settings, says):
    (tmp_path / "mine/experiment").mkdir(parents=True)
    (tmp_path / "mine/experiment/rows.yaml").write_text(
        "# @package _global_\ndataset:\n  table_rows: {user: 400}\n"
    )
    assert line(*settings).startswith(says)


@pytest.mark.parametrize(
    "text", ["${oc.env:HOOK}", "x/${oc.env:HOOK,none}", "${oc.decode:${oc.env:HOOK}}"]
)
def test_a_text_of_the_environment_is_no_argument_of_a_class(line, monkeypatch, text):
    monkeypatch.setenv("HOOK", "s3cret")
    said = line(f"+callbacks.mine={{_target_: own.Notify, to: [{{url: '{text}'}}]}}")
    assert said.startswith("callbacks.mine.to.url=${oc.env:HOOK}: its value would be stored")
    assert 'let the class read os.environ["HOOK"]' in said and "s3cret" not in said


def test_settings_that_hold_no_secret_take_texts_of_the_environment(monkeypatch):
    monkeypatch.setenv("LOGS", "/logs")
    found = recipe(
        "train",
        [
            "dataset.path=${oc.env:LOGS}",
            "+callbacks.mine={_target_: lightning.pytorch.callbacks.ModelCheckpoint, "
            "filename: '\\${oc.env:LOGS}'}",
        ],
    )
    assert found.dataset.path == "/logs"
    assert found.callbacks["mine"].arguments["filename"] == "${oc.env:LOGS}"


@pytest.mark.parametrize(
    ("argument", "says"),
    one_of(
        3,
        [
            (
                "+tables.l2=.01",
                "unknown setting tables.l2: known: tables.collections, tables.data_type, ",
            ),
            ("+dataset.generate.negatives=4", "unknown setting dataset.generate.negatives"),
            ("+nothing=1", "unknown setting nothing"),
            (
                "++trainer.max_stepz=1",
                "unknown setting trainer.max_stepz: did you mean trainer.max_steps",
            ),
            ("+plan.columns=4", "unknown setting plan.columns: did you mean plan.column_width"),
            (
                "+optimizer.dense.betta=1",
                "unknown setting optimizer.dense.betta: did you mean betas?",
            ),
            ("+model.depth=3", "unknown setting model.depth: known: bottom_layers, top_layers"),
            (
                "+callbacks.checkpoint._partial_=true",
                "unknown setting callbacks.checkpoint._partial_",
            ),
            ("tables.dynamic.max_rows=64", "only dynamic tables have this setting: add"),
            ("+tables.dynamic.max_row=64", "unknown setting tables.dynamic.max_row: did you mean"),
            ("tables.dynamic={max_rows: 64}", "is said of tables that do not grow: take tables=dy"),
            ("tables.num_embeddings=dynamic", "tables.max_rows=200000: limits hashed tables, and"),
            (
                "optimizer.sparse.tables.C3={lr: 0.1}",
                'tables are named in a mapping: "optimizer.sparse.tables={C3: {rule: sgd}}"',
            ),
            ("plan.tables={C1: row_wise}", "so it needs a plus: +plan.tables=..."),
            ("tables.dim=sixteen", "tables.dim=sixteen: must be a whole number of at least 1"),
            (
                "seed=99999999999999999999999",
                "seed=99999999999999999999999: must be a number of 64 bits",
            ),
            (
                "dataset.cardinality=500",
                "dataset.cardinality=500: must be a list of whole numbers of at least 1",
            ),
            ("dataset.cardinality={user: 500}", "dataset.cardinality={user: 500}: must be a list"),
            ("dataset.sparse=user", "dataset.sparse=user: must be a list of names, such as [user]"),
            ("dataset.crosses=[C1,C2]", "[C1]; crosses are lists of lists, [[C1, C2]]"),
            ("tables.dim=[8,16]", "; dataset.table_dims={C1: 8} sets single tables"),
            ("dataset.periodic={I1: 0}", "at least 1e-30 and at most 1e+30"),
            ("+dataset.negative_samples=4", "recapp makes no negative samples: write them into"),
            ("model=two_tower", "recapp has no model for retrieval or the next item, and one of"),
            ("task=multi_task", "a task of several labels, or with a loss of your own, is a class"),
            ("dataset.vectors={I1: 4}", "I1 named more than once (dataset.dense, dataset.vectors)"),
            (
                "dataset.weight={label: I1, nope: I2}",
                "dataset.weight names nope, which is no",
            ),
            (
                "metrics.names=[recall]",
                "+metrics.extra.recall._target_=... adds one of",
            ),
            (
                "dataset=7",
                "dataset=7: choose one of avazu, avazu_csv, criteo_kaggle, custom, generated, "
                "movielens, movielens_1m, open_bandit, open_bandit_csv, sample",
            ),
            ("optimizer.dense.lr=fast", "optimizer.dense.lr=fast: must be a number"),
            (
                "optimizer.dense.lr=-1",
                "optimizer.dense (torch.optim.Adam): Invalid learning rate: -1",
            ),
            ("optimizer.sparse.lr=-1", "optimizer.sparse.lr=-1: must be a number of at least 0"),
            (
                "trainer.limit_val_batches=lots",
                "must be a whole number of at least 0, or a number of at least 0 and at most 1, or "
                "null",
            ),
            ("+trainer.num_sanity_val_steps=2", "trainer.num_sanity_val_steps=2: cannot be set: "),
            ("+trainer.strategy=ddp", "trainer.strategy=ddp: cannot be set: "),
            (
                "+trainer.logger=true",
                "trainer.logger=true: cannot be set: choose loggers by logger=...",
            ),
            ("+trainer.enable_model_summary=true", "cannot be set"),
            ("+trainer.gradient_clip_value=1", "did you mean trainer.gradient_clip_val"),
            (
                "+trainer.fast_dev_run=maybe",
                "trainer.fast_dev_run=maybe: must be a whole number, or true or false",
            ),
            ("trainer.precision=16-mixed", "use bf16-mixed"),
            (
                "engine.clip_tables=true",
                "engine.clip_tables=true: trainer.gradient_clip_val=null clips nothing",
            ),
            ("trainer.gradient_clip_algorithm=norms", "norms: did you mean norm?"),
            (
                "trainer.val_check_interval=1.5",
                "must be a whole number of at least 1, or a number above 0 and at most 1, or null",
            ),
            (
                "metrics.names=[auc,ndcg]",
                "ndcg: known: auc, calibration, lift, log_loss, mae, normalized_entropy",
            ),
            ("dataset.val_share=1.5", "dataset.val_share=1.5: must be a share of the rows"),
            (
                "dataset.val_share=half",
                "dataset.val_share=half: must be a share of the rows, from 0 to less than 1",
            ),
            ("trainer=3", "trainer=3: choose one of default"),
            ("experiment=nope", "experiment=nope: there is no such option; "),
            (
                "dataset=null",
                "dataset=null: choose one of avazu, avazu_csv, criteo_kaggle, custom, generated, "
                "movielens, movielens_1m, open_bandit, open_bandit_csv, sample",
            ),
            ("+experiment=nope", "experiment=nope: there is no such option; "),
            (
                "trainer.strategy=ddp",
                "trainer.strategy: cannot be set: recapp's own shards the tables",
            ),
            ("trainer.profiler=simple", "needs a plus: +trainer.profiler=..."),
            (
                "dataset.sparse=[C1]",
                "dataset.sparse=[C1]: dataset.naming=criteo reads all columns",
            ),
            ("metrics.names=[]", "metrics.names=[]: name at least one"),
            ("dataset.batch_size=1" + 400 * "0", "must be a number of 64 bits"),
            ("tables.dim=1000000000000", "at most 2147483647"),
            ("launch.timeout=1e30", "at most 31536000"),
            ("optimizer.sparse.eps=-1", "optimizer.sparse.eps=-1: must be a number of at least 0"),
            (
                "trainer.check_val_every_n_epoch=0",
                "trainer.check_val_every_n_epoch=0: must be a whole number of at least 1",
            ),
            (
                "dataset.scale=2",
                "dataset.scale=2: must be a fraction above 0 and at most 1, such as 1/1000",
            ),
            (
                "dataset.scale=small",
                "dataset.scale=small: must be a fraction above 0 and at",
            ),
            (
                "dataset.generate.positives=0",
                "dataset.generate.positives=0: must be a number above",
            ),
            ("+logger.mine=3", "logger.mine=3: must name a constructor"),
            (
                "+logger.mine._target_=nowhere.Logger",
                "no such constructor: there is no module nowhere",
            ),
        ],
    ),
)
def test_a_wrong_setting_is_refused_in_one_line_before_ranks_start(line, argument, says):
    assert says in line(argument)


@pytest.mark.parametrize(
    ("argument", "says"),
    one_of(
        3,
        [
            ("task.pos_weight=0", "task.pos_weight=0: must be a number from 1e-6 to 1e6"),
            (
                "+loss=focal",
                "unknown setting loss: the loss is that of the task, for task=click binary "
                "cross-entropy of the logits (task.focal and others change it); a task of your own "
                "computes any",
            ),
            (
                "+dataset.importance_weights_column=w",
                "unknown setting dataset.importance_weights_column: did you mean dataset.weight",
            ),
            (
                "+metrics.recall={_target_: torchmetrics.Recall}",
                "metrics.names chooses of those of the task, +metrics.extra.NAME._target_=... adds "
                "one of torchmetrics, and a task",
            ),
            ("+metrics.name=[auc]", "unknown setting metrics.name: did you mean metrics.names?"),
            (
                "logger=wandb",
                "logger=wandb: there is no such option; known: csv, csv_and_tensorboard, none, "
                "tensorboard; others are added by +logger.wandb._target_="
                "lightning.pytorch.loggers.WandbLogger, and recapp gives them the run's directory",
            ),
            ("logger=csvs", "logger=csvs: there is no such option; did you mean csv?"),
            (
                "+logger.csv.save_dir=x",
                "logger.csv.save_dir: cannot be set: recapp gives the run's directory, "
                "hydra.run.dir=DIR",
            ),
            (
                "optimizer.schedule._target_=torch.optim.lr_scheduler.StepLR",
                "no schedule is chosen: choose optimizer/schedule=cosine, linear, plateau, "
                "polynomial, reduce_on_plateau or warmup_poly, or name one: "
                '"optimizer.schedule={_target_: torch.optim.lr_scheduler.StepLR, step_size: 1000}"'
                ", or write each of its settings with a plus: +optimizer.schedule._target_=...",
            ),
            (
                "dataset=/my/logs",
                "dataset=/my/logs: there is no such option; known: avazu, avazu_csv, "
                "criteo_kaggle, custom, generated, movielens, movielens_1m, open_bandit, "
                "open_bandit_csv, sample; files of "
                "your own are read by dataset=custom "
                "dataset.path=/my/logs",
            ),
            ("model=my/own", "model=my/own: there is no such option; known: "),
            (
                "trainer.precision=fp16",
                "known: 16-true, 32, 32-true, 64, 64-true, bf16, bf16-mixed, bf16-true; 16-mixed "
                "is refused: tables are updated in backward",
            ),
            (
                "trainer.precision=16-mixed",
                "16-mixed is refused: tables are updated in backward, where the scaled",
            ),
            ("+plan.mode=fast", "plan.mode=fast: known: auto, pooled, unique"),
            ("+plan.mode=uniqe", "did you mean unique? known: auto, pooled, unique"),
            ("trainr.max_stepz=3", "unknown setting trainr.max_stepz: did you mean trainer?"),
        ],
    ),
)
def test_what_recapp_has_not_is_answered_with_what_to_do_instead(line, argument, says):
    assert says in line(argument)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("I1", ["C1", "C2"]),
        ("speed", ["serve", "step"]),
        ("nosuch", ["bench", "train"]),
        ("nope", ["home", "opt"]),
        ("fast", ["auto"]),
    ],
)
def test_a_name_that_is_like_none_is_answered_with_all(name, known):
    assert suggest(name, known) == f"known: {', '.join(known)}"


def test_a_name_that_is_a_part_of_another_is_like_it():
    assert suggest("auc", ["val_auc", "val_loss"]) == "did you mean val_auc?"


def test_a_file_is_a_whole_plan(line):
    assert line("+plan=file", "plan.path=p.yaml", "+plan.mode=auto").startswith(
        "plan.mode: cannot be set together with plan.path"
    )


def test_numbers_that_yaml_reads_otherwise_are_taken_as_they_are_meant():
    config = composed(
        "train",
        "trainer.max_steps=1e3",
        "dataset.label=0",
        "dataset.sparse=[1,2]",
        "dataset.naming=exact",
        "optimizer.dense.lr=1",
    )
    found = read_settings(config, "train")
    assert found.trainer.max_steps == 1000 and type(found.trainer.max_steps) is int
    assert found.dataset.label == "0" and found.dataset.sparse == ("1", "2")


@pytest.mark.parametrize(
    "argument",
    [
        "+trainer.deterministic=true",
        "+trainer.max_time=00:01:00:00",
        "+trainer.profiler=simple",
        "trainer.val_check_interval=0.25",
        "+callbacks.checkpoint.every_n_train_steps=5",
    ],
)
def test_what_lightning_takes_can_be_added(argument):
    read_settings(composed("train", argument), "train")


def test_a_setting_that_a_checkpoint_lacks_has_its_default_and_one_that_is_gone_is_refused():
    stored = composed("train")
    del stored["engine"]["payload"]
    assert read_settings(stored, "train") == read_settings(composed("train"), "train")
    stored["tables"]["l2"] = 0.1
    with pytest.raises(ConfigError, match=r"unknown setting tables\.l2: "):
        read_settings(stored, "train")


# ---- at random


def settings_of_train():
    """(dotted name, annotation) of every setting that a misspelling or a wrong value can be made
    of.
    """

    def walk(kind, prefix):
        for key, (annotation, _) in fields_of(kind).items():
            groups = records_of(annotation)
            for group in groups:
                yield from walk(group, f"{prefix}{key}.")
            if not groups and f"{prefix}{key}" not in FREE:
                yield f"{prefix}{key}", annotation

    present = set(leaves(composed("train")))
    return [
        (name, annotation) for name, annotation in walk(COMMANDS["train"], "") if name in present
    ]


SETTINGS = settings_of_train()
WRONG = ["lots", "[1,[2]]", "{a: {b: 1}}", "true", "-3", "1.5", "1e400", "[]", "nan", "''"]


@strategies.composite
def mistakes(draw):
    """A setting misspelt, with or without a plus, or with a value that its annotation does not
    allow.
    """
    name, annotation = draw(strategies.sampled_from(SETTINGS))
    if draw(strategies.booleans()):
        home, _, leaf = name.rpartition(".")
        number = draw(strategies.integers(0, len(leaf) - 1))
        leaf = draw(
            strategies.sampled_from(
                [
                    leaf[:number] + "q" + leaf[number:],
                    leaf[:number] + "zz" + leaf[number + 1 :],
                    f"{leaf}_x",
                ]
            )
        )
        sign = draw(strategies.sampled_from(["", "+", "++"]))
        value = draw(strategies.sampled_from(["1", "x", "[1]"]))
        return f"{sign}{home}{'.' if home else ''}{leaf}={value}"
    value = draw(
        strategies.sampled_from(
            [value for value in WRONG if not _allowed(yaml.safe_load(value), annotation, name)]
        )
    )
    return f"{name}={value}"


def _allowed(value, annotation, name):
    if name == "dataset.path":
        return not isinstance(value, list | dict | bool) and value != ""
    if name == "dataset.val_share" and value != 1.5:
        return not isinstance(value, list | dict | bool)
    try:
        read(value, annotation, name)
    except ConfigError:
        return False
    return True


def _refused_at_random(tmp_path, examples):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr("recapp.cli.job.launch", refuse_on_rank_0)
        said = []
        patch.setattr("recapp.cli.command.note", said.append)

        @settings(max_examples=examples, deadline=None, database=None)
        @given(mistakes())
        def refused(argument):
            said.clear()
            assert train.main(["hydra.run.dir=run", argument]) == 1, argument
            assert len(said) == 1 and said[0].startswith("error: ") and "\n" not in said[0], (
                argument,
                said,
            )
            seen.append(argument)

        refused()
    return seen


@pytest.mark.full
def test_random_mistakes_are_refused_in_one_line(tmp_path):
    assert len(_refused_at_random(tmp_path, 40)) >= 40


# ---- one value


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [1, -1], ["1", True, 1.5, None]),
        (float, [1, 1.5, 0.0, -3.4e38], ["x", True, float("nan"), float("inf"), 1e300, -1e-300]),
        (Annotated[int, Within(0, 9)], [0, 9], [-1, 10]),
        (Annotated[float, Within(above=0, most=1)], [1, 0.1], [0, 1.1]),
        (Literal["a", "b"] | None, ["a", None], ["c", 1]),
        (list[int] | None, [[], [1], None], [1, ["x"], {}]),
        (dict[str, int], [{}, {"a": 1}], [[], {"a": "x"}]),
        (tuple[float, float], [[1, 2]], [[1], [1, 2, 3]]),
        (Path | None, ["x", None], [[1]]),
        (Any, [1, "x", None], []),
    ],
)
def test_a_value_is_held_against_an_annotation(annotation, good, bad):
    for value in good:
        read(value, annotation, "name")
    for value in bad:
        with pytest.raises(ConfigError, match=r"^name="):
            read(value, annotation, "name")


# ---- help


@pytest.mark.parametrize("command", one_of(3, COMMANDS))
def test_help_has_words_for_every_setting_and_keeps_to_the_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(command, lambda *_: pytest.fail("it ran"), argv=["--help", "all"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    entries = [
        number
        for number, entry in enumerate(lines)
        if entry.startswith("  ") and "=" in entry[2:] and entry[2] not in " (`"
    ]
    for number in entries:
        name = lines[number].strip().partition("=")[0]
        if " " not in name:
            behind = lines[number][34:].strip() or lines[number + 1][34:].strip()
            assert behind, f"no words for {name}"
    for name in leaves(composed(command), free=MAPPINGS):
        assert f"  {name}=" in shown, name


def test_help_of_one_group_shows_its_settings_under_the_option_that_is_said(capsys):
    assert run("train", lambda *_: None, argv=["--help", "dataset=criteo_kaggle"]) == 0
    shown = capsys.readouterr().out
    known = (
        "avazu, avazu_csv, criteo_kaggle, custom, generated, movielens, movielens_1m, open_bandit, "
        "open_bandit_csv, sample"
    )
    assert " ".join(shown.split()).startswith(f"dataset: {known} ")
    assert "dataset.id_rule=hash" in shown and "trainer." not in shown
    assert run("train", lambda *_: None, argv=["-h", "optimizer"]) == 0
    assert "optimizer/schedule: cosine, linear, plateau, polynomial, " in capsys.readouterr().out
    assert run("train", lambda *_: None, argv=["--help", "metricks"]) == 1
    assert (
        capsys.readouterr().err
        == "error: --help metricks: there is no such group; did you mean metrics?\n"
    )


@pytest.mark.parametrize("command", ["train", "eval", "predict", "export"])
def test_help_ends_after_the_first_settings_and_help_all_has_all(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def shown(*words):
        assert run(command, lambda *_: None, argv=words) == 0
        return capsys.readouterr().out

    first, whole = shown("--help"), shown("--help", "all")
    assert max(map(len, first.splitlines())) <= 80 and len(first.splitlines()) <= 100
    assert "--help all" in first and "plan: column_wise" in first and "trainer.devices=" in first
    assert "dataset.lanes" not in first and "dataset.lanes" in whole
    settings = {line for line in first.splitlines() if line.startswith("  ") and "=" in line[:30]}
    assert settings <= set(whole.splitlines())
    if command == "train":
        known = set(re.findall(r"^  ([\w.]+)=", first, re.MULTILINE))
        assert {*FIRST_WEEK, "seed", "ckpt_path"} <= known and "model: autoint, bst," in first


def test_comments_belong_to_the_setting_on_their_line_or_below_them(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "# About it.\n# And more.\ndefaults: [b]\nx: 1   # one,\n       # goes on\n# of y\ny: "
        "[1,\n  2]\n"
        "z:      # a group\n  deep: 'a # b'  # within\n"
    )
    found = comments_of(tmp_path / "a.yaml")
    assert found.about == "About it. And more." and found.parents == ("b",)
    assert found.of == {"x": "one, goes on", "y": "of y", "z": "a group", "z.deep": "within"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["seed=1,x"], "seed=x: must be a whole number"),
        (
            ["seed=range(1,30)", "trainer.max_epochs=1,lots"],
            "trainer.max_epochs=lots: must be a whole number",
        ),
        (["+plan=mixed,row_wise", "+plan.columns=4"], "unknown setting plan.columns"),
        (["+plan=mixed,nope"], "plan=nope"),
        (["+dataset.weights=1,2"], "unknown setting dataset.weights"),
    ],
)
def test_a_value_that_no_job_could_have_is_refused_before_the_first(line, arguments, says):
    assert says in line("-m", *arguments)


@pytest.mark.full
def test_values_of_a_sweep_that_are_right_are_no_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = []
    monkeypatch.setattr(
        "recapp.train.run_recipe",
        lambda recipe, job, module: began.append(recipe.seed) or {},
    )
    train.main(
        ["-m", "seed=range(1,3)", "+plan=glob(t*_wise)", "dataset.label=null,click", "format=json"]
    )
    assert sorted(set(began)) == [1, 2] and len(began) == 2 * 2 * 2


def test_rows_of_tables_by_name_are_told_that_they_are_a_list(line):
    said = line("dataset=custom", "dataset.path=x", "dataset.table_rows={user: 4}")
    assert "null; it has a number for each of dataset.sparse, in that order" in said
