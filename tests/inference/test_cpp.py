"""The C++ program scores as Python does, bit for bit, and says in one line what is wrong."""

import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path
from zipfile import ZipFile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from compilers import needs_program
from inference.scored_models import raw_rows, settings, storages, write_logs
from stored import copy
from trainer.runs import compose as compose_criteo
from trainer.runs import fit, make_logs

import recapp
from recapp.errors import ConfigError
from recapp.inference.build_cpp import SOURCE, build
from recapp.inference.export_settings import Export
from recapp.model_export import export_model

pytestmark = [
    pytest.mark.full,
    needs_program,
]
TRUST = ("inference",)
AT_ONCE = 4096


@pytest.fixture(scope="module")
def made(stored):
    """Artefacts by seed."""
    return lambda seed: stored.made(mixture, seed) / "art"


def mixture(folder, seed):
    """A trained model with lookups of every kind, in `folder`/art; compiled."""
    chosen = settings(write_logs(folder / "logs", seed), seed)
    (folder / "run").mkdir()
    fit(chosen, folder / "run")
    options = Export(quantize_tables=storages(seed), report_rows=0)
    path = folder / "run" / "checkpoints" / "last.ckpt"
    export_model(path, folder / "art", options, trust=TRUST)


@pytest.fixture
def artefact(made, tmp_path):
    """A copy of an artefact, to be damaged."""
    return copy(made(0), tmp_path / "art")


def run(program, *words, stdin=None):
    return subprocess.run(
        [program, *map(str, words)], input=stdin, capture_output=True, timeout=120
    )


def numbers(done, name):
    assert done.returncode == 0, done.stderr.decode()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line.keys() == {name} for line in lines)
    return torch.tensor([line[name] for line in lines])


def problem(program, *words, stdin=b""):
    """Run a program that must fail, and return the one line that it says."""
    done = run(program, *words, stdin=stdin)
    assert done.returncode == 1 and done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def python_logits(artefact, rows):
    model = recapp.load_model(artefact, trust=TRUST, trust_compiled=True)
    assert model.info["compiled"]
    with torch.no_grad():
        parts = [model(model.batch(rows.slice(n, AT_ONCE))) for n in range(0, len(rows), AT_ONCE)]
    return torch.cat(parts)


def as_json(rows):
    return "".join(json.dumps(row) + "\n" for row in rows.to_pylist()).encode()


def as_stream(rows, **options):
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_table(rows, **options)
    return out.getvalue().to_pybytes()


def as_file(rows):
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=700)
    return out.getvalue().to_pybytes()


# ---- the same bits


@pytest.mark.parametrize("seed", [0, 1])
def test_any_tables_score_the_same_bits_from_json_arrow_and_python(program, made, seed, tmp_path):
    torch.set_num_threads(2)
    rows = raw_rows(seed + 100, AT_ONCE + 300, known=200).drop_columns(["label"])
    wanted = python_logits(made(seed), rows)
    assert len(wanted.unique()) > 1000
    file = tmp_path / "rows"
    for written in (as_json(rows), as_stream(rows, max_chunksize=900), as_file(rows)):
        file.write_bytes(written)
        found = numbers(run(program, made(seed), file, "--logits", "--threads=2"), "logit")
        assert torch.equal(found, wanted)
    scores = numbers(run(program, made(seed), "--threads=2", stdin=as_json(rows)), "score")
    assert torch.equal(scores, torch.sigmoid(wanted.float()))


def test_a_null_is_what_it_was_in_training_whatever_rows_are_beside(program, made):
    """An empty list of features that had lists; one missing id of the others, in a list, too."""
    (row,) = raw_rows(3, 1).drop_columns(["label"]).to_pylist()
    none = {"dropped": None, "many": None, "text_keys": None, "keys": None}
    empty = {"dropped": [], "many": [], "text_keys": [], "keys": None}
    some = {"dropped": [1], "many": [2], "text_keys": ["3"], "keys": [4]}
    alone = [row | empty]
    for rows in ([row | none], [row | none, row | some], [row | some, row | none]):
        at = rows.index(row | none)
        table = pa.Table.from_pylist(rows)
        for written in (as_json(table), as_stream(table), as_file(table)):
            found = numbers(run(program, made(0), "--logits", "--batch=1", stdin=written), "logit")
            assert found[at] == python_logits(made(0), pa.Table.from_pylist(alone))
            assert found[at] == python_logits(made(0), table.slice(at, 1))


def test_single_ids_and_lists_may_stand_in_one_input(program, made, row):
    rows = [row | {"many": many, "keys": keys} for many, keys in ((5, [7]), ([5], 7), (None, "7"))]
    found = numbers(run(program, made(0), stdin="\n".join(map(json.dumps, rows)).encode()), "score")
    alone = [numbers(run(program, made(0), stdin=json.dumps(r).encode()), "score") for r in rows]
    assert torch.equal(found, torch.cat(alone)) and found[0] == found[1] != found[2]


def test_an_artefact_of_an_earlier_version_says_by_its_rows_what_a_null_is(program, artefact):
    (row,) = raw_rows(3, 1).drop_columns(["label"]).to_pylist()
    rows = [as_json(pa.Table.from_pylist([row | {"many": many}])) for many in (None, [])]
    before = [run(program, artefact, stdin=each).stdout for each in rows]

    def change(info):
        del info["features"]["lists"], info["ids"]["lists"]

    rewrite(artefact, change)
    after = [run(program, artefact, stdin=each).stdout for each in rows]
    assert before[0] == before[1] == after[1] != after[0] and after[0]


@pytest.mark.parametrize("seed", [0])
def test_threads_and_batches_change_no_lookup(program, made, seed):
    """The dense part adds in another order for other sizes; the rest does not."""
    rows = raw_rows(7, 500).drop_columns(["label"])
    wanted = python_logits(made(seed), rows)
    for words in (("--threads=1",), ("--batch=7",), ("--batch=1", "--threads", "2")):
        found = numbers(run(program, made(seed), "--logits", *words, stdin=as_json(rows)), "logit")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_columns_of_all_types_score_the_same_bits(program, made, tmp_path):
    rows = raw_rows(5, 300).drop_columns(["label"])
    wanted = python_logits(made(0), rows)

    def cast(rows, name, kind):
        at = rows.schema.get_field_index(name)
        return rows.set_column(at, name, rows.column(name).cast(kind))

    other = rows
    for name, kind in (
        ("n1", pa.float32()),
        ("n3", pa.large_string()),
        ("hexed", pa.dictionary(pa.int32(), pa.string())),
        ("words", pa.binary()),
        ("keys", pa.string()),
        ("errors", pa.float64()),
        ("clamped", pa.int16()),
        ("dropped", pa.large_list(pa.int32())),
        ("text_keys", pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    ):
        other = cast(other, name, kind) if name != "text_keys" else other
    done = run(program, made(0), "--logits", stdin=as_stream(other.append_column("x", rows["n1"])))
    assert torch.equal(numbers(done, "logit"), wanted)
    assert torch.equal(python_logits(made(0), other), wanted)


@pytest.mark.skipif("RECAPP_REAL_DATA" not in os.environ, reason="RECAPP_REAL_DATA is not set")
def test_real_logs_score_the_same_bits(program, tmp_path):
    torch.set_num_threads(2)
    (tmp_path / "run").mkdir()
    wanted = ("trainer.max_steps=6", "dataset.id_rule=hash")
    fit(compose_criteo(make_logs(tmp_path / "logs"), *wanted), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    options = Export(quantize="int8", quantize_tables={"C3": "none", "C9": "none"}, report_rows=0)
    export_model(checkpoint, tmp_path / "art", options)
    folder = Path(os.environ["RECAPP_REAL_DATA"]) / "criteo_kaggle_137k" / "test"
    rows = pq.read_table(sorted(folder.glob("*.parquet"))[0])
    schema = recapp.load_model(tmp_path / "art").schema
    own = {name: rows.column(at) for name, at in schema.resolve(rows.schema, "rows").items()}
    rows = pa.table(own)
    wanted = python_logits(tmp_path / "art", rows)
    for written in (as_json(rows), as_stream(rows)):
        done = run(program, tmp_path / "art", "--logits", "--threads=2", stdin=written)
        assert torch.equal(numbers(done, "logit"), wanted)


# ---- what else it says


def test_it_says_what_it_loaded_and_how_fast_it_is(program, made):
    said = run(program, made(0), "--info", "--check-rows").stdout.decode()
    assert "name      art\n" in said and "example   scores as it did\n" in said
    assert "keys: " in said and ", dynamic\n" in said
    rows = as_json(raw_rows(3, 40).drop_columns(["label"]))
    done = run(program, made(0), "--bench=1,64", "--repeat=5", stdin=rows)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["batch"] for line in lines] == [1, 64]
    assert all(0 < line["p50_us"] <= line["p99_us"] for line in lines)
    assert b"JSON lines" in run(program, "--help").stdout


def test_it_times_batches_whenever_it_is_asked(program, made, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(as_json(raw_rows(3, 40).drop_columns(["label"])))
    done = run(program, made(0), rows, "--turns", stdin=b"4 10 3\n1 40 5\n40 1 2\n")
    assert done.returncode == 0, done.stderr.decode()
    took = [json.loads(line)["us"] for line in done.stdout.splitlines()]
    assert [len(us) for us in took] == [3, 5, 2] and all(x > 0 for us in took for x in us)
    assert "ROWS has to be a file" in problem(program, made(0), "--turns")
    for line in (b"41 1 1", b"4 11 1", b"0 1 1", b"4 1", b"x"):
        said = problem(program, made(0), rows, "--turns", stdin=line + b"\n")
        assert "must be SIZE BATCHES COUNT" in said and "40 rows" in said


def test_without_arrow_it_reads_json_lines(made, stored):
    program = stored.program(arrow=False)
    rows = raw_rows(5, 30).drop_columns(["label"])
    found = numbers(run(program, made(0), "--logits", stdin=as_json(rows)), "logit")
    assert torch.equal(found, python_logits(made(0), rows))
    said = problem(program, made(0), stdin=as_stream(rows))
    assert said.startswith("standard input is Arrow, and this program was built without it")
    assert b"built without Arrow" in run(program, "--help").stdout


def test_a_program_that_cannot_be_built_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no-such-compiler is missing"):
        build(tmp_path / "build")


# ---- wrong input


@pytest.fixture(scope="module")
def row():
    """A row as JSON has it."""
    return next(
        r for r in raw_rows(5, 300).drop_columns(["label"]).to_pylist() if None not in r.values()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n1": "x"}, "feature n1 holds 'x', which is not a number"),
        ({"n1": [1]}, "feature n1 holds a list; allowed: a number, or text that spells one"),
        ({"n2": 1e300}, "feature n2 holds 1e+300, which is not finite in 32 bits"),
        ({"n3": "nan"}, "feature n3 holds nan, which is not finite"),
        ({"hexed": "12g"}, "feature hexed holds '12g'; an id of a hexadecimal feature has at most"),
        ({"hexed": "8" + 15 * "0"}, "the one number that is no id"),
        ({"keys": -(2**63)}, "the one number that is no id"),
        ({"keys": "abc"}, "feature keys holds 'abc', which is no integer"),
        ({"errors": 1.5}, "feature errors holds 1.5; an id must be an integer or text"),
        ({"errors": True}, "feature errors holds a boolean"),
        ({"words": {}}, "feature words holds an object; allowed: an integer, text, or a list"),
        ({"many": [[1]]}, "feature many holds a list; allowed: an integer or text"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_with_its_line(program, made, row, change, said):
    lines = [json.dumps(row), "", json.dumps(row | change)]
    found = problem(program, made(0), stdin="\n".join(lines).encode())
    assert found.startswith("standard input line 3: ") and said in found


def test_names_that_are_no_features_are_left_out(program, made, row):
    given = "\n".join(json.dumps(each) for each in (row, row | {"label": 1, "other": [{}]}))
    ran = subprocess.run([program, made(0)], input=given.encode(), capture_output=True, check=True)
    first, second = ran.stdout.splitlines()
    assert first == second


def test_rows_that_are_no_rows_are_named(program, made, row, tmp_path):
    less = {k: v for k, v in row.items() if k != "words"}
    hint = "line 1: feature words is missing; write null where it has no value"
    for text, said in (
        (json.dumps(less), hint),
        (json.dumps(less | {"word": 1}), f"{hint}; of other names the row has 'word'"),
        (json.dumps(row) + '\n{"n1": 1,', "line 2: the text ends too early at byte 10"),
        ("[1]", "line 1: a row must be an object at byte 1"),
        ('{"n1": 1, "n1": 2}', "line 1: key 'n1' occurs twice"),
        ('{"n1": 01}', "line 1: a comma or brace is missing"),
        ("[" * 200, "line 1: values are nested too deeply"),
        ("", "standard input has no rows"),
        ("\n \n", "standard input has no rows"),
    ):
        assert said in problem(program, made(0), stdin=text.encode())
    assert "text is no UTF-8" in problem(program, made(0), stdin=b'{"n1": "\xff"}')
    missing = problem(program, made(0), tmp_path / "none.jsonl")
    assert missing == f"{tmp_path / 'none.jsonl'} cannot be read: No such file or directory"


def test_ids_outside_under_rule_error_are_named(program, made, row):
    lines = json.dumps(row) + "\n" + json.dumps(row | {"errors": 45})
    found = problem(program, made(0), stdin=lines.encode())
    assert found.startswith(
        "row 1: table errors: feature errors has the id 45, which is outside its 50 rows (-5..44)"
    )


def test_arrow_that_cannot_be_read_is_named(program, made):
    rows = raw_rows(5, 30).drop_columns(["label"])
    assert problem(program, made(0), stdin=as_stream(rows.drop_columns(["many"]))) == (
        "standard input: there is no column for feature many"
    )
    wrong = rows.set_column(0, "n1", pa.array(["x"] * len(rows)))
    assert problem(program, made(0), stdin=as_stream(wrong)).startswith(
        "standard input: column n1, row 0 holds 'x', which is not a number"
    )
    at = rows.schema.get_field_index("many")
    wrong = rows.set_column(at, "many", pa.array([{"a": 1}] * len(rows)))
    assert problem(program, made(0), stdin=as_stream(wrong)).startswith(
        "standard input: column many has type struct<a: int64>; allowed: integers, text, or lists"
    )
    twice = rows.append_column("many", rows.column("many"))
    assert "column many is there more than once" in problem(
        program, made(0), stdin=as_stream(twice)
    )
    whole = as_file(rows)
    for cut in (10, len(whole) // 2, len(whole) - 5):
        assert "cannot be read as Arrow" in problem(program, made(0), stdin=whole[:cut])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give the directory of an artefact"),
        (("a", "b", "c"), "give the directory of an artefact"),
        (("a", "--thread=2"), "--thread: no such option"),
        (("a", "--threads=0"), "--threads=0: must be a whole number from 1 to 1024"),
        (("a", "--bench=1,x"), "--bench=x: must be a whole number"),
        (("a", "--format=xml"), "--format=xml: must be auto, json or arrow"),
        (("a", "--batch"), "--batch: no such option, or its value is missing"),
    ],
)
def test_wrong_options_are_said(program, words, said):
    assert problem(program, *words).startswith(said)


# ---- damaged artefacts


def rewrite(artefact, change):
    """Change the manifest, and give it the right checksum."""
    path = artefact / "manifest.json"
    info = json.loads(path.read_text())
    info.pop("checksum")
    change(info)
    body = json.dumps(info)[:-1].encode()
    path.write_bytes(body + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(body))


def test_an_artefact_that_a_killed_export_was_replacing_is_read(program, artefact):
    rows = as_json(raw_rows(0, 10).drop_columns(["label"]))
    before = run(program, artefact, stdin=rows).stdout
    artefact.rename(artefact.with_name("art.old"))
    assert "there is no such directory" in problem(program, artefact, stdin=rows)
    artefact.with_name("art.old").rename(artefact.with_name("art.recapp-replaced"))
    assert before and run(program, artefact, stdin=rows).stdout == before


def of_table(name, **change):
    return lambda info: next(t for t in info["tables"] if t["name"] == name).update(change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(compiled=None), "has no compiled dense part: export with compile=true"),
        (lambda m: m["compiled"].update(flags=["avx9"]), "needs avx9, which this CPU lacks"),
        (
            lambda m: m["compiled"].update(machine="riscv64"),
            "is code for riscv64, and this machine",
        ),
        (lambda m: m["compiled"].update(torch="1.0"), "was made with torch 1.0, and this program"),
        (lambda m: m["compiled"].update(dtype="float64"), "compiled: dtype is not that of the"),
        (lambda m: m["compiled"]["inputs"].pop(), "compiled: inputs do not fit lookups"),
        (lambda m: m.update(version=5), "has version 5, but this program reads version 4"),
        (lambda m: m.update(format="recapp"), "is a checkpoint: `python -m recapp.export"),
        (lambda m: m.update(format="x"), "format 'x'"),
        (lambda m: m.pop("outputs"), "outputs is missing"),
        (lambda m: m["outputs"]["logit"].append(0.5), "its example has"),
        (lambda m: m.update(example=[3]), "its example is not rows"),
        (lambda m: m["example"][1].pop("many"), "line 2: feature many is missing"),
        (
            lambda m: m["outputs"].update(logit=[9.0] * len(m["outputs"]["logit"])),
            "scores its example otherwise",
        ),
        (lambda m: m["outputs"].pop("logit"), "logit is missing"),
        (lambda m: m.pop("columns"), "columns is missing"),
        (lambda m: m["columns"].clear(), "compiled: output 'logit' has no column"),
        (lambda m: m["columns"][0].update(activation="tanh"), "activation='tanh'"),
        (lambda m: m["compiled"].update(outputs=[]), "compiled: it has no outputs"),
        (lambda m: m["ids"].update(text="md5"), "text ids are hashed by md5"),
        (lambda m: m["features"].update(transform="sqrt"), "transform='sqrt'"),
        (lambda m: m["features"].update(lists=["no"]), "lists 'no' is unknown"),
        (lambda m: m["features"].update(lists=[3]), "lists"),
        (lambda m: m["features"]["sparse"].append("n1"), "name 'n1' occurs twice"),
        (lambda m: m["lookups"][0].update(table="no"), "table 'no' is unknown"),
        (lambda m: m["files"].update({"../x": {"bytes": 1, "crc32": ""}}), "file '../x'"),
        (of_table("hashed", first_row=10**6), "table 'hashed' has rows that"),
        (of_table("hashed", rows=2**62), "table 'hashed' has rows that"),
        (of_table("hashed", rows=-1), "rows=-1"),
        (of_table("hashed", rows=1), "table 'hashed' has too few rows"),
        (of_table("hashed", dim=2**60), f"dim={2**60}"),
        (of_table("hashed", storage="int2"), "storage='int2'"),
        (of_table("keys", keys="dense.safetensors", rows=10**6), "table 'keys' has rows that"),
    ],
)
def test_manifests_that_cannot_be_are_refused(program, artefact, change, said):
    rewrite(artefact, change)
    assert said in problem(program, artefact)


def test_files_that_cannot_be_are_refused(program, artefact, tmp_path):
    assert "there is no such directory" in problem(program, tmp_path / "none")
    assert "is no artefact: manifest.json is missing" in problem(program, tmp_path)
    manifest = artefact / "manifest.json"
    whole = manifest.read_bytes()
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 3):
        manifest.write_bytes(whole[:cut])
        assert f"the manifest of artefact {artefact} is damaged" in problem(program, artefact)
    manifest.write_bytes(whole.replace(b'"name": "art"', b'"name": "brt"'))
    assert "its bytes are not those that were written" in problem(program, artefact)
    manifest.write_bytes(whole)
    for file, words in (
        ("compiled/dense.pt2", ()),
        (next(f for f in json.loads(whole)["files"] if f.endswith(".bin")), ("--check-rows",)),
    ):
        raw = (artefact / file).read_bytes()
        (artefact / file).write_bytes(raw[:50] + bytes([raw[50] ^ 1]) + raw[51:])
        assert f"{file} is damaged" in problem(program, artefact, *words)
        (artefact / file).write_bytes(raw[:-1])
        assert f"{file} has {len(raw) - 1} of {len(raw)} bytes" in problem(program, artefact)
        (artefact / file).unlink()
        assert f"is an incomplete artefact: {file} is missing" in problem(program, artefact)
        (artefact / file).write_bytes(raw)
    assert run(program, artefact, "--info").returncode == 0


def test_nothing_that_is_read_can_crash_it(made, artefact, tmp_path, monkeypatch):
    """Built with sanitizers, which end the program where memory or arithmetic is misused."""
    program = build(tmp_path / "build", sanitize="address,undefined")
    # allocations of libraries live as long as the process
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0:exitcode=77")
    monkeypatch.setenv("UBSAN_OPTIONS", "exitcode=77")
    rows = raw_rows(105, 100, known=60).drop_columns(["label"])
    rng = random.Random(4)
    for written in (as_json(rows), as_stream(rows), as_file(rows)):
        found = numbers(run(program, artefact, "--logits", stdin=written), "logit")
        assert torch.equal(found, python_logits(made(0), rows))
    short = rows.slice(0, 3)
    for written in (as_json(short), as_stream(short), as_file(short)):
        for _ in range(5):
            raw = bytearray(written)
            for _ in range(3):
                raw[rng.randrange(len(raw))] = rng.choice([0, 34, 93, 125, 255, 48])
            done = run(program, artefact, stdin=bytes(raw[: rng.randrange(1, len(raw) * 2)]))
            assert done.returncode in (0, 1), done.stderr.decode()
    manifest = artefact / "manifest.json"
    whole = manifest.read_bytes()
    for _ in range(12):
        at = rng.randrange(len(whole) - 40)
        damaged = whole[:at] + bytes([rng.choice(b'0"}],-9')]) + whole[at + 1 : -27]
        manifest.write_bytes(damaged + b',\n"checksum": "%08x"\n}\n' % zlib.crc32(damaged))
        done = run(program, artefact, stdin=as_json(short))
        assert done.returncode in (0, 1), done.stderr.decode()


# ---- where it lies


def test_its_sources_are_in_the_wheel(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling, which makes wheels, is not here")
    words = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([sys.executable, *map(str, words), SOURCE.parents[2]], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {Path(name).name for name in ZipFile(wheel).namelist() if "inference/cpp/" in name}
    assert packed == {path.name for path in SOURCE.iterdir()} >= {"CMakeLists.txt", "main.cpp"}
