"""The live page: what it answers is what the verbs compute, it answers nobody else, and a real browser can use it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import qkscope as qk
from browser import Watched, chromium
from qkscope import BadInput, Head
from qkscope.analyses.decompose import decompose
from qkscope.capture.families import tiny_model
from qkscope.explorer.opening import page_of
from qkscope.explorer.server import Explorer
from qkscope.explorer.session import Session
from qkscope.maths.bases import joint_basis
from qkscope.runs.result import Result

PROMPT = "hat : O jam : Z cat : B jam :"
BUDGET_MS = 100


@contextlib.contextmanager
def served(session):
    server = Explorer(session)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(server, what, question=None, *, host=None, token=None, kind="application/json", raw=None, headers=()):
    """One request, as it is: status, headers and JSON (or text)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = raw if raw is not None else None if question is None else json.dumps(question).encode()
    given = {"Host": host or server.hosts[0], "Content-Type": kind, **dict(headers)}
    path = f"/{server.token if token is None else token}/{what}" if not what.startswith("/") else what
    connection.request("GET" if body is None else "POST", path, body, given)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.headers), json.loads(text) if text.startswith("{") else text


@pytest.fixture(scope="module")
def nano():
    return qk.Scope.load("nano:mixed")


@pytest.fixture(scope="module")
def fit(scope):
    return qk.decompose(scope, qk.tasks.binding(4), ["L1H3", "L0H1"], 24, contrasts=["order", "lexical"], replicates=19)


@pytest.fixture(scope="module")
def session(scope, fit):
    return Session(scope, fit, qk.tasks.binding(4))


@pytest.fixture(scope="module")
def server(session):
    with served(session) as running:
        yield running


# ---------------------------------------------------------------- it computes what the verbs compute


def test_it_describes_the_model(session, scope):
    about = session.describe()
    assert about["heads"] == [str(head) for head in scope.heads()]
    assert about["fitted"] == ["L1H3", "L0H1"]


@pytest.mark.parametrize("query", [None, 5])
def test_attention_is_that_of_the_model_from_every_token(session, scope, query):
    found = session.look(PROMPT, query)
    ids = scope.tokenizer(PROMPT, return_tensors="pt")
    eager = qk.Scope.from_model(scope.model, scope.tokenizer, check=False).model
    eager.set_attn_implementation("eager")
    output = eager(**ids, output_attentions=True)
    eager.set_attn_implementation("sdpa")
    at = ids["input_ids"].shape[1] - 1 if query is None else query
    attention = torch.cat([layer[0, :, at, : at + 1] for layer in output.attentions])
    bytes_ = np.frombuffer(base64.b64decode(found["attention"]), np.uint8).reshape(attention.shape)
    np.testing.assert_allclose(bytes_ / 255, attention.detach().numpy(), atol=0.003)
    assert found["query"] == at
    assert found["next"][0]["before"] == pytest.approx(float(output.logits[0, at].softmax(-1).max()), abs=1e-5)
    assert len(found["tokens"]) == ids["input_ids"].shape[1]
    assert all(0 < row["key"] <= at for row in found["matter"])
    assert [row["moved"] for row in found["matter"]] == sorted((row["moved"] for row in found["matter"]), reverse=True)


@pytest.mark.parametrize(("query", "key"), [(None, None), (7, 5)])
def test_the_answer_is_whys(session, scope, query, key):
    """Splits, the cut of the first two writers with its draws, and the next token without the attention."""
    at = len(session.look(PROMPT)["tokens"]) - 1 if query is None else query
    mine = session.why(PROMPT, at, "L1H1", key)
    theirs = qk.why(scope, PROMPT, "L1H1", query, key)
    named = {(row["by"], row["side"], row["part"]): row["value"] for row in theirs.tables["parts"]}
    own = {(row["by"], row["side"], row["part"]): row["value"] for row in mine["parts"]}
    assert own.keys() == named.keys()
    assert all(own[name] == pytest.approx(value, abs=1e-3) for name, value in named.items())
    attention = {row["position"]: row["attention"] for row in theirs.tables["attention"]}
    assert all(mine["row"][i] == pytest.approx(value, abs=1e-4) for i, value in attention.items())
    cut = next(row for row in theirs.tables["cuts"] if row["side"] == "key" and row["k"] == 2)
    changed = session.change(
        PROMPT, at, "L1H1", mine["key"], [f"cut key {name}" for name in cut["writers"].split(", ")]
    )
    assert changed["after"] == pytest.approx(cut["after"], abs=1e-4)
    assert changed["random"] == pytest.approx(cut["random"], abs=1e-4)
    assert changed["verdict"] == cut["verdict"]
    without = {row["token"]: row["without_key"] for row in theirs.tables["output"]}
    for row in mine["removed"]["next"]:
        if row["token"] in without:
            assert row["after"] == pytest.approx(without[row["token"]], abs=1e-4)


def test_features_of_a_fit_split_the_logit(session, fit):
    parts = [row for row in session.why(PROMPT, 10, "L1H3")["parts"] if row["by"] == "features"]
    assert [row["part"] for row in parts][-1] == "rest"
    found = session.why(PROMPT, 10, "L1H3")
    assert sum(row["value"] for row in parts) == pytest.approx(found["logit"], abs=1e-3)
    assert found["fitted"] == {name: fit[name, "L1H3"].rank for name in ("order", "lexical")}


@pytest.mark.parametrize("features", [["lexical"], ["order", "lexical"], []])
def test_a_swap_is_the_closed_form(session, scope, fit, features):
    """Two logits move by ±δ, δ = scale · q P (k_b − k_a); the others stay."""
    text = " ".join(["swap 5", ",".join(features)]).strip()
    found = session.change(PROMPT, 10, "L1H3", 2, [text])
    row = session._looked(PROMPT).again.row(10, Head(1, 3))
    q, k = row.q[0, 0].double(), row.k[0, 0].double()
    bases = [fit[name, "L1H3"].basis("key") for name in features]
    basis = joint_basis(bases).double() if bases else torch.eye(k.shape[1]).double()
    logits = row.scale * (k @ q)
    moved = row.scale * (q @ basis) @ (basis.mT @ (k[5] - k[2]))
    logits[2] += moved
    logits[5] -= moved
    after = torch.tensor(found["row"], dtype=torch.float64)
    torch.testing.assert_close(after, logits[:11].softmax(-1), atol=2e-5, rtol=0)
    assert (found["verdict"] == "vacuous") is (not features)


def test_a_token_alone_runs_as_in_its_prompt(session):
    """Its own keys and values after those kept give what the whole prompt gives, changed or not."""
    known = session._looked(PROMPT)
    for query in (4, len(known.tokens) - 1):
        rows = [None, known.again.without(query, list(session.scope.heads())[5], 2)]
        alone, whole = known.again._run(query, rows), known.again._run_whole(query, rows)
        torch.testing.assert_close(alone.attention, whole.attention, atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.logits, whole.logits, atol=1e-3, rtol=0)
        assert float(alone.attention[1, 5, 2]) == 0
        assert not torch.equal(alone.logits[0], alone.logits[1])


def test_changes_add_up_and_order_does_not_matter(session):
    first = session.why(PROMPT, 10, "L1H1")
    key, other = first["key"], 3 if first["key"] != 3 else 4
    writers = [row["part"] for row in first["parts"] if row["by"] == "writers" and row["side"] == "key"][:2]
    cuts = [f"cut key {name}" for name in writers]
    ask_for = lambda changes: session.change(PROMPT, 10, "L1H1", key, changes)["row"]  # noqa: E731
    assert ask_for(cuts) == ask_for(cuts[::-1])
    assert ask_for([*cuts, "remove"])[key] == 0
    assert ask_for([cuts[0]]) != ask_for(cuts)
    assert ask_for([f"swap {other}", f"swap {other}"]) == pytest.approx(first["row"], abs=1e-4)


def test_a_head_is_fitted_when_asked(scope, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session = Session(scope, task=qk.tasks.binding(4))
    ways = lambda: {row["by"] for row in session.why(PROMPT, 10, "L0H2")["parts"]}  # noqa: E731
    assert "features" not in ways()
    first = session.fit("L0H2")
    assert set(first["features"]) == {"order", "lexical"}
    assert "features" in ways()
    assert Session(scope, task=qk.tasks.binding(4)).fit("L0H2") == first  # from the cache
    assert any(tmp_path.rglob("results.json"))


def test_a_fit_in_the_cache_is_that_of_the_tasks_size_form_and_file(scope, monkeypatch, tmp_path):
    """Each was refused as another job, or taken for another's, while they shared a place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = [qk.tasks.binding(4), qk.tasks.binding(5), qk.tasks.binding(4, "sentence"), qk.tasks.binding(4, chat=True)]
    places = {Session(scope, task=task).features._job(scope) for task in asked}
    assert len(places) == len(asked)
    for task in asked[:3]:
        assert Session(scope, task=task).fit("L0H2")["features"]


def test_what_discover_found_opens_here(nano, tmp_path):
    """Its directions are of the query's frame: they split the logit, and the head has a name."""
    found = qk.discover(nano, qk.tasks.induction(), ["L1H1"], 200, test=40, sizes=[], progress=False)
    found.write(tmp_path / "found")
    session = Session.load(nano, tmp_path / "found")
    answer = session.why(PROMPT, 10, "L1H1")
    parts = {row["part"]: row["value"] for row in answer["parts"] if row["by"] == "features"}
    assert set(parts) == {"discovered", "rest"}
    assert sum(parts.values()) == pytest.approx(answer["logit"], abs=1e-3)
    assert session.describe()["fitted"] == ["L1H1"]
    assert session.describe()["said"] == {"L1H1": "after a copy"}
    assert answer["about"] == found.table()[0]["sentence"]
    assert session.change(PROMPT, 10, "L1H1", answer["key"], ["swap 3 discovered"])["verdict"] != "vacuous"


def test_a_folder_without_features_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(BadInput, match="decompose, discover or atlas wrote"):
        qk.view(live=True, fit=tmp_path, browser=False)
    Result("heads", {"heads": []}).write(tmp_path / "run")
    with pytest.raises(BadInput, match="was written by heads"):
        qk.view(live=True, fit=tmp_path / "run", browser=False)


def test_pieces_of_one_character_read_as_it(smol):
    session = Session(smol)
    tokens = session.look("the cat 🐱 sat on 猫")["tokens"]
    assert "�" not in "".join(tokens)
    assert "".join(tokens) == "the cat 🐱 sat on 猫"


def test_a_model_whose_writers_cannot_be_told_apart_is_still_looked_into(scope, monkeypatch):
    def refuse(_scope):
        raise BadInput("its writers cannot be told apart.")

    monkeypatch.setattr("qkscope.explorer.session.reader_of", refuse)
    session = Session(scope)
    assert session.describe()["no_writers"] == "its writers cannot be told apart."
    answer = session.why(PROMPT, 10, "L1H1")
    assert answer["parts"] == []
    assert session.change(PROMPT, 10, "L1H1", answer["key"], ["remove"])["moved"] >= 0
    with pytest.raises(BadInput, match="none can be cut"):
        session.change(PROMPT, 10, "L1H1", answer["key"], ["cut key L0H1"])
    assert session.save(PROMPT, 10, "L1H1", answer["key"])["html"].startswith("<!doctype html>")


# ---------------------------------------------------------------- it answers sentences, and nobody else

HERE = {"prompt": PROMPT, "query": 10, "head": "L1H3", "key": 2}


@pytest.mark.parametrize(
    ("what", "question", "says"),
    [
        ("look", {"prompt": ""}, "the prompt is empty"),
        ("look", {"prompt": " \n "}, "the prompt is empty"),
        ("look", {"prompt": "hat"}, "has one token"),
        ("look", {"prompt": "hat " * 3000}, "the prompt has 3000 tokens"),
        ("look", {"prompt": "h" * 500_000}, "characters: at most"),
        ("look", {"prompt": "hat \ud83d"}, "half of a character"),
        ("look", {"prompt": 3}, "should be a text"),
        ("look", {}, "needs prompt"),
        ("look", {"prompt": PROMPT, "query": 0}, "token 0 cannot ask"),
        ("look", {"prompt": PROMPT, "query": 99}, "token 99 cannot ask"),
        ("look", {"prompt": "a", "path": "/etc/passwd"}, "takes no 'path'"),
        ("why", {**HERE, "head": "L99H0"}, "L99H0"),
        ("why", {**HERE, "head": "<b>"}, "is not a head"),
        ("why", {**HERE, "key": 11}, "not before the token that asks"),
        ("why", {**HERE, "key": -1}, "not before the token that asks"),
        ("why", {**HERE, "key": True}, "should be a whole number"),
        ("change", {**HERE, "changes": []}, "from 1 to 20 changes"),
        ("change", {**HERE, "changes": ["remove"] * 21}, "from 1 to 20 changes"),
        ("change", {**HERE, "changes": ["explode"]}, "a change is cut, swap or remove"),
        ("change", {**HERE, "changes": ["swap 2"]}, "cannot be swapped with itself"),
        ("change", {**HERE, "changes": ["swap 99"]}, "not in sight"),
        ("change", {**HERE, "changes": ["swap 5 colour"]}, "nothing was fitted for 'colour'"),
        ("change", {**HERE, "changes": ["cut key L2H0"]}, "writes nothing that L1H3 reads"),
        ("save", {**HERE, "changes": ["cut <b> L0H0"]}, "a change is cut, swap or remove"),
    ],
)
def test_bad_questions_are_answered_in_a_sentence(server, what, question, says):
    status, _, answer = ask(server, f"api/{what}", question)
    assert status == 400
    assert says in answer["error"]
    assert answer["error"].endswith(".")


def test_only_this_machine_with_the_token_is_answered(server):
    port = server.server_port
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "api/model")[0] == 200
    assert ask(server, "api/model", host=f"localhost:{port}")[0] == 200
    for status, given in (
        (403, {"host": "evil.example"}),
        (403, {"host": f"evil.example:{port}"}),
        (403, {"headers": {"Origin": "http://evil.example"}}),
        (404, {"token": "wrong"}),
        (404, {"token": ""}),
        (404, {"token": "%C3%A9%00"}),
    ):
        found, _, answer = ask(server, "api/model", **given)
        assert found == status, given
        assert "error" in answer
        assert server.token not in json.dumps(answer)
    assert ask(server, "/")[0] == 404
    assert ask(server, "api/look", {"prompt": "hat"}, kind="text/plain")[0] == 415
    assert ask(server, "api/look", raw=b"{", kind="application/json")[0] == 400
    assert ask(server, "api/look", raw=b"[" * 100_000)[0] == 400
    assert ask(server, "api/look", raw=b"[]")[0] == 400
    assert ask(server, "api/nothing", {})[0] == 404
    assert ask(server, "api/look", raw=b" " * (2 << 20))[0] == 413


def test_a_length_of_thousands_of_digits_is_refused(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest("POST", f"/{server.token}/api/look")
    connection.putheader("Content-Length", "9" * 5000)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_a_reader_who_leaves_while_we_look_is_no_error(server, monkeypatch, caplog):
    looking, left, done, said = threading.Event(), threading.Event(), threading.Event(), []

    def slow(prompt):
        looking.set()
        left.wait(30)
        return {"tokens": "x" * 20_000_000}

    monkeypatch.setitem(server.questions, "look", slow)
    monkeypatch.setattr(server, "handle_error", lambda *_: said.append("a traceback"))
    monkeypatch.setattr(server, "shutdown_request", lambda request: (request.close(), done.set()))
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    body = json.dumps({"prompt": "hat"})
    connection.request("POST", f"/{server.token}/api/look", body, {"Content-Type": "application/json"})
    assert looking.wait(30)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # gone, not half-closed
    connection.close()
    left.set()
    assert done.wait(30)
    assert said == []
    assert "a question failed" not in caplog.text


@pytest.mark.parametrize(
    "path", ["../server.py", "..%2fserver.py", "static/../../page/report.py", "/etc/passwd", "index.html"]
)
def test_no_path_is_looked_up_on_the_disk(server, path):
    assert ask(server, path)[0] == 404


def test_every_answer_forbids_what_the_page_does_not_need(server):
    for what in ("", "page.css", "base.js", "map.js", "tokens.js", "explorer.js", "explorer.css", "api/model"):
        status, headers, _ = ask(server, what)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "unsafe" not in headers["Content-Security-Policy"]


def test_questions_at_once_are_answered_one_after_the_other(server):
    prompts = [f"hat : {box} jam : Z jam :" for box in "OABCKM"]
    answers = {}

    def run(prompt):
        answers[prompt] = ask(server, "api/why", {"prompt": prompt, "query": 7, "head": "L1H3"})[2]["row"]

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        assert answers[prompt] == server.session.why(prompt, 7, "L1H3")["row"]


def test_a_pre_rope_fit_cannot_be_swapped(scope):
    fit = qk.decompose(scope, qk.tasks.binding(4), "L1H3", 8, contrasts=["order"], space="pre_rope", replicates=9)
    with pytest.raises(BadInput, match="pre_rope vectors do not give the model's attention"):
        Session(scope, fit)


def test_a_model_without_a_tokenizer_cannot_be_asked(scope):
    with pytest.raises(BadInput, match="has no tokenizer"):
        Session(qk.Scope.from_model(scope.model, name="bare", check=False))


def test_the_command_serves_until_it_is_stopped(scope, model, tmp_path):
    decompose(scope, qk.tasks.binding(4), [Head(1, 3)], 16, out=tmp_path / "fit", contrasts=["order", "lexical"])
    assert 'class="block made"' in page_of(tmp_path / "fit").read_text()  # a fit is a run folder too
    command = [sys.executable, "-m", "qkscope", "view", "--live", "--fit", str(tmp_path / "fit"), "--no-browser"]
    # a test run in the background of a shell is deaf to Ctrl-C, and so would its children be
    listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    try:
        url = running.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        address, _, token = url.removeprefix("http://").rstrip("/").partition("/")
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", f"/{token}/api/model")
        assert json.loads(connection.getresponse().read())["fitted"] == ["L1H3"]
        connection.close()
    finally:
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert "Traceback" not in errors


# ---------------------------------------------------------------- in a real browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def smol():
    return qk.Scope.load("smollm2-135m")


def drawn(watched, head=None):
    """Wait until the page stands still, and a head is answered."""
    watched.until(
        "!document.body.classList.contains('busy') && document.querySelectorAll('#answers .label').length > 3"
    )
    if head is not None:
        watched.until(f"document.getElementById('head').textContent === '{head}'")


def test_ask_cut_undo_save_and_come_back_by_the_address(browser, nano, tmp_path):
    """Type, ask from a middle token, pick a head that nobody fitted, click a key, cut a writer, undo, save, reload."""
    with served(Session(nano)) as server:
        watched = Watched(browser, server.url, width=1280, height=800)
        page = watched.page
        drawn(watched)
        page.fill("#prompt", PROMPT)
        assert page.locator("#stale").is_visible()  # what stands below is of the old prompt
        page.keyboard.press("Control+Enter")
        watched.until("!document.body.classList.contains('stale')")
        drawn(watched)
        page.locator('#tokens .token[data-g="8"] .fill').click(modifiers=["Shift"])
        watched.until("document.getElementById('asks-from').textContent === 'token 8'")
        drawn(watched)
        page.locator('#map .cell[data-at="2,1"]').click()
        drawn(watched, "L2H1")
        page.locator('#tokens .token[data-g="5"] .fill').click()
        watched.until("location.hash.includes('k=5')")
        drawn(watched)
        theirs = qk.why(nano, PROMPT, "L2H1", 8, 5)
        assert page.locator("#said p").first.inner_text().startswith("L2H1 at")
        values = [
            float(text.split(" · ")[0].replace("−", "-")) for text in page.locator("#parts .value").all_inner_texts()
        ]
        assert theirs.tables["check"][0]["logit"] == pytest.approx(values[-1], abs=0.01)
        before = page.locator("#keys .value, #answers .value").all_inner_texts()
        page.locator("#parts button", has_text="cut").first.click()
        watched.until("document.querySelectorAll('.made-change').length === 1")
        drawn(watched)
        assert page.locator("#moved .badge").inner_text() in ("supported", "not here", "unattended")
        assert "random" in page.locator("#moved .value").inner_text()
        page.locator("#painted button", has_text="what the changes do").click()
        page.locator("#remove").click()
        watched.until("document.querySelectorAll('.made-change').length === 2")
        drawn(watched)
        assert page.locator("#keys .value, #answers .value").all_inner_texts() != before
        changed, shown = page.url, page.locator("#moved").inner_text()
        page.locator("#undo").click()
        watched.until("document.querySelectorAll('.made-change').length === 1")
        page.locator("#undo").click()
        watched.until("document.querySelectorAll('.made-change').length === 0")
        assert page.locator("#keys .value, #answers .value").all_inner_texts() == before
        with page.expect_download() as saved:
            page.locator("#save").click()
        saved.value.save_as(tmp_path / "why.html")
        page.goto("about:blank")
        page.goto(changed)  # the whole state
        watched.until("document.querySelectorAll('.made-change').length === 2")
        drawn(watched, "L2H1")
        assert page.locator("#moved").inner_text() == shown
        assert page.locator("#asks-from").inner_text() == "token 8"
        assert page.locator("#prompt").input_value() == PROMPT
        assert watched.errors == []
        assert all(url.startswith((server.url, "data:", "blob:", "about:")) for url in watched.requests)
        page.close()
    offline = Watched(browser, (tmp_path / "why.html").as_uri())
    assert "L2H1" in offline.page.locator("h1.answer").inner_text()
    assert offline.errors == []
    assert all(url.startswith(("file:", "data:")) for url in offline.requests)
    offline.page.close()


def test_keys_alone_are_enough_and_focus_is_seen(browser, nano):
    with served(Session(nano)) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        drawn(watched)
        page.locator("#tokens .prompt").focus()
        for key in ("Home", "ArrowRight", "ArrowRight", "q"):
            page.keyboard.press(key)
        watched.until("document.getElementById('asks-from').textContent === 'token 2'")
        drawn(watched)
        for key in ("Home", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        watched.until("location.hash.includes('k=1')")
        drawn(watched)
        page.locator("#map svg").focus()
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        drawn(watched)
        page.keyboard.press("Tab")
        focus = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(focus) == "solid"
        cut = page.locator("#parts button").first
        cut.focus()
        page.keyboard.press("Enter")
        watched.until("document.querySelectorAll('.made-change').length === 1")
        drawn(watched)
        assert page.evaluate("document.activeElement.dataset.cut") is not None
        assert watched.errors == []
        page.close()


def test_what_the_reader_left_behind_is_not_shown(browser, nano):
    """A key picked while a change is under way: the change is not shown for it."""
    with served(Session(nano)) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        drawn(watched)
        held, change = threading.Event(), server.questions["change"]
        server.questions = {**server.questions, "change": lambda **asked: (held.wait(30), change(**asked))[1]}
        page.locator("#remove").click()
        page.locator('#tokens .token[data-g="2"] .fill').click()
        watched.until("location.hash.includes('k=2')")
        with page.expect_response("**/api/change"):
            held.set()
        page.wait_for_timeout(200)
        assert page.locator(".made-change").count() == 0
        assert "c=" not in page.url.partition("#")[2]
        assert watched.errors == []
        page.close()


def test_it_is_looked_at_on_every_screen(browser, smol):
    with served(Session(smol)) as server:
        watched = Watched(browser, server.url, width=1280, height=800)
        page = watched.page
        drawn(watched)
        assert page.locator("#map .cell").count() == 270
        page.locator("#parts button").first.click()
        watched.until("document.querySelectorAll('.made-change').length === 1")
        for name, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
            page.set_viewport_size({"width": width, "height": 844})
            page.emulate_media(color_scheme="dark" if dark else "light")
            page.wait_for_timeout(200)
            watched.shoot(f"explorer-{name}")
            assert watched.fits()
        assert watched.errors == []
        page.close()


def test_a_prompt_is_text_and_a_bad_one_is_a_sentence_in_the_page(browser, smol):
    with served(Session(smol)) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        drawn(watched)
        evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> jam:"
        page.fill("#prompt", evil)
        page.keyboard.press("Control+Enter")
        watched.until("document.getElementById('tokens').textContent.includes('script')")
        drawn(watched)
        shown = "".join(page.locator("#tokens .fill").evaluate_all("(all) => all.map((each) => each.textContent)"))
        assert shown.replace("␣", " ") == evil
        page.locator("#tokens .token").first.hover()
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0
        for given, says in (("   ", "the prompt is empty"), ("hat " * 3000, "tokens: at most 2048")):
            page.fill("#prompt", given)
            page.click("#look")
            watched.until(f"document.getElementById('error').textContent.includes('{says}')")
            assert page.locator("#error").is_visible()
        page.fill("#prompt", "jam: Z\njam:")
        page.click("#look")
        page.wait_for_selector("#error", state="hidden")
        assert [text for text in watched.errors if "400" not in text] == []  # the browser itself notes the refusals
        page.close()


def test_a_long_prompt_and_a_thousand_heads_stay_quick(browser, smol):
    """2,000 tokens, and 1,024 heads: pointing at a token repaints the whole map, and is not noticed."""
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 128,
             "head_dim": 4, "intermediate_size": 64, "vocab_size": len(smol.tokenizer),
             "max_position_embeddings": 2048}  # fmt: skip
    large = qk.Scope.from_model(tiny_model("llama", **shape), smol.tokenizer, name="large", check=False)
    with served(Session(large)) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        drawn(watched)
        assert page.locator("#map .cell").count() == 1024
        page.fill("#prompt", "cat sat on mat and " * 400)
        page.click("#look")
        watched.until("document.querySelectorAll('#tokens .token').length > 1990", 120)
        watched.until("document.querySelectorAll('#keys .label').length === 10", 120)  # those that get most come first
        costs = {
            "point at a token": watched.median_cost("#tokens .fill", "pointermove"),
            "point at a head": watched.median_cost("#map .cell", "pointermove"),
        }
        watched.shoot("explorer-large", full=False)
        assert page.locator("#strip").is_visible()
        assert watched.errors == []
        page.close()
    assert max(costs.values()) < BUDGET_MS, costs
