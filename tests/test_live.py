"""The live page: what it answers is what the verbs compute, it answers nobody else, and a real browser can use it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import qkscope as qk
from browser import Watched, served
from qkscope import BadInput, Head
from qkscope.maths.bases import joint_basis
from qkscope.runs.result import Result, plain_value
from qkscope.show.blocks import blocks_of
from qkscope.show.session import EXAMPLES, FeatureStore, Session

PROMPT = "hat : O jam : Z cat : B jam :"


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


def changed(session, query, head, key, changes):
    """The reply, and the row that says what the changes did."""
    reply = session.change(PROMPT, query, head, key, changes)
    return reply, reply["result"]["tables"]["changes"][0]


@pytest.fixture(scope="module")
def nano():
    return qk.Scope.load("nano:mixed")


@pytest.fixture(scope="module")
def fit(scope):
    return qk.decompose(scope, qk.tasks.binding(4), ["L1H3", "L0H1"], 24, contrasts=["order", "lexical"], replicates=19)


@pytest.fixture(scope="module")
def session(scope, fit):
    return Session(scope, FeatureStore(fit))


@pytest.fixture(scope="module")
def server(session):
    with served(session) as running:
        yield running


# ---------------------------------------------------------------- it computes what the verbs compute


@pytest.mark.parametrize("query", [None, 5])
def test_attention_is_that_of_the_model_from_every_token(session, scope, query):
    seen = session.look(PROMPT, query)
    ids = scope.tokenizer(PROMPT, return_tensors="pt")
    eager = qk.Scope.from_model(scope.model, scope.tokenizer, check=False).model
    eager.set_attn_implementation("eager")
    output = eager(**ids, output_attentions=True)
    eager.set_attn_implementation("sdpa")
    at = ids["input_ids"].shape[1] - 1 if query is None else query
    attention = torch.cat([layer[0, :, at, : at + 1] for layer in output.attentions])
    bytes_ = np.frombuffer(base64.b64decode(seen["attention"]), np.uint8).reshape(attention.shape)
    np.testing.assert_allclose(bytes_ / 255, attention.detach().numpy(), atol=0.003)
    assert (seen["query"], len(seen["tokens"])) == (at, ids["input_ids"].shape[1])
    assert seen["result"]["tables"] == qk.why(scope, PROMPT, query=at).to_json()["tables"]


@pytest.mark.parametrize(("query", "key"), [(None, None), (7, 5)])
def test_the_answer_is_whys_result_and_a_cut_by_hand_is_its_cut(session, scope, query, key):
    """The same tables, sentences and blocks; the first two writers cut, with the same draws beside them."""
    at = len(session.look(PROMPT)["tokens"]) - 1 if query is None else query
    mine, theirs = session.why(PROMPT, at, "L1H1", key), qk.why(scope, PROMPT, "L1H1", query, key)
    assert mine["result"] == {**theirs.to_json(), "seconds": mine["result"]["seconds"]}
    assert plain_value(mine["blocks"]) == plain_value([block.to_json() for block in blocks_of(theirs)])
    cut = next(row for row in theirs.tables["cuts"] if row["side"] == "key" and row["k"] == 2)
    texts = [f"cut key {name}" for name in cut["writers"].split(", ")]
    reply, row = changed(session, at, "L1H1", mine["key"], texts)
    for name in ("before", "after", "control", "control_low", "control_high"):
        assert row[name] == pytest.approx(cut[name], abs=1e-4), name
    assert row["verdict"] == cut["verdict"]
    assert [block["kind"] for block in reply["blocks"]] == ["tests", "output"]
    without = {row["token"]: row["without_key"] for row in theirs.tables["output"]}
    hidden, _ = changed(session, at, "L1H1", mine["key"], ["hide"])
    for row in hidden["result"]["tables"]["next"]:
        assert row["after"] == pytest.approx(without.get(row["token"], row["after"]), abs=1e-4)


@pytest.mark.parametrize("features", [["lexical"], ["order", "lexical"], []])
def test_a_swap_is_the_closed_form(session, scope, fit, features):
    """Two logits move by ±δ, δ = scale · q P (k_b − k_a); the others stay."""
    reply, judged = changed(session, 10, "L1H3", 2, [" ".join(["swap 5", ",".join(features)]).strip()])
    row = session._ask(PROMPT, 10).again.row(10, Head(1, 3))
    q, k = row.q[0, 0].double(), row.k[0, 0].double()
    bases = [fit[name, "L1H3"].basis("key") for name in features]
    basis = joint_basis(bases).double() if bases else torch.eye(k.shape[1]).double()
    logits = row.scale * (k @ q)
    moved = row.scale * (q @ basis) @ (basis.mT @ (k[5] - k[2]))
    logits[2] += moved
    logits[5] -= moved
    after = torch.tensor(reply["row"], dtype=torch.float64)
    torch.testing.assert_close(after, logits[:11].softmax(-1), atol=2e-5, rtol=0)
    assert (judged["verdict"] == "vacuous") is (not features)


def test_changes_add_up_and_order_does_not_matter(session):
    first = session.why(PROMPT, 10, "L1H1")
    key, other = first["key"], 3 if first["key"] != 3 else 4
    parts = [row for row in first["result"]["tables"]["parts"] if (row["by"], row["side"]) == ("writers", "key")]
    cuts = [f"cut key {row['part']}" for row in parts[:2]]
    ask_for = lambda changes: session.change(PROMPT, 10, "L1H1", key, changes)["row"]  # noqa: E731
    assert ask_for(cuts) == ask_for(cuts[::-1])
    assert ask_for([*cuts, "hide"])[key] == 0
    assert ask_for([cuts[0]]) != ask_for(cuts)
    assert ask_for([f"swap {other}", f"swap {other}"]) == pytest.approx(first["row"], abs=1e-4)


def test_features_of_a_fit_split_the_logit(session, fit):
    rows = session.why(PROMPT, 10, "L1H3")["result"]["tables"]["parts"]
    own = [row["value"] for row in rows if row["by"] == "features"]
    whole = [row["value"] for row in rows if (row["by"], row["side"]) == ("writers", "key")]
    assert sum(own) == pytest.approx(sum(whole), abs=1e-3)
    assert session.describe()["fitted"] == ["L1H3", "L0H1"]


def test_what_an_atlas_says_of_a_head_stands_here(nano, tmp_path):
    texts = [unit[0].text for unit in qk.tasks.induction().test(300)]
    found = qk.atlas(nano, texts, 8, test=8, heads=["L1H1"], length=32, progress=False)
    session = Session(nano, FeatureStore.read(found.write(tmp_path / "found"), nano))
    answer = session.why(PROMPT, 10, "L1H1")
    assert session.describe()["names"] == {"L1H1": "induction"}
    assert answer["about"] == f"On text: {found.table()[0]['name']}."
    assert answer["texts"] == [row for row in found.to_json()["tables"]["examples"] if row["head"] == "L1H1"]
    assert session.why(PROMPT, 10, "L1H0")["texts"] == []


def test_every_head_of_an_example_is_answered(nano):
    """Those of the first layer, too, which read the embedding alone."""
    session = Session(nano)
    at = session.look(EXAMPLES[0])["query"]
    for head in session.describe()["heads"]:
        assert session.why(EXAMPLES[0], at, head)["result"]["tables"]["attention"]


def test_a_model_whose_writers_cannot_be_told_apart_is_still_looked_into(scope, monkeypatch):
    def refuse(_scope):
        raise BadInput("its writers cannot be told apart.")

    monkeypatch.setattr("qkscope.show.session.reader_of", refuse)
    session = Session(scope)
    session.look(PROMPT)
    answer = session.why(PROMPT, 10, "L1H1")
    assert answer["result"]["tables"]["said"] == [{"line": "its writers cannot be told apart."}]
    assert changed(session, 10, "L1H1", answer["key"], ["hide"])[1]["moved"] >= 0
    with pytest.raises(BadInput, match="none can be cut"):
        session.change(PROMPT, 10, "L1H1", answer["key"], ["cut key L0H1"])
    assert session.save(PROMPT, 10, "L1H1", answer["key"])["html"].startswith("<!doctype html>")


# ---------------------------------------------------------------- it answers sentences, and nobody else

HERE = {"prompt": PROMPT, "query": 10, "head": "L1H3", "key": 2}


@pytest.mark.parametrize(
    ("what", "question", "says"),
    [
        ("look", {"prompt": " \n "}, "the prompt is empty"),
        ("look", {"prompt": "hat " * 3000}, "the prompt has 3000 tokens"),
        ("look", {"prompt": PROMPT, "query": 99}, "is out of range"),
        ("look", {"prompt": "a", "path": "/etc/passwd"}, "unexpected keyword argument 'path'"),
        ("why", {**HERE, "head": "<b>"}, "is not a head"),
        ("change", {**HERE, "changes": []}, "from 1 to 20 changes"),
        ("change", {**HERE, "changes": ["explode"]}, "a change is cut, swap or hide"),
        ("change", {**HERE, "changes": ["swap 2"]}, "cannot be swapped with itself"),
        ("change", {**HERE, "changes": ["swap 99"]}, "not in sight"),
        ("change", {**HERE, "changes": ["swap 5 colour"]}, "nothing was fitted for 'colour'"),
        ("change", {**HERE, "changes": ["cut key L2H0"]}, "writes nothing that L1H3 reads"),
    ],
)
def test_bad_questions_are_answered_in_a_sentence(server, what, question, says):
    status, _, answer = ask(server, f"api/{what}", question)
    assert status == 400
    assert says in answer["error"]
    assert answer["error"].endswith(".")


def test_only_this_machine_with_the_token_is_answered_from_a_fixed_list(server):
    port = server.server_port
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "api/model", host=f"localhost:{port}")[0] == 200
    for status, given in (
        (403, {"host": "evil.example"}),
        (403, {"host": f"evil.example:{port}"}),
        (403, {"headers": {"Origin": "http://evil.example"}}),
        (404, {"token": "wrong"}),
        (404, {"token": "%C3%A9%00"}),
    ):
        told, _, answer = ask(server, "api/model", **given)
        assert told == status, given
        assert server.token not in json.dumps(answer)
    for path in ("/", "../server.py", "..%2fserver.py", "static/../page.py", "/etc/passwd", "live.html"):
        assert ask(server, path)[0] == 404, path
    assert ask(server, "api/look", {"prompt": "hat"}, kind="text/plain")[0] == 415
    for raw in (b"{", b"[" * 100_000, b"[]"):
        assert ask(server, "api/look", raw=raw)[0] == 400
    assert ask(server, "api/nothing", {})[0] == 404
    assert ask(server, "api/look", raw=b" " * (2 << 20))[0] == 413
    for what in ("", "page.css", "base.js", "map.js", "live.js", "live.css", "api/model"):
        status, headers, _ = ask(server, what)
        assert status == 200
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


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


def test_what_cannot_be_asked_about_is_refused(scope, tmp_path):
    with pytest.raises(BadInput, match="decompose or atlas wrote"):
        qk.view(live=True, fit=tmp_path, browser=False)
    Result("heads", {"heads": []}).write(tmp_path / "run")
    with pytest.raises(BadInput, match="was written by heads"):
        qk.view(live=True, fit=tmp_path / "run", browser=False)
    fit = qk.decompose(scope, qk.tasks.binding(4), "L1H3", 8, contrasts=["order"], space="pre_rope", replicates=9)
    with pytest.raises(BadInput, match="pre_rope vectors do not give the model's attention"):
        FeatureStore(fit)
    with pytest.raises(BadInput, match="has no tokenizer"):
        Session(qk.Scope.from_model(scope.model, name="bare", check=False))


def test_the_command_serves_until_it_is_stopped():
    """While one connection is idle and one waits for its answer."""
    command = [sys.executable, "-m", "qkscope", "view", "--live", "--model", "nano:mixed", "--no-browser"]
    # a test run in the background of a shell is deaf to Ctrl-C, and so would its children be
    listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    try:
        url = running.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        address, _, token = url.removeprefix("http://").rstrip("/").partition("/")
        idle, busy = (http.client.HTTPConnection(address, timeout=60) for _ in range(2))
        idle.request("GET", f"/{token}/api/model")
        assert json.loads(idle.getresponse().read())["model"] == "nano:mixed"
        busy.request("POST", f"/{token}/api/look", json.dumps({"prompt": PROMPT}), {"Content-Type": "application/json"})
    finally:
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0, errors
    assert "Traceback" not in errors


# ---------------------------------------------------------------- in a real browser


@pytest.fixture(scope="module")
def live(nano):
    with served(Session(nano)) as running:
        yield running


def drawn(watched, head=None, changes=None):
    """Wait until the page stands still, and a head is answered with so many changes."""
    watched.until("!document.body.classList.contains('busy') && document.querySelectorAll('#blocks .block').length > 3")
    if head is not None:
        watched.until(f"document.getElementById('head').textContent === '{head}'")
    if changes is not None:
        watched.until(f"document.querySelectorAll('.change').length === {changes}")


def test_ask_cut_undo_save_and_come_back_by_the_address(browser, live, nano, tmp_path):
    """Type, ask from a middle token, pick a head that nobody fitted, click a key, cut a writer, undo, save, reload."""
    watched = Watched(browser, live.url, width=1280, height=800)
    page = watched.page
    drawn(watched)
    page.fill("#prompt", PROMPT)
    assert page.locator("#stale").is_visible()  # what stands below is of the old prompt
    page.keyboard.press("Control+Enter")
    watched.until("!document.body.classList.contains('stale')")
    drawn(watched)
    matter = qk.why(nano, PROMPT).tables["heads"]
    for way in ("for", "against"):
        own = [row["head"] for row in matter if row["direction"] == way][:5]
        shown = page.locator(f"#{way} button").all_inner_texts()
        assert [text.split(" ")[0] for text in shown] == own
        assert page.locator(f"#{way}").is_visible() is bool(own)
    page.locator('#tokens .fill[data-i="8"]').click(modifiers=["Shift"])
    watched.until("document.getElementById('asks-from').textContent === 'token 8'")
    drawn(watched)
    page.locator('#map .cell[data-at="2,1"]').click()
    drawn(watched, "L2H1")
    page.locator('#tokens .fill[data-i="5"]').click()
    watched.until("location.hash.includes('k=5')")
    drawn(watched)
    theirs = qk.why(nano, PROMPT, "L2H1", 8, 5)
    assert page.locator("#answer").inner_text() == theirs.answer
    assert page.locator("#blocks .said dd").count() == len(theirs.tables["said"])
    logit = f"{theirs.tables['check'][0]['logit']:+.1f}".replace("-", "−")
    assert page.locator("#blocks .parts .value.sum").inner_text() == logit
    before = page.locator("#keys").inner_text()
    page.locator("[data-cut]").first.click()
    drawn(watched, changes=1)
    assert page.locator("#changed .tests b").inner_text() in ("supported", "not here", "unattended")
    assert "control" in page.locator("#changed .tests .value").inner_text()
    page.locator("#painted button", has_text="what the changes do").click()
    page.locator("#hide").click()
    drawn(watched, changes=2)
    assert page.locator("#keys").inner_text() != before
    changed, shown = page.url, page.locator("#moved").inner_text()
    page.locator("#undo").click()
    drawn(watched, changes=1)
    page.locator("#undo").click()
    drawn(watched, changes=0)
    assert page.locator("#keys").inner_text() == before
    with page.expect_download() as saved:
        page.locator("#save").click()
    saved.value.save_as(tmp_path / "why.html")
    page.goto("about:blank")
    page.goto(changed)  # the whole state
    drawn(watched, "L2H1", 2)
    assert page.locator("#moved").inner_text() == shown
    assert page.locator("#asks-from").inner_text() == "token 8"
    assert page.locator("#prompt").input_value() == PROMPT
    assert watched.errors == []
    assert all(url.startswith((live.url, "data:", "blob:", "about:")) for url in watched.requests)
    page.close()
    offline = Watched(browser, (tmp_path / "why.html").as_uri())
    assert offline.page.locator("h1.answer").inner_text() == theirs.answer
    assert offline.errors == []
    assert all(url.startswith(("file:", "data:")) for url in offline.requests)
    offline.page.close()


def test_keys_alone_are_enough_and_focus_is_seen(browser, live):
    watched = Watched(browser, live.url)
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
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator("[data-cut]").first.focus()
    page.keyboard.press("Enter")
    drawn(watched, changes=1)
    assert page.evaluate("document.activeElement.dataset.cut") is not None
    assert watched.errors == []
    page.close()


def test_what_the_reader_left_behind_is_not_shown(browser, live):
    """A key picked while a change is under way: the change is not shown for it."""
    watched = Watched(browser, live.url)
    page = watched.page
    drawn(watched)
    held = []
    page.route("**/api/change", lambda route: held.append(route))
    page.locator("#hide").click()
    page.locator('#tokens .fill[data-i="2"]').click()
    watched.until("location.hash.includes('k=2')")
    with page.expect_response("**/api/change"):
        held[0].continue_()
    page.wait_for_timeout(200)
    assert page.locator(".change").count() == 0
    assert "c=" not in page.url.partition("#")[2]
    assert watched.errors == []
    page.close()


def test_a_prompt_is_text_a_bad_one_a_sentence_and_every_screen_is_enough(browser, live):
    watched = Watched(browser, live.url, width=1280, height=800)
    page = watched.page
    drawn(watched)
    page.locator("[data-cut]").first.click()
    drawn(watched, changes=1)
    for name, width, dark in (("light", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme="dark" if dark else "light")
        page.wait_for_timeout(200)
        watched.shoot(f"live-{name}")
        assert watched.fits()
    page.fill("#prompt", "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> jam:")
    page.keyboard.press("Control+Enter")
    watched.until("document.getElementById('error').textContent.includes('<script>window.hacked')")  # it is quoted
    assert page.locator("#tokens .token").first.inner_text() == "<s>"
    assert page.locator("main img, main script, main s").count() == 0
    assert page.evaluate("window.hacked") is None
    page.fill("#prompt", "   ")
    page.click("#look")
    watched.until("document.getElementById('error').textContent.includes('the prompt is empty')")
    page.fill("#prompt", "jam: Z\njam:")
    page.click("#look")
    page.wait_for_selector("#error", state="hidden")
    assert [text for text in watched.errors if "400" not in text] == []  # the browser itself notes the refusals
    page.close()
