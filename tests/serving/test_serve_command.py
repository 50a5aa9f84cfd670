"""`python -m recapp.serve` as a person starts it: real clients, signals, slow ones, the page."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pyarrow as pa
import pytest
from jobs import command, environment
from serving.browser import Browser
from serving.processes import ServerProcess, one_answer, raw, trained, whole

from recapp import load_model
from recapp.stored.stored_model import read_manifest

pytestmark = pytest.mark.full

ROWS = 40


@pytest.fixture(scope="module")
def artefact(stored):
    return trained(stored)


@pytest.fixture(scope="module")
def scorer(artefact):
    return load_model(artefact)


@pytest.fixture(scope="module")
def server(artefact, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, artefact, "name=clicks", fresh=True) as made:
        yield made


def rows(count=ROWS, seed=1):
    """Random rows in Criteo's columns."""
    random = np.random.default_rng(seed)
    dense = {f"I{i}": random.integers(0, 99, count).astype(np.float32) for i in range(1, 14)}
    sparse = {f"C{i}": random.integers(0, 2**32, count) for i in range(1, 27)}
    return pa.table(dense | sparse)


def body_of(table):
    """A table as rows of JSON."""
    return {"rows": table.to_pylist()}


def test_a_real_client_gets_the_models_own_scores(server, scorer):
    http = pytest.importorskip("tritonclient.http")
    given = rows()
    client = http.InferenceServerClient(server.address.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("clicks") and client.is_model_ready("clicks", scorer.version)
    described = client.get_model_metadata("clicks")
    assert [each["name"] for each in described["inputs"]] == given.column_names
    assert client.get_model_repository_index()[0]["state"] == "READY"
    for binary in (True, False):
        tensors = []
        for name in given.column_names:
            values = given[name].to_numpy()
            kind = "FP32" if name.startswith("I") else "INT64"
            tensors.append(http.InferInput(name, [ROWS], kind))
            tensors[-1].set_data_from_numpy(values, binary_data=binary)
        outputs = [http.InferRequestedOutput("score", binary_data=binary)]
        answer = client.infer("clicks", tensors, outputs=outputs, request_id="9")
        assert answer.get_response()["id"] == "9"
        assert answer.get_response()["model_version"] == scorer.version
        assert answer.as_numpy("score").tolist() == scorer.predict(given).tolist()
    assert client.infer("clicks", tensors).as_numpy("score").shape == (ROWS,)
    with pytest.raises(Exception, match="input C2 and 24 more: missing"):
        client.infer("clicks", tensors[:14])
    client.load_model("clicks")
    client.close()


def test_it_says_where_it_is_with_which_model_and_limits(server, scorer, artefact):
    assert server.row["model"] == "clicks" and server.row["version"] == scorer.version
    assert server.row["artefact"] == str(artefact) and server.row["max_rows"] == 4096


def test_the_example_of_a_checkpoint_are_the_rows_that_it_has_kept(server, scorer, artefact):
    path = "/v2/models/clicks"
    found = json.loads(server.ask("GET", f"{path}/example")[2])
    expected = read_manifest(artefact).example
    assert len(expected) == 4
    assert found["made_up"] is False
    assert found["rows"] == [{name: row[name] for name in found["rows"][0]} for row in expected]
    scores = json.loads(server.ask("POST", f"{path}/infer_rows", found)[2])["scores"]
    assert scores == scorer.predict(pa.Table.from_pylist(found["rows"])).tolist()


def test_a_taken_port_is_one_line(server, artefact, tmp_path):
    taken = f"port={server.port}"
    found = command("serve", f"artefact={artefact}", taken, cwd=tmp_path, fresh=True)
    assert found.error() == (
        f"port={server.port}: cannot listen at 127.0.0.1:{server.port} (Address already in use); "
        "choose another port=N, or port=0 for any that is free"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["host=no.such.host.invalid"], "host=no.such.host.invalid: there is no such host"),
        (["host=192.0.2.1"], "host=192.0.2.1: this machine has no such address"),
        (["port=70000"], "port=70000: must be a whole number"),
        (["port=0", "name=a/b"], "name=a/b: the name of a model is part of the paths"),
        (["max_batch=0"], "max_batch=0: must be a whole number of at least 1"),
        (["max_row=5"], "unknown setting max_row: did you mean max_rows"),
    ],
)
def test_a_wrong_setting_is_one_line(artefact, tmp_path, settings, said):
    assert said in command("serve", f"artefact={artefact}", *settings, cwd=tmp_path).error()


def test_an_artefact_that_is_not_there_is_one_line(tmp_path):
    assert "nowhere" in command("serve", "artefact=nowhere", "port=0", cwd=tmp_path).error()
    assert "artefact must be given" in command("serve", "port=0", cwd=tmp_path).error()


def test_without_the_extra_it_says_how_to_install_it(artefact, tmp_path):
    code = (
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'uvicorn' else found(name, *rest)\n"
        "import sys; from recapp.serve import main\n"
        f"sys.exit(main(['artefact={artefact}', 'port=0']))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 1
    assert ran.stderr == (
        "error: recapp.serve needs uvicorn, which is not installed: in the clone of recapp, "
        'run pip install ".[serve]"\n'
    )


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_it_answer_what_has_come_and_ends_it_with_0(
    artefact, tmp_path, number, start_server
):
    made = start_server(tmp_path, artefact, "max_wait_ms=1500")
    answers = []
    body = body_of(rows(3))
    path = f"/v2/models/{made.row['model']}/infer_rows"
    asking = threading.Thread(target=lambda: answers.append(made.ask("POST", path, body)))
    asking.start()
    time.sleep(0.7)
    assert made.stop(number) == 0
    asking.join()
    assert answers[0][0] == 200
    said = ["no new connections; pending requests are answered", "ended"]
    assert made.errors.splitlines()[-2:] == said


def test_clients_that_keep_their_connections_lose_no_request_at_the_end(
    artefact, tmp_path, start_server
):
    made = start_server(tmp_path, artefact, "name=clicks")
    body = body_of(rows(3))
    path = "/v2/models/clicks/infer_rows"
    answers = []
    asked_often = threading.Event()

    def ask():
        with closing(made.connect()) as connection:
            said = ""
            while said != "close":
                status, headers, _ = made.ask("POST", path, body, connection)
                said = headers.get("connection", "")
                answers.append(status)
                if len(answers) > 200:
                    asked_often.set()

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(ask) for _ in range(8)]
        assert asked_often.wait(60)
        assert made.stop() == 0
        for each in asking:
            each.result()  # raises what a connection that was cut off raises
    assert set(answers) == {200}


def test_sighup_reads_the_model_anew_and_a_bad_one_leaves_the_old_one(
    artefact, tmp_path, start_server
):
    link = tmp_path / "current"
    link.symlink_to(artefact)
    made = start_server(tmp_path / "server", link)
    path = "/v2/models/current/infer_rows"
    made.process.send_signal(signal.SIGHUP)
    _until(lambda: "is in service" in made.errors)
    assert made.metrics()['recapp_reloads_total{result="loaded"}'] == 1
    link.unlink()
    link.symlink_to(tmp_path)
    made.process.send_signal(signal.SIGHUP)
    _until(lambda: "stays in service" in made.errors)
    status, _, body = made.ask("POST", "/v2/repository/models/current/load")
    assert status == 400 and b"stays in service" in body
    assert made.ask("POST", path, body_of(rows()))[0] == 200
    assert made.stop() == 0


def _until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


# ---- clients that are slow, or no clients of HTTP


def test_a_client_that_never_ends_its_request_loses_its_connection(
    artefact, tmp_path, start_server
):
    made = start_server(tmp_path, artefact, "timeout_s=1", "name=clicks")
    head = b"POST /v2/models/clicks/infer HTTP/1.1\r\nhost: x\r\n"
    with raw(made) as slow:  # a head that does not end
        slow.sendall(head)
        assert whole(slow) == b""
    with raw(made) as slow:  # a body that does not come
        slow.sendall(head + b"content-length: 100\r\n\r\n{")
        said = whole(slow)
        assert said.startswith(b"HTTP/1.1 408") and b"timeout_s=1" in said
    with raw(made) as slow:  # a body that nobody reads
        slow.sendall(head + b"content-length: 99999999\r\n\r\n{")
        assert whole(slow).startswith(b"HTTP/1.1 413")
    with raw(made) as wrong:
        wrong.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        said = whole(wrong)
        assert said.startswith(b"HTTP/1.1 400") and b"Invalid HTTP request" in said
    with raw(made) as wrong:  # what a proxy may read otherwise
        lengths = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
        wrong.sendall(head + lengths + b"0\r\n\r\nGET /v2 HTTP/1.1\r\nhost: x\r\n\r\n")
        said = whole(wrong)
        assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1
    with raw(made) as wrong:  # a body that is damaged when it has been refused already
        wrong.sendall(b"POST /v3 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert one_answer(wrong)[0].startswith(b"HTTP/1.1 404")
        wrong.sendall(b"no length\r\n")
        assert whole(wrong) == b""
    head = (
        b"POST /v2/repository/models/clicks/load HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    )
    with raw(made) as slow:  # as of scores
        slow.sendall(head)
        assert whole(slow).startswith(b"HTTP/1.1 408")
    with raw(made) as gone:
        gone.sendall(head)
    assert made.ask("GET", "/v2/health/ready")[0] == 200
    assert made.stop() == 0
    assert made.errors.splitlines() == [
        "no new connections; pending requests are answered",
        "ended",
    ]


def test_a_flood_of_connections_is_closed_without_a_word_in_the_log(artefact, tmp_path):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "from recapp.serve import main; sys.exit(main(sys.argv[1:]))"
    )
    settings = [f"artefact={artefact}", "port=0", "format=json", "max_connections=20"]
    with subprocess.Popen(
        [sys.executable, "-c", code, *settings],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        address = json.loads(process.stdout.readline())["rows"][0]["address"]
        host, _, port = address.removeprefix("http://").partition(":")
        with ExitStack() as open_:
            for _ in range(300):
                open_.enter_context(socket.create_connection((host, int(port)), timeout=60))
        _until(lambda: _answers(host, int(port)))
        process.terminate()
        said = process.stderr.read()
    assert process.returncode == 0
    assert said.splitlines() == ["no new connections; pending requests are answered", "ended"]


def _answers(host, port):
    with socket.create_connection((host, port), timeout=60) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
        return whole(connection).startswith(b"HTTP/1.1 200")


def test_connections_beyond_their_limit_are_answered_by_its_name(artefact, tmp_path, start_server):
    made = start_server(tmp_path, artefact, "max_connections=3")
    with ExitStack() as open_:
        connections = [open_.enter_context(closing(made.connect())) for _ in range(4)]
        answers = [made.ask("GET", "/v2/health/live", connection=each) for each in connections]
    assert [status for status, _, _ in answers] == [200, 200, 200, 503]
    assert made.stop() == 0


# ---- the page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


def test_the_page_shows_the_model_and_sends_a_request(server, scorer, browser):
    browser.open(server.address)
    assert browser.value("document.querySelector('h1').textContent") == "clicks"
    browser.until("document.getElementById('rows').value")
    typed = json.loads(browser.value("document.getElementById('rows').value"))
    typed["rows"][0]["I1"] = 7
    text = json.dumps(json.dumps(typed))
    browser.value(f"document.getElementById('rows').value = {text}")
    browser.value("document.getElementById('send').click()")
    shown = browser.until("document.querySelector('#scores tbody td:nth-child(2)')?.textContent")
    columns = {name: [row[name] for row in typed["rows"]] for name in typed["rows"][0]}
    assert float(shown) == pytest.approx(float(scorer.predict(pa.table(columns))[0]), abs=1e-5)
    assert " ms, by version " in browser.value("document.getElementById('said').textContent")
    assert browser.value("document.querySelectorAll('#steps tr').length") == 5
    browser.value("document.getElementById('rows').value = '{\"rows\": [{\"I1\": 1}]}'")
    browser.value("document.getElementById('send').click()")
    said = browser.until("document.querySelector('#said.failed')?.textContent")
    assert said.startswith("400: feature I2: missing in every row")
    assert [fault for fault in browser.faults if "400" not in str(fault)] == []
    browser.faults.clear()


def test_the_page_shows_latency_and_throughput_live(server, browser):
    browser.open(server.address)
    assert int(browser.until("document.getElementById('total').textContent.match(/[0-9]+/)?.[0]"))
    browser.until("document.getElementById('rows').value")
    box = "document.getElementById('rows')"
    assert browser.value(f"{box}.scrollHeight <= {box}.clientHeight"), "whole rows are shown"
    path = "/v2/models/clicks/infer_rows"
    end = time.monotonic() + 60
    while not browser.value("document.getElementById('p99').textContent.endsWith(' ms')"):
        assert time.monotonic() < end, "no latency is shown"
        assert server.ask("POST", path, body_of(rows(3)))[0] == 200
        time.sleep(0.1)
    assert browser.value("document.getElementById('state').textContent") == "ready"
    while not browser.value("/[1-9]/.test(document.getElementById('refused').textContent)"):
        assert time.monotonic() < end, "no refusal is shown"
        assert server.ask("POST", path, b"no JSON")[0] == 400
        time.sleep(0.05)
    assert browser.faults == []


@pytest.mark.parametrize("width", [360, 1300])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_and_a_screen_in_both_themes(server, browser, width, dark, tmp_path):
    browser.open(server.address, width, dark)
    browser.until("document.documentElement.dataset.looked")
    assert browser.value("document.documentElement.scrollWidth") <= width
    ground, ink = (
        browser.value(f"getComputedStyle(document.body).{name}.match(/\\d+/g).map(Number)")
        for name in ("backgroundColor", "color")
    )
    assert (max(ground) < 60 and min(ink) > 200) if dark else (min(ground) > 240 and max(ink) < 60)
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert browser.faults == []


def test_the_page_asks_for_nothing_from_elsewhere(server, browser):
    browser.open(server.address)
    browser.until("document.documentElement.dataset.looked")
    loaded = browser.value("performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded and all(name.startswith(server.address) for name in loaded)
    _, headers, _ = server.ask("GET", "/")
    assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")


def test_a_name_cannot_break_out_of_the_page(artefact, tmp_path, browser, start_server):
    name = 'a"><img src=x onerror=document.title=1>'
    made = start_server(tmp_path, artefact, f"name='{name}'")
    browser.open(made.address)
    assert browser.value("document.querySelector('h1').textContent") == name
    assert browser.value("document.title") == f"{name} · recapp"
    made.stop()
    browser.faults.clear()
