"""Nothing that a checkpoint's settings name is run, imported or looked at before it was judged;
what recapp itself writes passes.
"""

import os
import sys
import time
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import quick_settings
import torch
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from jobs import command
from omegaconf import OmegaConf
from stored import copy

from recapp import eval as evaluation
from recapp import train
from recapp.cli import compose
from recapp.cli.command import stored_recipe
from recapp.cli.stored_recipe import check_generated, recipe_of_stored
from recapp.errors import CheckpointError, ConfigError
from recapp.planner.hardware import read_hardware
from recapp.run.recipe import recipe_of
from recapp.settings.option_files import conf_dir, named_targets
from recapp.settings.records import to_plain
from recapp.sharding.layout import Block
from recapp.stored import trust
from recapp.stored.checkpoint import write_checkpoint
from recapp.stored.manifest import CheckpointManifest, to_json
from recapp.stored.stored_model import read_manifest
from recapp.transport.communicator import Comm

COMMANDS = {"train": train, "eval": evaluation}
HERE = Path(__file__).parent  # where data are, as far as this file looks
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SEEN = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "shutil.rmtree",
    "socket.connect",
    "pickle.find_class",
    "webbrowser.open",
    "os.putenv",
)
canary = {"watching": False, "saw": []}


@pytest.fixture(autouse=True)
def hydra_as_it_is(monkeypatch):
    """What tests keep of Hydra's is pickled, which the canary would see."""
    monkeypatch.setattr(config_loader_impl, "create_defaults_list", quick_settings.list_options)
    merge = "_compose_config_from_defaults_list"
    monkeypatch.setattr(ConfigLoaderImpl, merge, quick_settings.merge_options)


def watch(event, arguments):
    if not canary["watching"]:
        return
    planted = event == "import" and str(arguments[0]).startswith("evil")
    written = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING
    if event in SEEN or planted or written:
        canary["saw"].append((event, arguments))


sys.addaudithook(watch)


@pytest.fixture(scope="module")
def config():
    """The settings of a run, as a checkpoint keeps them."""
    composed = compose.compose(
        "train",
        [
            "optimizer/schedule=warmup_poly",
            "logger=csv_and_tensorboard",
            "callbacks=early_stopping",
        ],
    )
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    return {
        **compose.to_plain(composed),
        "choices": {},
        "dataset": {**compose.to_plain(composed)["dataset"], "path": str(HERE)},
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A whole checkpoint, whose manifest each test writes anew."""
    path = tmp_path_factory.mktemp("trust") / "a.ckpt"
    block = Block("A", "weight", (4, 2), range(4), range(2), torch.zeros(4, 2), True)
    write_checkpoint(path, [block], comm=Comm(), meta={}, manifest={"step": 1})
    return path


@pytest.fixture(scope="module", autouse=True)
def fast_composition():
    """The same few settings are composed hundreds of times. What the homes themselves do when they
    are imported is not looked at.
    """
    for home in trust.slots()[1].homes:
        import_module(home.module)
    whole = compose.compose
    cached = cache(lambda primary, overrides, folders: whole(primary, list(overrides), folders))
    compose.compose = lambda primary, overrides=(), folders=(): cached(
        primary, tuple(overrides), folders
    )
    yield
    compose.compose = whole


def settings_of(name, checkpoint, config, *overrides):
    """What the command makes of a checkpoint with these settings; nothing suspicious may happen
    meanwhile.
    """
    whole = read_manifest(checkpoint)
    stored = CheckpointManifest(
        checkpoint, {"config": config, "step": 1}, whole.files, whole.blocks
    )
    (checkpoint / "manifest.json").write_text(to_json(stored))
    canary["saw"] = []
    canary["watching"] = True
    try:
        said = (f"ckpt_path={checkpoint}", *overrides)
        return to_plain(stored_recipe(checkpoint, name, said, ()))
    finally:
        canary["watching"] = False
        assert canary["saw"] == []


def refusal(name, checkpoint, config, *overrides):
    with pytest.raises(CheckpointError) as raised:
        settings_of(name, checkpoint, config, *overrides)
    assert len(str(raised.value).splitlines()) == 1 and len(str(raised.value)) < 500
    return str(raised.value)


def put(config, path, value):
    """The settings with something else at a dotted path."""
    key, _, rest = path.partition(".")
    if key.isdecimal():
        key = int(key)
        inner = config[:]
    else:
        inner = dict(config)
    inner[key] = put(inner.get(key) or {}, rest, value) if rest else value
    return inner


SLOTS = {
    "optimizer.sparse": {},
    "optimizer.dense": {},
    "optimizer.schedule": {},
    "callbacks.bomb": {},
    "logger.bomb": {},
    "model": {},
    "callbacks.checkpoint": {"monitor": "val_auc"},
}
NESTED = {
    "model.deep": lambda bomb: {"inner": [1, {"x": bomb}]},
    "callbacks.checkpoint.stages": lambda bomb: [[bomb]],
    "dataset.generate": lambda bomb: bomb,
    "metrics.names": lambda bomb: [bomb],
    "topology.x": lambda bomb: {"y": bomb},
    "unknown": lambda bomb: bomb,
}
NASTY = {
    "os.system": {"command": "touch pwned"},
    "posix.system": {"command": "touch pwned"},
    "subprocess.Popen": {"args": ["touch", "pwned"]},
    "subprocess.run": {"args": ["touch", "pwned"]},
    "builtins.eval": {"_": "1"},
    "builtins.exec": {},
    "builtins.__import__": {"name": "evil"},
    "builtins.open": {"file": "pwned", "mode": "w"},
    "logging.basicConfig": {"filename": "pwned", "filemode": "w", "force": True},
    "logging.FileHandler": {"filename": "pwned"},
    "torch.load": {"f": "evil.pkl", "weights_only": False},
    "torch.serialization.load": {"f": "evil.pkl", "weights_only": False},
    "torch.hub.load": {"repo_or_dir": "a/b", "model": "c"},
    "torch.save": {"obj": 1, "f": "pwned"},
    "torch.ops.load_library": {"path": "evil.so"},
    "torch.classes.load_library": {"path": "x"},
    "torch.utils.cpp_extension.load_inline": {"name": "x"},
    "torch.jit.load": {"f": "evil.pt"},
    "torch.fx.GraphModule": {},
    "torch.package.PackageImporter": {"file_or_buffer": "x"},
    "torch._C._cuda_init": {},
    "torch.compile": {},
    "torch.distributed.nn.RemoteModule": {},
    "torch.nn.modules.module.register_module_forward_hook": {},
    "torch.nn.init.zeros_": {},
    "torch.optim.Adam.__init__.__globals__": {},
    "torch.optim.adam.torch.load": {},
    "torch.optim.lr_scheduler.partial": {},
    "torch.optim.os.system": {},
    "torch.optim.optimizer.functools.partial": {},
    "torch.nn.torch.load": {},
    "torch.optim": {},
    "torch.optim.": {},
    ".torch.optim.Adam": {},
    "torch.optim..Adam": {},
    "torch.optim.Adam ": {},
    "torch.optim. Adam": {},
    "torch.optim.adam.Optimizer.register_optimizer_step_pre_hook": {},
    "torch.optim.optimizer.register_optimizer_step_pre_hook": {},
    "hydra.utils.instantiate": {"config": {"_target_": "os.system", "command": "touch pwned"}},
    "hydra.utils.call": {},
    "hydra.utils.get_method": {"path": "os.system"},
    "omegaconf.OmegaConf.register_new_resolver": {"name": "x"},
    "recapp.run.constructors.make": {"settings": {}, "setting": "x"},
    "recapp.settings.records.import_module": {"name": "evil"},
    "recapp.run.run_rows.write_generated": {},
    "recapp.stored.checkpoint.remove_checkpoint": {"path": "a.ckpt"},
    "recapp.stored.store.LOCAL.remove": {"path": "a.ckpt"},
    "recapp.optim.rules.RowRule": {},
    "recapp.optim.rules.math.sqrt": {},
    "recapp.optim.rules._sgd": {},
    "recapp.models.layers.suggest": {},
    "recapp.models.published_dlrm.MLP": {},
    "recapp.trainer.curves.os.remove": {"path": "x"},
    "recapp.trainer.curves.CSVCurves.save": {},
    "functools.partial": {"func": "x"},
    "importlib.import_module": {"name": "evil"},
    "pickle.loads": {},
    "runpy.run_path": {"path_name": "x"},
    "lightning.pytorch.cli.LightningCLI": {},
    "lightning.pytorch.cli.instantiate_class": {},
    "lightning.pytorch.callbacks.os.system": {},
    "lightning.pytorch.callbacks.model_checkpoint.shutil.rmtree": {"path": "x"},
    "lightning.fabric.utilities.cloud_io._load": {},
    "lightning.pytorch.loggers.logger.rank_zero_experiment": {},
    "webbrowser.open": {"url": "x"},
    "shutil.rmtree": {"path": "x"},
    "os.remove": {"path": "x"},
    "ctypes.CDLL": {"name": "evil.so"},
    "multiprocessing.Process": {},
    "evil.Model": {},
    "evil.optim.Adam": {},
    "evil": {},
    "torch.evil.Adam": {},
    "lightning.evil.Callback": {},
    "torchmetrics.functional.accuracy": {},
    "__main__.x": {},
    "": {},
    "numpy.load": {"file": "x", "allow_pickle": True},
    "yaml.unsafe_load": {"stream": "x"},
    "collections.OrderedDict": {},
    "\n": {},
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A module that writes a file when it is imported, with classes of the right names, in front of
    all others.
    """
    for name in ("evil.py", "evil_pkg.py"):
        (tmp_path / name).write_text(
            "open('pwned', 'w')\nimport torch\nclass Model(torch.nn.Module): ...\nclass "
            "Adam(torch.optim.Adam): ...\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "pwned").exists() and "evil" not in sys.modules


PLACES = 4  # of each target, one of them in the sparse optimizer


def test_there_are_enough_hostile_settings():
    assert len(NASTY) * (PLACES + 1) >= 400


@pytest.mark.parametrize(
    "target",
    [t if i % 3 == 0 else pytest.param(t, marks=pytest.mark.full) for i, t in enumerate(NASTY)],
)
def test_what_a_file_names_is_refused_in_one_line_and_never_run(
    planted, checkpoint, config, target
):
    bomb = {"_target_": target, **NASTY[target]}
    number = list(NASTY).index(target)
    first, *others = SLOTS
    for i, slot in enumerate(
        (first, *(others[(number + i) % len(others)] for i in range(PLACES - 1)))
    ):
        name = list(COMMANDS)[i % 2]
        hostile = put(config, slot, {**SLOTS[slot], **bomb})
        if slot == "logger.bomb":  # only training makes loggers
            name = "train"
            assert settings_of("eval", checkpoint, hostile)["logger"] == {}
        said = refusal(name, checkpoint, hostile)
        assert slot in said or "not plain" in said
    place, inside = list(NESTED.items())[number % len(NESTED)]
    refusal(list(COMMANDS)[number % 2], checkpoint, put(config, place, inside(bomb)))


@pytest.mark.parametrize(
    ("slot", "target"),
    [
        ("optimizer.sparse", "torch.optim.Adam"),
        ("optimizer.sparse", "recapp.optim.schedule.warmup_poly"),
        ("optimizer.dense", "recapp.optim.rules.sgd"),
        ("optimizer.dense", "torch.nn.Linear"),
        ("optimizer.schedule", "torch.optim.SGD"),
        ("callbacks.x", "lightning.pytorch.loggers.CSVLogger"),
        ("callbacks.x", "torch.nn.ReLU"),
        ("model", "torch.nn.Identity"),
        ("logger.x", "lightning.pytorch.callbacks.Timer"),
        ("callbacks.x", "torchmetrics.MeanMetric"),
    ],
)
def test_a_class_that_belongs_elsewhere_is_refused(checkpoint, config, slot, target):
    said = refusal("train", checkpoint, put(config, slot, {"_target_": target}))
    assert said.startswith(
        f"{slot}._target_={target} stands in the checkpoint and is not run: only "
    )


@pytest.mark.parametrize(
    "value",
    [
        {"_target_": ["os.system"]},
        {"_target_": 5},
        {"_target_": None},
        {"_target_": {"_target_": "os.system"}},
        {"_args_": [1]},
        {"_partial_": True},
        {"_recursive_": True},
        {"x": "${oc.env:HOME}"},
        {"x": ["${oc.decode:x}"]},
        {"${oc.env:HOME}": 1},
        {"_target_": "${oc.env:HOME}"},
        {"dirpath": "/etc"},
        {"dirpath": "~/x"},
        {"filename": "../../x"},
        {"uri": "file:/etc"},
        {"dirpath": "local:///x"},
        {"tracking_uri": "http://x"},
        {"dirpath": "simplecache::x"},
    ],
)
def test_settings_that_are_not_plain_are_refused(checkpoint, config, value):
    for name in COMMANDS:
        assert "not plain: callbacks.checkpoint." in refusal(
            name, checkpoint, put(config, "callbacks.checkpoint", value)
        )


def test_references_are_texts_like_others_outside_of_callbacks_and_loggers(checkpoint, config):
    text = "/logs/${oc.env:HOME}/\\${seed}"
    named = put(config, "dataset", {**config["dataset"], "path": text, "label": "${seed}"})
    for name in COMMANDS:
        dataset = settings_of(name, checkpoint, named)["dataset"]
        assert (dataset["path"], dataset["label"]) == (text, "${seed}")
    manifest = read_manifest(checkpoint)
    assert to_plain(recipe_of_stored(manifest))["dataset"]["path"] == text


def test_settings_that_are_nested_for_ever_are_refused(checkpoint, config):
    deep = {}
    for _ in range(40):
        deep = {"x": [deep]}
    assert "nested too deeply" in refusal("train", checkpoint, put(config, "model", deep))


@pytest.mark.parametrize("wrong", [[], 5, "x", None, {"choices": []}])
def test_what_is_no_settings_at_all_is_refused(checkpoint, wrong):
    refusal("train", checkpoint, wrong)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_recapp_writes_passes_unchanged(checkpoint, config, name):
    assert {
        key: settings_of(name, checkpoint, config)[key]
        for key in ("model", "optimizer", "callbacks")
    } == {key: config[key] for key in ("model", "optimizer", "callbacks")}
    loggers = config["logger"] if name == "train" else {}  # only training makes loggers
    assert settings_of(name, checkpoint, config)["logger"] == loggers


@pytest.mark.parametrize(
    ("slot", "target"),
    [
        ("optimizer.dense", "torch.optim.RMSprop"),
        ("optimizer.dense", "torch.optim.rmsprop.RMSprop"),
        ("optimizer.schedule", "torch.optim.lr_scheduler.StepLR"),
        ("callbacks.x", "lightning.pytorch.callbacks.Timer"),
        ("callbacks.x", "lightning.pytorch.callbacks.timer.Timer"),
        ("logger.x", "lightning.pytorch.loggers.CSVLogger"),
        ("model.x", "torch.nn.ReLU"),
        ("model.x", "torchmetrics.MeanMetric"),
        ("model.x", "torch.nn.modules.activation.ReLU"),
    ],
)
def test_classes_of_the_homes_pass_under_their_public_and_their_full_names(config, slot, target):
    trust.judged(trust.marked(put(config, slot, {"_target_": target})), ())


def test_conf_names_classes_of_the_homes_which_are_known_without_importing_lightning():
    homes = {home.module: home for home in trust.slots()[1].homes}
    names = [name for name in named_targets() if name.rpartition(".")[0] in homes]
    assert {"torch.optim.Adam", "lightning.pytorch.callbacks.EarlyStopping"} <= {*names}
    for target in names:
        home, _, name = target.rpartition(".")
        base_module, _, base = homes[home].base.rpartition(".")
        kind = getattr(import_module(base_module), base)
        assert issubclass(getattr(import_module(home), name), kind)


def test_what_the_command_line_names_is_the_users_word(checkpoint, config, tmp_path, monkeypatch):
    hostile = put(config, "optimizer.sparse", {"_target_": "os.system", "lr": 0.5})
    said = "optimizer.sparse._target_=rules_of_mine.rule"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # no file is written but by the product
    (tmp_path / "rules_of_mine.py").write_text(
        "from recapp.optim.rules import sgd\n\n\ndef rule(lr: float):\n    return sgd(lr)\n"
    )
    assert settings_of("train", checkpoint, hostile, said)["optimizer"]["sparse"] == {
        "_target_": "rules_of_mine.rule",
        "lr": 0.5,
    }
    assert (
        settings_of("train", checkpoint, hostile, "optimizer=adam")["optimizer"]["sparse"][
            "_target_"
        ]
        == "recapp.optim.rules.adam"
    )


OWN = {
    "__init__": "from torch import nn\nfrom subprocess import check_call\n"
    "class Model(nn.Module): ...\nclass Plain: ...\ndef make(): ...\n",
    "heads": "from torch import nn\nclass Head(nn.Module): ...\n",
    "parts": "import lightning.pytorch as L\nfrom lightning.pytorch import loggers\n"
    "class Seen(L.Callback): ...\nclass Curves(loggers.CSVLogger): ...\n"
    "class Old: ...\nOld.__module__ = 'own_pkg_of_others.parts'\n",
    "broken": "raise RuntimeError('two\\nlines')\n",
}


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A package of the user's, `own_pkg`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "own_pkg").mkdir()
    for name, text in OWN.items():
        (tmp_path / "own_pkg" / f"{name}.py").write_text(text)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "own_pkg"]:
        del sys.modules[name]


def test_classes_of_the_users_own_need_his_trust_which_the_error_names(
    checkpoint, config, own_package
):
    own = put(
        config, "model", {"_target_": "own_pkg.Model", "head": {"_target_": "own_pkg.heads.Head"}}
    )
    assert refusal("eval", checkpoint, own).endswith(
        "if that package is yours, say trust=[own_pkg]"
    )
    assert settings_of("eval", checkpoint, own, "trust=[own_pkg]")["model"] == own["model"]
    assert settings_of("train", checkpoint, own, "trust=[own_pkg]")["trust"] == ["own_pkg"]
    assert refusal("eval", checkpoint, own, "trust=[own]").endswith("say trust=[own,own_pkg]")
    refusal("eval", checkpoint, {**own, "trust": ["own_pkg"]})  # a file does not vouch for itself
    with pytest.raises(ConfigError, match=r"trust=.*must be a list of packages"):
        settings_of("eval", checkpoint, own, "trust=own_pkg")


@pytest.mark.parametrize(
    ("slot", "target"),
    [
        ("callbacks.x", "own_pkg.parts.Seen"),
        ("logger.x", "own_pkg.parts.Curves"),
        ("model.head", "own_pkg.heads.Head"),
    ],
)
def test_trust_is_for_classes_of_the_base_of_their_place(
    checkpoint, config, own_package, slot, target
):
    settings_of("train", checkpoint, put(config, slot, {"_target_": target}), "trust=[own_pkg]")


@pytest.mark.parametrize(
    ("slot", "target", "said"),
    [
        ("callbacks.x", "own_pkg.check_call", "vouches for classes that are defined there"),
        ("callbacks.x", "own_pkg.nn.Module", "cannot be imported (No module named"),
        ("model", "own_pkg.make", "derived from torch.nn.Module"),
        ("model", "own_pkg.Plain", "derived from torch.nn.Module"),
        ("callbacks.x", "own_pkg.Model", "derived from lightning.pytorch.callbacks.Callback"),
        ("callbacks.x", "own_pkg.parts.L.Callback", "cannot be imported (No module named"),
        ("callbacks.x", "own_pkg.parts.Old", "classes that are defined there"),
        ("callbacks.x", "own_pkg.absent.Seen", "cannot be imported (No module named"),
        ("callbacks.x", "own_pkg.broken.Seen", "cannot be imported (two lines)"),
        ("optimizer.sparse", "own_pkg.make", "where classes may stand; say optimizer.sparse._t"),
        ("logger.x", "own_pkg.parts.Seen", "derived from lightning.pytorch.loggers.Logger"),
    ],
)
def test_trust_is_for_nothing_else_that_a_package_holds(
    checkpoint, config, own_package, slot, target, said
):
    hostile = put(config, slot, {"_target_": target, "args": ["touch", "pwned"]})
    assert said in refusal("train", checkpoint, hostile, "trust=[own_pkg]")


@pytest.mark.parametrize("name", ["CometLogger", "WandbLogger", "MLFlowLogger", "NeptuneLogger"])
def test_loggers_that_send_to_others_come_from_no_file(checkpoint, config, name):
    foreign = {"_target_": f"lightning.pytorch.loggers.{name}", "api_key": "of the author"}
    assert "only CSVCurves, CSVLogger, TensorBoardLogger are; choose another" in refusal(
        "train", checkpoint, put(config, "logger.x", foreign)
    )
    refusal("train", checkpoint, put(config, "model.x", foreign))


@pytest.mark.parametrize("name", ["eval", "predict", "export"])
def test_a_model_is_read_without_its_loggers(checkpoint, config, name):
    foreign = {"_target_": "lightning.pytorch.loggers.WandbLogger", "project": "shop"}
    trained = put(config, "logger.wandb", foreign)
    assert settings_of(name, checkpoint, trained)["logger"] == {}
    assert recipe_of_stored(read_manifest(checkpoint)).logger == {}
    assert settings_of(name, checkpoint, trained, "logger=csv")["logger"].keys() == {"csv"}


def test_a_files_choices_name_options_of_conf_and_nothing_else(checkpoint, config, tmp_path):
    (tmp_path / "x.yaml").write_text(
        "# @package _global_\nhydra: {callbacks: {x: {_target_: os.system}}}\n"
    )
    outside = os.path.relpath(tmp_path / "x", conf_dir() / "model")
    settings_of(
        "train",
        checkpoint,
        {**config, "choices": {"model": outside, "../model": "dlrm", "optimizer": "adam"}},
    )
    assert compose.stored_choices([f"ckpt_path={checkpoint}"]) == ["optimizer=adam"]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("made", [False, True])
def test_nothing_is_generated_where_only_a_checkpoint_says_so(
    checkpoint, config, tmp_path, name, made
):
    place = tmp_path / "deep" / "data"
    if made:
        place.mkdir(parents=True)
    generate = {**config["dataset"]["generate"], "rows": 3000}
    hostile = put(
        config, "dataset", {**config["dataset"], "path": str(place), "generate": generate}
    )
    settings = recipe_of(settings_of(name, checkpoint, hostile), name)
    for said in ([], ["dataset.batch_size=9"]):
        with pytest.raises(
            ConfigError, match=r"dataset\.path=.*/deep/data: the generated data .* not"
        ):
            check_generated(settings, said)
    check_generated(settings, [f"dataset.path={place}"])
    check_generated(settings, ["dataset=synthetic"])
    there = replace(settings.dataset, path=str(HERE))
    check_generated(replace(settings, dataset=there), [])


def test_a_machine_that_a_checkpoint_names_is_a_small_file(checkpoint, config, tmp_path):
    endless = tmp_path / "endless.yaml"
    os.truncate(os.open(endless, os.O_CREAT | os.O_WRONLY), 1 << 40)
    for path, why in (("/dev/zero", "not a regular file"), (str(endless), "1,048,576 are allowed")):
        hostile = put(config, "topology", {**config["topology"], "hardware": path})
        settings = settings_of("eval", checkpoint, hostile)
        with pytest.raises(ConfigError, match=f"topology.hardware={path}: .*{why}"):
            read_hardware(settings["topology"]["hardware"])


def test_settings_that_would_be_composed_for_minutes_are_refused_at_once(checkpoint, config):
    many = put(config, "model.top_layers", [8] * 100_000)
    began = time.monotonic()
    assert "they are more than 65,536 values" in refusal("train", checkpoint, many)
    wide = put(config, "callbacks.checkpoint.filename", "{step:0999999999d}")
    assert "which makes a name of any length" in refusal("train", checkpoint, wide)
    assert time.monotonic() - began < 10
    settings_of("train", checkpoint, put(config, "callbacks.checkpoint.filename", "{step:06d}"))


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_writes_nothing_where_a_checkpoint_would(stored, tmp_path, name):
    run = copy(stored.small_run("+plan=mixed"), tmp_path / "run")
    path = (run / "checkpoints" / "last.ckpt").resolve()
    whole = read_manifest(path)
    place = tmp_path / "deep" / "data"
    hostile = put(whole.config, "dataset.path", str(place))
    hostile = put(hostile, "dataset.generate.rows", 10**12)
    info = {**whole.info, "config": hostile}
    (path / "manifest.json").write_text(
        to_json(CheckpointManifest(path, info, whole.files, whole.blocks))
    )
    ran = command(name, f"ckpt_path={path}", cwd=tmp_path)
    assert ran.code == 1 and "the generated data of the checkpoint are not there" in ran.error()
    assert not place.parent.exists()
