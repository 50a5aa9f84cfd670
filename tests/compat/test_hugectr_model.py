"""HugeCTR's training programs: what compiles, what is refused before any data are read, and the
settings that a program becomes.
"""

import json
import os

import numpy as np
import pytest
from hugectr_data import write_nvtabular
from jobs import environment_of_rank

from recapp import hugectr
from recapp.cli import compose
from recapp.compat.hugectr.program import NOT_THERE, FitCall, Model, Program, settings_of
from recapp.compat.hugectr.program_settings import Columns
from recapp.errors import ConfigError, DataError
from recapp.settings.option_files import named_folders

L = hugectr.Layer_t
SIZES = [30, 7, 12]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """However many GPUs this machine has, programs list two."""
    monkeypatch.setattr("recapp.compat.hugectr.program_settings.gpu_count", lambda: 0)


def solver(**more):
    said = {
        "batchsize": 32,
        "batchsize_eval": 64,
        "lr": 0.5,
        "warmup_steps": 300,
        "vvgpu": [[0, 1]],
        "i64_input_key": True,
        "use_embedding_collection": True,
        "metrics_spec": {hugectr.MetricsType.AverageLoss: 0.0},
    }
    return hugectr.CreateSolver(**said | more)


def reader(**more):
    said = {
        "data_reader_type": hugectr.DataReaderType_t.Parquet,
        "source": ["train/_file_list.txt"],
        "eval_source": "val/_file_list.txt",
        "check_type": hugectr.Check_t.Non,
        "slot_size_array": SIZES,
    }
    return hugectr.DataReaderParams(**said | more)


def columns(names=("data0", "data1", "data2"), **more):
    params = [hugectr.DataReaderSparseParam(name, 1, False, 1) for name in names]
    said = {"label_dim": 1, "label_name": "label", "dense_dim": 4, "dense_name": "dense"}
    return hugectr.Input(**said | {"data_reader_sparse_param_array": params} | more)


def collection(plan=None, sizes=SIZES, dim=8, **more):
    planner = hugectr.EmbeddingPlanner()
    for k, size in enumerate(sizes):
        table = hugectr.EmbeddingTableConfig(
            id_space=k, max_vocabulary_size=size, ev_size=dim, min_key=0, max_key=size, **more
        )
        planner.embedding_lookup(
            emb_table=table, bottom_name=f"data{k}", top_name=f"emb{k}", combiner="sum"
        )
    return planner.create_embedding_collection(plan)


def layers(*changed):
    """A small DLRM, a layer of which may be replaced by its first top name."""
    made = [
        hugectr.DenseLayer(L.Concat, ["emb0", "emb1", "emb2"], ["vectors"], axis=1),
        hugectr.DenseLayer(L.InnerProduct, ["dense"], ["fc1"], num_output=8),
        hugectr.DenseLayer(L.ReLU, ["fc1"], ["relu1"]),
        hugectr.DenseLayer(L.Interaction, ["relu1", "vectors"], ["dots"]),
        hugectr.DenseLayer(L.InnerProduct, ["dots"], ["fc2"], num_output=1),
        hugectr.DenseLayer(L.BinaryCrossEntropyLoss, ["fc2", "label"], ["loss"]),
    ]
    other = {layer.layer.tops[0]: layer for layer in changed}
    return [other.get(layer.layer.tops[0], layer) for layer in made]


def model(parts=None, of=None, opt=None, data=None):
    made = Model(
        of or solver(),
        data or reader(),
        opt or hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD),
    )
    for part in [columns(), collection(), *layers()] if parts is None else parts:
        made.add(part)
    return made


def refusal(call, kind=ConfigError):
    with pytest.raises(kind) as refused:
        call()
    line = str(refused.value)
    assert "\n" not in line
    return line


# ---- compile, summary


def test_a_summary_lists_every_layer_with_its_tensors_and_shapes(capsys):
    made = model()
    made.compile()
    made.summary()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for wanted in (
        "label (None, 1)",
        "dense (None, 4)",
        "Embedding data2 emb2 (None, 1, 8) 96",
        "Concat emb0 vectors (None, 3, 8)",
        "InnerProduct dense fc1 (None, 8) 40",
        "Interaction relu1 dots (None, 15)",
        "InnerProduct dots fc2 (None, 1) 16",
    ):
        assert any(line[-len(wanted.split()) :] == wanted.split() for line in lines), wanted


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([collection(), *layers()], ("an Input is missing",)),
        ([columns(), *layers()], ("an embedding collection is missing",)),
        ([columns(("data0", "data1", "date2")), collection(), *layers()], ("lookup emb2", "date2")),
        ([columns(dense_name="emb0"), collection(), *layers()], ("Input: emb0",)),
        ([columns(), collection(), *layers()[:-1]], ("0 losses (none)",)),
        ([columns(), collection(), *layers(), *layers()[-1:]], ("a tensor loss already",)),
        ([columns(), collection(), *layers()[2:], *layers()[:2]], ("fc1, which a later layer",)),
        (
            [
                columns(),
                collection(),
                *layers(hugectr.DenseLayer(L.ReLU, ["fc_1"], ["relu1"])),
            ],
            ("layer ReLU (relu1): reads fc_1", "did you mean fc1?"),
        ),
        (
            [
                columns(),
                collection(),
                *layers(hugectr.DenseLayer(L.InnerProduct, ["dots"], ["fc2"], num_output=2)),
            ],
            ("layer BinaryCrossEntropyLoss (loss)", "fc2 (None, 2) and label (None, 1)"),
        ),
        (
            [columns(), collection(), hugectr.DenseLayer(L.ReLU, ["dense"], ["unread"]), *layers()],
            ("layer ReLU (unread): no layer reads unread",),
        ),
    ],
)
def test_what_does_not_connect_is_refused_with_layer_and_tensor(parts, said):
    line = refusal(model(parts).compile)
    for part in said:
        assert part in line, line


def test_layers_are_what_can_be_added_and_each_input_once():
    assert "Model.add: 3: must be an Input" in refusal(lambda: model([3]))
    assert "already has an Input" in refusal(lambda: model([columns(), columns()]))
    line = refusal(lambda: Model(solver(), reader(), "SGD"))
    assert line == "Model: opt_params: must be a result of CreateOptimizer"


def test_a_plan_for_other_gpus_is_refused_when_the_model_is_compiled(tmp_path):
    group = {"local_embedding_list": [0, 1, 2], "global_embedding_list": [[0, 1, 2]] * 4}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps([[{**group, "table_placement_strategy": "dp"}]] * 4))
    line = refusal(model([columns(), collection(file), *layers()]).compile)
    assert "vvgpu lists 2 GPUs" in line and "is for 4" in line


def test_as_many_gpus_as_torchrun_has_started_and_one_host_without_it(monkeypatch):
    line = refusal(model(of=solver(vvgpu=[[0], [0]])).compile)
    assert "vvgpu lists 2 hosts: start the program with torchrun" in line
    for name, value in environment_of_rank(0, 4, 1).items():
        monkeypatch.setenv(name, value)
    line = refusal(model().compile)
    assert (
        line
        == "CreateSolver: vvgpu lists 2 GPUs, and 4 ranks were started: list one GPU for each rank"
    )


def test_gpus_are_those_of_the_machine(monkeypatch):
    monkeypatch.setattr("recapp.compat.hugectr.program_settings.gpu_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert solver(vvgpu=[[3, 1]]).visible_gpus() == "3,1"
    assert "there is no GPU 4: there are 4" in refusal(solver(vvgpu=[[4, 0]]).visible_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert solver(vvgpu=[[1]]).visible_gpus() == "7"


def test_methods_that_are_not_there_say_what_does_their_work():
    for name in NOT_THERE:
        assert f"Model.{name}: recapp does not have this method" in refusal(
            lambda name=name: getattr(model(), name)
        )
    with pytest.raises(AttributeError, match=r"Model\.summry: unknown; did you mean summary"):
        model().summry()


def test_summary_and_fit_need_a_compiled_model():
    for call in (model().summary, model().fit):
        assert "call compile() first" in refusal(call)
    assert "loss_names" in refusal(lambda: model().compile(["loss"], [1.0]))


# ---- arguments


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"batch_size": 3}, ("unknown argument batch_size", "did you mean batchsize")),
        ({"use_mixed_precision": True}, ("use_mixed_precision=True", "FP32")),
        ({"scaler": 1024}, ("scaler=1024",)),
        ({"drop_incomplete_batch": False}, ("drop_incomplete_batch=False", "skips")),
        ({"i64_input_key": False}, ("i64_input_key=False", "64 bits")),
        ({"use_embedding_collection": False}, ("use_embedding_collection=False",)),
        ({"batchsize": 33}, ("batchsize=33", "multiple of the 2")),
        ({"batchsize_eval": 0}, ("batchsize_eval=0", "at least 1")),
        ({"max_eval_batches": 0}, ("max_eval_batches=0",)),
        ({"vvgpu": [0, 1]}, ("vvgpu=[0, 1]", "a list of whole numbers")),
        ({"vvgpu": [[0, 0]]}, ("vvgpu=[[0, 0]]",)),
        ({"metrics_spec": {hugectr.MetricsType.NDCG: 1.0}}, ("unknown metric NDCG", "AUC")),
        ({"metrics_spec": {}}, ("metrics_spec={}",)),
        ({"lr_policy": "step"}, ("lr_policy=step",)),
    ],
)
def test_a_solver_refuses_what_is_not_there(said, parts):
    line = refusal(lambda: solver(**said))
    assert line.startswith("CreateSolver: ")
    for part in parts:
        assert part in line, line


def test_what_only_chooses_how_hugectr_computes_is_noted(capsys):
    solver(use_cuda_graph=False)
    reader(num_workers=4)
    err = capsys.readouterr().err
    assert "CreateSolver: use_cuda_graph" in err and "DataReaderParams: num_workers" in err


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"data_reader_type": hugectr.DataReaderType_t.Raw}, ("data_reader_type=Raw", "Parquet")),
        ({"check_type": hugectr.Check_t.Sum}, ("check_type=Sum",)),
        ({"source": ["a", "b"]}, ("source=['a', 'b']", "one list")),
        ({"keyset": ["a"]}, ("keyset=['a']",)),
        ({"read_file_sequentially": True}, ("read_file_sequentially=True", "lanes")),
        ({"slot_size_arry": [1]}, ("slot_size_arry", "did you mean slot_size_array")),
    ],
)
def test_a_reader_refuses_what_is_not_there(said, parts):
    line = refusal(lambda: reader(**said))
    assert line.startswith("DataReaderParams: ")
    for part in parts:
        assert part in line, line


def test_an_input_is_one_label_and_columns_of_one_slot():
    assert "label_dim=2" in refusal(lambda: columns(label_dim=2))
    assert "data0 is named more than once" in refusal(lambda: columns(("data0", "data0")))
    assert "must name a column" in refusal(lambda: columns(()))
    line = refusal(lambda: hugectr.DataReaderSparseParam("wide", 2, True, 26))
    assert "wide: slot_num=26: must be 1" in line


def test_an_optimiser_that_only_tables_have_is_refused_for_the_model():
    ftrl = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Ftrl)
    line = refusal(model(opt=ftrl).compile)
    assert "opt_params=Ftrl: only tables have this optimiser" in line


@pytest.mark.parametrize(
    ("of", "said", "parts"),
    [
        ({}, {"max_iter": 0}, ("max_iter=0", "repeat_dataset=True")),
        ({}, {"num_epochs": 2}, ("num_epochs=2", "max_iter")),
        ({"repeat_dataset": False}, {}, ("num_epochs=0", "repeat_dataset=False")),
        ({}, {"display": -1}, ("display=-1",)),
        ({}, {"snapshot": 1.5}, ("snapshot=1.5",)),
    ],
)
def test_fit_refuses_lengths_that_cannot_be(of, said, parts):
    made = model(of=solver(**of))
    made.compile()
    line = refusal(lambda: made.fit(**said))
    for part in parts:
        assert part in line, line


# ---- data


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_nvtabular("train", SIZES, rows=8, dense=4)
    write_nvtabular("val", SIZES, rows=8, dense=4)
    return tmp_path


def fitting(**more):
    made = model(**more)
    made.compile()
    return lambda: made.fit(max_iter=1)


def test_missing_lists_and_metadata_are_named(data):
    (data / "val/_file_list.txt").rename(data / "val/list.txt")
    line = refusal(fitting(), DataError)
    assert "eval_source=val/_file_list.txt: no such file" in line
    (data / "train/_metadata.json").unlink()
    line = refusal(fitting(), DataError)
    assert "source=train/_file_list.txt: there is no _metadata.json beside train/part_0" in line
    assert not (data / "outputs").exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda said: said["labels"].clear(), ("has 0 labels",)),
        (lambda said: said["cats"].pop(), ("data_reader_sparse_param_array has 3", "2: C1, C2")),
        (lambda said: said["conts"].pop(), ("dense_dim has 4", "3: I1, I2, I3")),
        (lambda said: said.update(cats=[{"name": "C1"}]), ("cannot be read", "col_name")),
        (lambda said: said.update(cats=3), ("cannot be read", "col_name")),
        (lambda said: said["cats"].append(said["cats"][0]), ("cats: C1 is named more than once",)),
        (lambda said: said["labels"][0].update(col_name="C1"), ("cats: C1 is named more than",)),
        (lambda said: said["labels"][0].update(col_name=None), ("labels: col_name=None",)),
        (
            lambda said: said["cats"][0].update(index=6),
            ("cats: C1 has index 6, and is column 5 of", "part_0"),
        ),
    ],
)
def test_metadata_that_say_something_else_are_refused(data, change, parts):
    for part in ("train", "val"):
        file = data / part / "_metadata.json"
        said = json.loads(file.read_text())
        change(said)
        file.write_text(json.dumps(said))
    line = refusal(fitting(), DataError)
    for part in parts:
        assert part in line, line


def test_metadata_that_are_no_json_or_differ_between_parts_are_refused(data):
    said = json.loads((data / "val/_metadata.json").read_text())
    said["cats"].reverse()
    (data / "val/_metadata.json").write_text(json.dumps(said))
    assert "name different columns" in refusal(fitting(), DataError)
    for text, reason in (("{", "JSONDecodeError"), ("[" * 100_000, "ValueError: it is nested too")):
        (data / "train/_metadata.json").write_text(text)
        assert f"_metadata.json: cannot be read ({reason}" in refusal(fitting(), DataError)


@pytest.mark.parametrize("name", ["_metadata.json", "_file_list.txt"])
def test_files_beside_the_data_are_read_with_a_bound(data, name):
    os.truncate(data / "train" / name, 2**34)  # sparse
    assert f"{name}: " in (line := refusal(fitting(), DataError))
    assert "it has 17,179,869,184 bytes, and 67,108,864 are allowed" in line


CANARIES = ["${new_directory:CANARY/deep}", "${oc.env:HOME}", "${seed}", "\\${seed}", "it's, a=b"]


def test_names_and_paths_of_files_become_settings_as_they_are(tmp_path, monkeypatch):
    folder = tmp_path / "${oc.env:HOME}" / "\\${seed}"
    write_nvtabular(folder / "train", SIZES, rows=8, dense=4)
    write_nvtabular(folder / "val", SIZES, rows=8, dense=4)
    monkeypatch.chdir(folder)
    for part in ("train", "val"):
        said = json.loads((folder / part / "_metadata.json").read_text())
        for entry, name in zip(said["labels"] + said["conts"], CANARIES, strict=True):
            entry["col_name"] = name
        (folder / part / "_metadata.json").write_text(json.dumps(said))
    ran = []
    monkeypatch.setattr(
        "recapp.compat.hugectr.program._run", lambda command, gpus: ran.append(command) or 0
    )
    fitting()()
    (command,) = ran
    overrides = [word for word in command[3:] if "=" in word]
    composed = compose.compose("train", overrides, named_folders(command))
    plain = compose.to_plain(compose.without_hydra(composed))
    dataset = plain["dataset"]
    assert [dataset["label"], *dataset["dense"]] == CANARIES
    assert dataset["path"] == str(folder / "train/_file_list.txt")
    assert composed.hydra.run.dir.startswith(str(folder / "outputs"))
    assert not list(folder.rglob("CANARY*"))


def test_slot_sizes_are_one_for_each_column(data):
    line = refusal(fitting(data=reader(slot_size_array=[30, 7])))
    assert "slot_size_array has 2 numbers" in line and "the 3 cats" in line


# ---- keys


def tables_of(program_tables, sizes):
    """The tables of the settings of a program."""
    read = columns()
    program = Program(
        solver(),
        reader(slot_size_array=sizes),
        hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD),
        read,
        program_tables,
        [],
    )
    files = Columns("click", ["I1", "I2", "I3", "I4"], ["C1", "C2", "C3"])
    made = settings_of(program, FitCall(0, 1, 1, 1, 0, ""), files)["tables"]
    return {table["name"]: table for table in made["tables"]}


def test_tables_that_count_keys_from_0_hold_the_keys_of_the_files():
    made = tables_of(collection(), SIZES)
    assert [table.get("min_key", 0) for table in made.values()] == [0, 0, 0]
    assert [table["feature_names"] for table in made.values()] == [["C1"], ["C2"], ["C3"]]


def shared(rows, first_keys=(0, 0), slots=(0, 1)):
    """A table for each first key, that the slots read in turn."""
    planner = hugectr.EmbeddingPlanner()
    made = [
        hugectr.EmbeddingTableConfig(
            id_space=k, max_vocabulary_size=rows, ev_size=8, **({"min_key": key} if key else {})
        )
        for k, key in enumerate(first_keys)
    ]
    for k, slot in enumerate(slots):
        planner.embedding_lookup(made[k % len(made)], f"data{slot}", f"emb{k}", "sum")
    return planner.create_embedding_collection()


def test_a_table_that_counts_keys_from_the_sum_of_the_slots_before_gets_row_0_for_key_0():
    made = tables_of(shared(7, (30,), (1,)), SIZES)
    assert made["table_0"].get("min_key", 0) == 0
    made = tables_of(shared(40, (0,), (1,)), SIZES)  # fits with the sum: rows 30 to 36
    assert made["table_0"]["min_key"] == -30


def test_without_slot_sizes_min_key_is_that_of_the_program():
    assert tables_of(shared(7, (30,), (1,)), [])["table_0"]["min_key"] == 30


def test_keys_that_fit_a_table_in_no_way_are_refused():
    line = refusal(lambda: tables_of(shared(5, (0,), (1,)), SIZES))
    assert "keys of data1 are 0..6, or 30..36" in line and "table_0 has the keys 0..4" in line
    line = refusal(lambda: tables_of(shared(100, (0,), (0, 1)), SIZES))
    assert "adds different numbers" in line and "data0 0 and data1 30" in line
    line = refusal(lambda: tables_of(shared(-1, (0,), (0, 1)), SIZES))
    assert "adds different numbers" in line


# ---- settings


def test_a_program_becomes_the_settings_of_the_notebooks_experiment():
    program = Program(
        hugectr.CreateSolver(
            max_eval_batches=70,
            batchsize_eval=65536,
            batchsize=65536,
            lr=0.5,
            warmup_steps=300,
            vvgpu=[list(range(8))],
            i64_input_key=True,
            use_embedding_collection=True,
            metrics_spec={hugectr.MetricsType.AverageLoss: 0.0},
        ),
        reader(),
        hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD),
        columns(),
        collection(),
        [],
    )
    files = Columns("click", ["I1", "I2", "I3", "I4"], ["C1", "C2", "C3"])
    made = settings_of(program, FitCall(0, 1000, 100, 100, 10_000_000, "dlrm"), files)
    experiment = made["experiment"]
    assert experiment["dataset"]["batch_size"] == 65536 and experiment["dataset"]["lanes"] == 16
    assert experiment["trainer"] == {
        "devices": 8,
        "max_steps": 1000,
        "max_epochs": None,
        "val_check_interval": 100,
        "limit_val_batches": 70,
        "log_every_n_steps": 100,
    }
    assert list(made["callbacks"]) == ["lines"]  # no snapshot in 1,000 iterations
    schedule = made["optimizer"]["schedule"]
    assert schedule["warmup_steps"] == 300 and schedule["decay_start"] == 0


def test_every_lane_is_a_ranks_own_and_batches_share_them_evenly():
    assert solver(batchsize=96, batchsize_eval=96, vvgpu=[[0, 1, 2]]).lanes == 12
    assert solver(batchsize=40, batchsize_eval=40, vvgpu=[list(range(20))]).lanes == 20
    assert solver(batchsize=2, batchsize_eval=6).lanes == 2


def test_metrics_that_have_a_goal_stop_training():
    kind = hugectr.MetricsType
    stops = solver(metrics_spec={kind.AUC: 0.8025, kind.AverageLoss: 0.12}).stops()
    assert [(x["monitor"], x["mode"], x["stopping_threshold"]) for x in stops.values()] == [
        ("val_auc", "max", 0.8025),
        ("val_log_loss", "min", 0.12),
    ]
    assert solver(metrics_spec={kind.AUC: 1.0, kind.AverageLoss: 0.0}).stops() == {}


# ---- arguments of other types


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (solver, "seed", (None, "text", -1, 1.5, True)),
        (solver, "lr", (None, "text", -1, float("nan"), float("inf"), True, [])),
        (solver, "warmup_steps", (None, "3", -1, 0.5)),
        (solver, "decay_steps", (0, None)),
        (solver, "end_lr", ("0", float("nan"))),
        (solver, "batchsize", (None, "32", 1.5, True, 2**70)),
        (solver, "vvgpu", (None, 1, "0", [])),
        (solver, "metrics_spec", (1, "AUC", [hugectr.MetricsType.AUC])),
        (solver, "repeat_dataset", (None, "yes", 2)),
        (solver, "i64_input_key", (None, "yes")),
        (reader, "source", (None, 1, [None], "")),
        (reader, "eval_source", (None, 1, ["a"], "")),
        (reader, "slot_size_array", (None, 1, "34", b"34", ["a"], [-1], range(2), [1.5])),
        (columns, "label_name", (None, 1, ["label"], "")),
        (columns, "dense_name", (None, "")),
        (columns, "dense_dim", (None, -1, 1.5, "4", True)),
        (columns, "data_reader_sparse_param_array", (None, 1, ["data0"], "data0")),
        (hugectr.CreateOptimizer, "optimizer_type", (None, "Adam", 3, [])),
        (hugectr.CreateOptimizer, "update_type", (None, "Local")),
        (hugectr.CreateOptimizer, "beta1", (None, 1, -0.1, float("nan"), "0.9")),
        (hugectr.CreateOptimizer, "epsilon", (-1, float("inf"))),
    ],
)
def test_an_argument_of_another_type_is_refused_by_its_name(make, name, values):
    for value in values:
        assert f"{name}" in refusal(lambda value=value: make(**{name: value})), value


def test_columns_of_keys_and_tables_have_names_and_numbers():
    for said in ((None, 1, False, 1), ("", 1, False, 1), ("a", 0, False, 1), ("a", [], False, 1)):
        refusal(lambda said=said: hugectr.DataReaderSparseParam(*said))
    assert "is_fixed_length=maybe" in refusal(
        lambda: hugectr.DataReaderSparseParam("a", 1, "maybe", 1)
    )
    sizes = {"max_vocabulary_size": 3, "ev_size": 4}
    for said in ({"id_space": -1}, {"table_id": "x"}, {"name": 3}, {"name": ""}):
        line = refusal(lambda said=said: hugectr.EmbeddingTableConfig(**sizes | said))
        assert next(iter(said)) in line


def test_numbers_of_numpy_are_written_as_pythons_own():
    made = solver(batchsize=np.int64(32), lr=np.float32(0.5), seed=np.int64(3))
    assert [type(x) for x in (made.batchsize, made.lr, made.seed)] == [int, float, int]
    layer = hugectr.DenseLayer(L.InnerProduct, ["x"], ["y"], num_output=np.int64(3)).layer
    assert type(layer.parameters["num_output"]) is int


def test_sizes_of_slots_may_be_any_iterable_of_numbers():
    for sizes in (range(1, 4), (k for k in (1, 2, 3)), np.array([1, 2, 3])):
        assert reader(slot_size_array=sizes).slot_size_array == [1, 2, 3]


def test_unknown_optimisers_are_one_line_with_what_there_is():
    assert "Optimizer_t.Adamm: unknown; did you mean Adam" in refusal(
        lambda: hugectr.Optimizer_t.Adamm
    )


@pytest.mark.parametrize("prefix", [None, "a{b}", "it's", "a\nb"])
def test_fit_refuses_names_of_snapshots_that_cannot_be(prefix):
    made = model()
    made.compile()
    assert "snapshot_prefix=" in refusal(lambda: made.fit(snapshot_prefix=prefix))


def test_a_directory_that_cannot_be_made_is_named(data):
    (data / "file").write_text("")
    made = model()
    made.compile()
    line = refusal(lambda: made.fit(snapshot_prefix="file/sub/dlrm"))
    assert "snapshot_prefix=file/sub/dlrm: file/sub cannot be made (Not a directory)" in line


def test_a_concatenation_has_the_hotness_of_the_input(capsys):
    planner = hugectr.EmbeddingPlanner()
    table = hugectr.EmbeddingTableConfig(id_space=0, max_vocabulary_size=30, ev_size=8)
    planner.embedding_lookup(table, "data0", "side_by_side", "concat")
    planner.embedding_lookup(table, "data1", "summed", "sum")
    model = Model(solver(), reader(), hugectr.CreateOptimizer(hugectr.Optimizer_t.SGD))
    params = [
        hugectr.DataReaderSparseParam("data0", 3, False, 1),
        hugectr.DataReaderSparseParam("data1", [5], True, 1),
    ]
    model.add(columns(data_reader_sparse_param_array=params))
    model.add(planner.create_embedding_collection())
    model.add(hugectr.DenseLayer(L.Reshape, ["side_by_side"], ["wide"], leading_dim=24))
    model.add(hugectr.DenseLayer(L.InnerProduct, ["wide"], ["fc"], num_output=1))
    model.add(hugectr.DenseLayer(L.BinaryCrossEntropyLoss, ["fc", "label"], ["loss"]))
    model.compile()
    model.summary()
    lines = capsys.readouterr().out.splitlines()
    (shape,) = (line for line in lines if line.startswith("Embedding") and "side_by_side" in line)
    assert "24" in shape, "3 keys of 8 columns"
