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
    assert about["head"] == "L1H3"


def test_attention_is_that_of_the_model(session, scope):
    found = session.look(PROMPT)
    ids = scope.tokenizer(PROMPT, return_tensors="pt")
    eager = qk.Scope.from_model(scope.model, scope.tokenizer, check=False).model
    eager.set_attn_implementation("eager")
    output = eager(**ids, output_attentions=True)
    eager.set_attn_implementation("sdpa")
    attention = torch.cat([layer[0, :, -1] for layer in output.attentions])
    bytes_ = np.frombuffer(base64.b64decode(found["attention"]), np.uint8).reshape(attention.shape)
    np.testing.assert_allclose(bytes_ / 255, attention.detach().numpy(), atol=0.003)
    likely = output.logits[0, -1].softmax(-1)
    assert found["next"][0]["before"] == pytest.approx(float(likely.max()), abs=1e-5)
    assert len(found["tokens"]) == ids["input_ids"].shape[1]


def test_the_split_is_attributes(session, scope, fit):
    rows = session.split(PROMPT, "L1H3")["rows"]
    for mine, theirs in zip(rows, qk.attribute(scope, PROMPT, "L1H3", fit).tables["tokens"], strict=True):
        for name in ("attention", "logit", "order", "lexical", "residual"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-4)
    one = session.split(PROMPT, "L1H3", ["lexical"])
    assert one["parts"] == ["lexical", "residual"]
    assert one["features"] == {name: fit[name, "L1H3"].rank for name in ("order", "lexical")}


@pytest.mark.parametrize("features", [["lexical"], ["order", "lexical@L1H3"], []])
def test_a_swap_is_the_closed_form(session, scope, fit, features):
    """Two logits move by ±δ, δ = scale · q P (k_b − k_a); the others stay."""
    found = session.swap(PROMPT, "L1H3", 2, 5, features)
    captured = session._capture(PROMPT).capture
    column = captured.heads.index(Head(1, 3))
    q, k = captured.q[0, column].double(), captured.k[0, captured.kv_of_head[column]].double()
    names = [name.split("@")[0] for name in features]
    basis = (
        joint_basis([fit[n, "L1H3"].basis("key") for n in names]).double() if names else torch.eye(k.shape[1]).double()
    )
    assert found["rank"] == basis.shape[1]
    logits = float(captured.scale[column]) * (k @ q)
    moved = float(captured.scale[column]) * (q @ basis) @ (basis.mT @ (k[5] - k[2]))
    logits[2] += moved
    logits[5] -= moved
    after = torch.tensor([row["attention"] for row in found["rows"]], dtype=torch.float64)
    torch.testing.assert_close(after, logits.softmax(-1), atol=1e-5, rtol=0)
    before, later = (torch.tensor([row[when] for row in found["next"]]) for when in ("before", "after"))
    assert not torch.equal(before, later)  # the model went on from the other keys


def test_a_head_is_fitted_when_asked(scope, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session = Session(scope, task=qk.tasks.binding(4))
    assert session.split(PROMPT, "L0H2")["parts"] == []
    first = session.fit("L0H2")
    assert set(first["features"]) == {"order", "lexical"}
    assert session.split(PROMPT, "L0H2")["parts"][-1] == "residual"
    assert Session(scope, task=qk.tasks.binding(4)).fit("L0H2") == first  # from the cache
    assert any(tmp_path.rglob("results.json"))


def test_a_fit_in_the_cache_is_that_of_the_tasks_size_form_and_file(scope, monkeypatch, tmp_path):
    """Each was refused as another job, or taken for another's, while they shared a place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = [qk.tasks.binding(4), qk.tasks.binding(5), qk.tasks.binding(4, "sentence"), qk.tasks.binding(4, chat=True)]
    places = {Session(scope, task=task)._job() for task in asked}
    assert len(places) == len(asked)
    for task in asked[:3]:
        assert Session(scope, task=task).fit("L0H2")["features"]


# ---------------------------------------------------------------- it answers sentences, and nobody else


@pytest.mark.parametrize(
    ("what", "question", "says"),
    [
        ("look", {"prompt": ""}, "the prompt is empty"),
        ("look", {"prompt": " \n "}, "the prompt is empty"),
        ("look", {"prompt": "hat " * 3000}, "the prompt has 3000 tokens"),
        ("look", {"prompt": "h" * 500_000}, "characters: at most"),
        ("look", {"prompt": "hat \ud83d"}, "half of a character"),
        ("look", {"prompt": 3}, "should be a text"),
        ("look", {}, "needs prompt"),
        ("look", {"prompt": "a", "head": "L0H0"}, "takes no 'head'"),
        ("look", {"prompt": "a", "path": "/etc/passwd"}, "takes no 'path'"),
        ("split", {"prompt": PROMPT, "head": "L99H0"}, "L99H0"),
        ("split", {"prompt": PROMPT, "head": "<b>"}, "is not a head"),
        ("split", {"prompt": PROMPT, "head": "L1H3", "features": ["lexical@L0H1"]}, "name features of one head"),
        ("split", {"prompt": PROMPT, "head": "L1H3", "features": ["colour"]}, "nothing was fitted for 'colour'"),
        ("swap", {"prompt": PROMPT, "head": "L1H3", "a": 1, "b": 1}, "cannot be swapped with itself"),
        ("swap", {"prompt": PROMPT, "head": "L1H3", "a": 1, "b": 99}, "has no token 99"),
        ("swap", {"prompt": PROMPT, "head": "L1H3", "a": 1, "b": True}, "should be a whole number"),
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
    for what in ("", "page.css", "base.js", "map.js", "prompt.js", "explorer.js", "explorer.css", "api/model"):
        status, headers, _ = ask(server, what)
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "unsafe" not in headers["Content-Security-Policy"]


def test_questions_at_once_are_answered_one_after_the_other(server):
    prompts = [f"hat : {box} jam : Z jam :" for box in "OABCKM"]
    answers = {}

    def run(prompt):
        answers[prompt] = ask(server, "api/split", {"prompt": prompt, "head": "L1H3"})[2]["rows"]

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        assert answers[prompt] == server.session.split(prompt, "L1H3")["rows"]


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
def smol(browser):
    return qk.Scope.load("smollm2-135m")


def test_a_prompt_is_split_and_two_tokens_are_swapped(browser, smol):
    """The embedded model's box head: its attention follows the lexical feature to the other box."""
    fit = qk.decompose(smol, qk.tasks.binding(9, "list"), "L18H6", 24, contrasts=["order", "lexical"], replicates=9)
    with served(Session(smol, fit)) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        page.wait_for_selector("#tokens .token")
        assert page.locator("#map .cell").count() == 270
        assert page.locator("#head").inner_text() == "L18H6"
        assert page.locator("#watched").inner_text().strip() == "Z"  # what it attends to most
        page.locator('#tokens .token[data-i="14"]').hover()
        assert page.locator("#split .of").inner_text().startswith("K")
        parts = [float(text.replace("−", "-")) for text in page.locator("#split .value").all_inner_texts()]
        assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.03)
        watched.shoot("explorer-prompt")
        page.locator('#tokens .token[data-i="6"]').click()
        assert "Z is chosen" in page.locator("#how").inner_text()
        page.locator('#tokens .token[data-i="14"]').click()
        page.wait_for_selector("#moved .pairs")
        right, other = page.locator("#moved .value").all_inner_texts()
        before, after = (float(text) for text in right.split(",")[0].split(" → "))
        assert before > 0.7
        assert after < 0.2 < float(right.rsplit(" ", 1)[1])  # random subspaces of that size do less
        gained = [float(text) for text in other.split(",")[0].split(" → ")]
        assert gained[1] > gained[0] + 0.1
        likely = [[float(p) for p in text.split(" → ")] for text in page.locator("#answers .value").all_inner_texts()]
        assert len(likely) == 8
        assert any(abs(was - now) > 0.01 for was, now in likely)
        for name, width, dark in (("light", 1100, False), ("dark", 1100, True), ("phone", 390, False)):
            page.set_viewport_size({"width": width, "height": 844})
            page.emulate_media(color_scheme="dark" if dark else "light")
            page.wait_for_timeout(200)
            watched.shoot(f"explorer-swap-{name}")
            assert watched.fits()
        page.locator("#undo").click()
        assert page.locator("#moved .pairs").count() == 0
        page.locator("#features button", has_text="order").click()
        watched.until("document.querySelectorAll('#colour button').length === 3")
        page.locator("#map svg").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        watched.until("document.getElementById('head').textContent === 'L19H6'")
        assert page.locator("#fit").inner_text() == "Fit binding features at L19H6"
        assert watched.errors == []
        assert all(url.startswith((server.url, "data:")) for url in watched.requests)
        page.close()


def test_what_the_reader_left_behind_is_not_shown_and_focus_stays(browser, smol):
    """A token picked while a swap is under way begins a new pair; keys alone are enough, again and again."""
    fit = qk.decompose(smol, qk.tasks.binding(9, "list"), "L18H6", 16, contrasts=["order", "lexical"], replicates=9)
    with served(Session(smol, fit)) as server:
        watched = Watched(browser, server.url)
        page = watched.page
        page.wait_for_selector("#tokens .token")
        watched.until("document.getElementById('state').textContent.includes('tokens')")
        held = threading.Event()
        swap = server.questions["swap"]
        server.questions = {**server.questions, "swap": lambda **asked: (held.wait(30), swap(**asked))[1]}
        for i in (6, 14, 2):
            page.locator(f'#tokens .token[data-i="{i}"]').click()
        with page.expect_response("**/api/swap"):
            held.set()
        watched.until("document.getElementById('state').textContent === ''")
        assert page.locator("#how").inner_text().startswith("O is chosen")
        assert page.locator("#moved .pairs").count() == 0
        page.locator("#undo").click()
        page.locator("#tokens .prompt").focus()
        for key in ("Home", "ArrowRight", "ArrowRight", "Enter", "End", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("#moved .pairs")
        for key in ("Home", "Enter"):
            page.keyboard.press(key)
        assert page.locator("#how").inner_text().startswith("hat is chosen")
        page.locator("#features button").first.focus()
        page.keyboard.press("Enter")
        watched.until("document.querySelectorAll('#features [aria-pressed=true]').length === 1")
        assert page.evaluate("document.activeElement.parentElement.id") == "features"
        assert watched.errors == []
        page.close()


def test_a_prompt_is_text_and_a_bad_one_is_a_sentence_in_the_page(browser, smol):
    with served(Session(smol, qk.decompose(smol, qk.tasks.binding(9, "list"), "L1H0", 8, contrasts=["order"],
                                           replicates=9))) as server:  # fmt: skip
        watched = Watched(browser, server.url)
        page = watched.page
        page.wait_for_selector("#tokens .token")
        evil = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> jam:"
        page.fill("#prompt", evil)
        page.keyboard.press("Control+Enter")
        watched.until("document.getElementById('tokens').textContent.includes('script')")
        assert page.locator("#tokens .token").all_inner_texts()[0].startswith("<")
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
        session = server.session
        session._features[Head(0, 0)] = {}  # nothing is fitted here: it is the page that is looked at
        watched = Watched(browser, server.url)
        page = watched.page
        page.wait_for_selector("#tokens .token")
        assert page.locator("#map .cell").count() == 1024
        page.fill("#prompt", "cat sat on mat and " * 400)
        page.click("#look")
        watched.until("document.querySelectorAll('#tokens .token').length > 1990", 120)
        costs = {
            "point at a token": watched.median_cost("#tokens .token", "pointermove"),
            "point at a head": watched.median_cost("#map .cell", "pointermove"),
        }
        watched.shoot("explorer-large", full=False)
        assert watched.errors == []
        page.close()
    assert max(costs.values()) < BUDGET_MS, costs
