"""The live page: what it answers is what the verbs compute, it answers nobody else, and a real
browser can use it.
"""

from __future__ import annotations

import base64
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np
import pytest
import torch

import qkscope as qk
from browser import Watched, expect
from qkscope import BadInput
from qkscope.results.result import Result, plain_value
from qkscope.show import session as session_module
from qkscope.show.blocks import blocks_of
from qkscope.show.server import Server, view
from qkscope.show.session import Session, read_features

PROMPT = "hat : O jam : Z cat : B jam :"


def ask(
    server,
    what,
    question=None,
    *,
    host=None,
    token=None,
    kind="application/json",
    raw=None,
    headers=(),
):
    """One request, as it is: status, headers and JSON (its last line, or text)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    body = raw if raw is not None else None if question is None else json.dumps(question).encode()
    given = {"Host": host or server.hosts[0], "Content-Type": kind, **dict(headers)}
    path = (
        f"{server.path if token is None else f'/{token}/'}{what}"
        if not what.startswith("/")
        else what
    )
    connection.request("GET" if body is None else "POST", path, body, given)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    read = json.loads(text.splitlines()[-1]) if text.startswith("{") else text
    return answer.status, dict(answer.headers), read


@pytest.fixture(scope="module")
def fit(scope):
    return qk.decompose(
        scope,
        qk.tasks.binding(4),
        ["L1H3", "L0H1"],
        24,
        contrasts=["order", "lexical"],
        replicates=19,
    )


@pytest.fixture(scope="module")
def session(scope, fit):
    return Session(scope, fit)


@pytest.fixture(scope="module")
def server(session):
    with Server(session) as running:
        yield running


# ---------------------------------------------------------------- it computes what the verbs
# compute


@pytest.mark.parametrize("query", [None, 5])
def test_attention_is_that_of_the_model_from_every_token(session, scope, query):
    seen, rows = (
        session.look(PROMPT, query),
        torch.stack([scope.attention(PROMPT, head) for head in scope.heads()]),
    )
    at = rows.shape[-1] - 1 if query is None else query
    bytes_ = np.frombuffer(base64.b64decode(seen["attention"]), np.uint8).reshape(len(rows), at + 1)
    np.testing.assert_allclose(bytes_ / 255, rows[:, at, : at + 1].numpy(), atol=0.003)
    assert (seen["query"], len(seen["tokens"])) == (at, rows.shape[-1])
    assert seen["result"]["tables"] == qk.why(scope, PROMPT, query=at).to_json()["tables"]


@pytest.mark.parametrize(("query", "key"), [(None, None), (7, 5)])
def test_the_answer_is_whys_result(session, scope, query, key):
    """The same tables, sentences and blocks."""
    at = len(session.look(PROMPT)["tokens"]) - 1 if query is None else query
    mine, theirs = session.why(PROMPT, at, "L1H1", key), qk.why(scope, PROMPT, "L1H1", query, key)
    assert mine["result"] == {**theirs.to_json(), "seconds": mine["result"]["seconds"]}
    assert plain_value(mine["blocks"]) == plain_value(
        [block.to_json() for block in blocks_of(theirs)]
    )
    size = len(session.look(PROMPT)["tokens"])
    pattern = np.frombuffer(base64.b64decode(mine["pattern"]), np.uint8).reshape(size, size)
    np.testing.assert_allclose(pattern / 255, scope.attention(PROMPT, "L1H1").numpy(), atol=0.003)
    assert session.patterns(PROMPT, ["L1H1"]) == {"patterns": {"L1H1": mine["pattern"]}}


@pytest.mark.parametrize(
    "changes",
    [["ablate L0H1"], ["hide L1H1 4 11"], ["replace 4 cat"], ["ablate L0H1", "replace 4 cat"]],
)
def test_changes_are_what_the_scope_changes_in_a_block(nano, changes):
    """The same attention and the same next token as by hand, beside others of the same size where
    there are any.
    """
    at, reply = 11, Session(nano).change(PROMPT, 11, "L1H1", 4, changes)
    (row,) = reply["result"]["tables"]["changes"]
    with ExitStack() as stack:
        for name, given in reversed(reply["calls"]):  # their order does not matter
            stack.enter_context(getattr(nano, name)(*given))
        pattern = nano.attention(PROMPT, "L1H1")
        with nano.patched([]) as model:
            chances = model(**nano.encode([PROMPT]).inputs).logits[0, -1].softmax(-1)
    assert reply["row"] == pytest.approx(pattern[at].tolist(), abs=1e-4)
    assert row["after"] == pytest.approx(float(pattern[at, 4]), abs=1e-4)
    before = nano.model(**nano.encode([PROMPT]).inputs).logits[0, -1].softmax(-1)
    assert row["probability"] == pytest.approx(float(before.max()), abs=1e-4)
    assert row["probability_after"] == pytest.approx(float(chances[before.argmax()]), abs=1e-4)
    assert row["sets"] == (0 if changes == ["replace 4 cat"] else 3)
    assert [block["kind"] for block in reply["blocks"]] == ["tests", "output"]


def test_what_is_known_early_is_told_first_and_raising_ends_the_work(nano):
    session, told = Session(nano), []
    with session.told(told.append):
        whole = session.look(PROMPT)
    early = next(line["early"] for line in told if "early" in line)
    assert early == {name: value for name, value in whole.items() if name not in ("result", "says")}
    told.clear()

    def leave(line):
        told.append(line)
        if "early" in line:
            raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError), session.told(leave):
        session.why(PROMPT, 11, "L1H0")
    assert len(told) < 5
    assert not nano.model.base_model._forward_pre_hooks  # as it was
    assert (
        session.why(PROMPT, 11, "L1H0")["result"]["answer"]
        == qk.why(nano, PROMPT, "L1H0", 11).answer
    )


def test_what_an_atlas_says_of_a_head_stands_here(nano, tmp_path):
    texts = [unit[0].text for unit in qk.tasks.induction().test(300)]
    found = qk.atlas(nano, texts, 8, test=8, heads=["L1H1"], length=32, progress=False)
    session = Session(nano, read_features(found.write(tmp_path / "found"), nano))
    answer = session.why(PROMPT, 10, "L1H1")
    assert session.describe()["names"] == {"L1H1": "induction"}
    assert answer["about"] == f"On text: {found.table()[0]['rule']}."
    assert answer["texts"] == [
        row for row in found.to_json()["tables"]["examples"] if row["head"] == "L1H1"
    ]
    assert session.why(PROMPT, 10, "L1H0")["texts"] == []


# ---------------------------------------------------------------- it answers sentences, and nobody
# else

HERE = {"prompt": PROMPT, "query": 10, "head": "L1H3", "key": 2}


@pytest.mark.parametrize(
    ("what", "question", "says"),
    [
        ("look", {"prompt": "hat " * 3000}, "the prompt has 3000 tokens"),
        ("look", {"prompt": "a", "path": "/etc/passwd"}, "unexpected keyword argument 'path'"),
        ("look", {"prompt": PROMPT, "versus": " "}, "the rival ' ' is blank"),
        (
            "change",
            {**HERE, "changes": ["replace 4 cat cat"]},
            "is 2 tokens here, and what it replaces is 1",
        ),
        (
            "change",
            {**HERE, "changes": ["replace " + "4" * 5000 + " cat"]},
            "a change is ablate, hide or replace, but got",
        ),
    ],
)
def test_bad_questions_are_answered_in_a_sentence(server, what, question, says):
    answer = ask(server, f"api/{what}", question)[2]
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
        assert server.path.strip("/") not in answer
        assert answer.startswith("<!doctype html>")  # a sentence
    for path in (
        "/",
        "../server.py",
        "..%2fserver.py",
        "static/../page.py",
        "/etc/passwd",
        "live.html",
    ):
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


def test_a_body_is_read_only_from_whom_is_answered_and_only_if_it_is_small(server):
    """A request says how long its body is, sends a little of it, and hears the refusal at once."""
    port = server.server_port
    ours = f"127.0.0.1:{port}"
    for host, path, status in (
        ("evil.example", f"{server.path}api/look", 403),
        (ours, "/wrong/api/look", 404),
        (ours, f"{server.path}api/look", 413),
    ):
        for length in (10_000_000_000, "9" * 5000):
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(head.encode() + b" " * 100_000)
                answer = b""
                while part := connection.recv(1 << 16):
                    answer += part
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (host, path)
            assert b"Connection: close" in answer
    assert ask(server, "api/model")[0] == 200


def test_many_readers_may_connect_at_once(nano):
    server = Server(Session(nano))  # nobody accepts yet: the system keeps them waiting
    with ExitStack() as stack:
        for _ in range(100):
            address = ("127.0.0.1", server.server_port)
            stack.enter_context(socket.create_connection(address, timeout=2))
    with server:
        assert ask(server, "api/model")[0] == 200


def test_equal_changes_on_the_page_are_one(session):
    look = {"prompt": "hat : O jam : Z jam :", "query": 7, "head": "L1H3", "key": 5}
    once, twice = (session.change(**look, changes=["ablate M0"] * n) for n in (1, 2))
    assert once["row"] == twice["row"]
    assert once["result"]["answer"] == twice["result"]["answer"]  # its control among the rest


def test_a_chosen_port_stays_and_what_cannot_be_asked_about_is_refused(nano, scope, tmp_path):
    with Server(Session(nano)) as first:
        port = first.server_port
    with Server(Session(nano), port) as server:
        assert server.url == f"http://127.0.0.1:{port}/"
        assert ask(server, "api/model")[0] == 200
        assert ask(server, "api/model", host="evil.example")[0] == 403
        assert "There is nothing at this address" in ask(server, "nothing")[2]
    with pytest.raises(BadInput, match="decompose or atlas wrote"):
        view(live=True, fit=tmp_path, browser=False)
    Result("heads", {"heads": []}).write(tmp_path / "run")
    with pytest.raises(BadInput, match="was written by heads"):
        view(live=True, fit=tmp_path / "run", browser=False)
    with pytest.raises(BadInput, match="has no tokenizer"):
        Session(qk.Scope.from_model(scope.model, name="bare", check=False))


def test_questions_at_once_are_answered_one_after_the_other(server):
    prompts = [f"hat : {box} jam : Z jam :" for box in "OABCKM"]
    asked = [{"prompt": prompt, "query": 7, "head": "L1H3"} for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        rows = list(pool.map(lambda question: ask(server, "api/why", question)[2]["row"], asked))
    assert rows == [server.session.why(**question)["row"] for question in asked]


def test_the_command_serves_until_it_is_stopped():
    """While one connection is idle and one waits for its answer."""
    command = [
        sys.executable,
        "-m",
        "qkscope",
        "view",
        "--live",
        "--model",
        "nano:mixed",
        "--no-browser",
    ]
    # a test run in the background of a shell is deaf to Ctrl-C, and so would its children be
    listen = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen
    )
    try:
        url = running.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        address, _, token = url.removeprefix("http://").rstrip("/").partition("/")
        idle, busy = (http.client.HTTPConnection(address, timeout=60) for _ in range(2))
        idle.request("GET", f"/{token}/api/model")
        assert json.loads(idle.getresponse().read())["model"] == "nano:mixed"
        busy.request(
            "POST",
            f"/{token}/api/look",
            json.dumps({"prompt": PROMPT}),
            {"Content-Type": "application/json"},
        )
    finally:
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (
        0,
        "",
    )  # no traceback, and no other library says anything


# ---------------------------------------------------------------- in a real browser


@pytest.fixture(scope="module")
def live(nano):
    with Server(Session(nano)) as running:
        yield running


def drawn(watched, head=None, changes=None):
    """Wait until the page stands still, and a head is answered with so many changes."""
    still = [
        "!document.body.classList.contains('busy')",
        "document.querySelectorAll('#blocks .block').length > 3",
    ]
    still += [] if head is None else [f"document.title.startsWith('{head} → ')"]
    still += (
        [] if changes is None else [f"document.querySelectorAll('.change').length === {changes}"]
    )
    watched.until(" && ".join(still))


@pytest.fixture
def watched(browser, live):
    """The page of a prompt, whole."""
    shown = Watched(browser, f"{live.url}#{urlencode({'p': PROMPT})}", width=1280, height=800)
    drawn(shown)
    yield shown
    refusals = ("400", "404")  # the browser itself notes these
    assert [text for text in shown.errors if not any(status in text for status in refusals)] == []
    assert all(url.startswith((live.url, "data:", "blob:", "about:")) for url in shown.requests)
    shown.page.close()


def pick(watched, head, wait=True):
    """Click a head of the table."""
    page = watched.page
    page.locator("#heads tr", has=page.locator("button", has_text=head)).click()
    if wait:
        drawn(watched, head)


def state_of(page):
    """What the address says: asked of the page, as playwright hears of a new one later."""
    return parse_qs(urlsplit(page.evaluate("location.href")).fragment)


def test_the_answer_stands_first_with_its_rival_and_who_decides(watched, nano):
    page, theirs = watched.page, qk.why(nano, PROMPT)
    assert page.locator("h1").inner_text().split() == ["Next", "Z", "99.8%"]
    assert page.locator("#versus").input_value() == "O"
    assert "Z − O +8.2" in page.locator("#difference").inner_text()
    assert nano.generate(PROMPT, 5) in page.locator("#says").inner_text()
    own = [
        [row["head"] for row in theirs.tables["heads"] if row["direction"] == way]
        for way in ("for", "against")
    ]
    assert page.locator("#heads td button").all_inner_texts() == [*own[0][:6], *own[1][:4]]
    assert page.locator("#heads tr.picked button").all_inner_texts() == [
        theirs.tables["heads"][0]["head"]
    ]
    assert not page.locator("#map svg").is_visible()  # folded
    page.locator("#versus").select_option("B")
    watched.until("document.getElementById('difference').textContent.includes('Z − B')")
    drawn(watched)
    other = qk.why(nano, PROMPT, versus="B").tables["heads"]
    first = next(row["head"] for row in other if row["direction"] == "for")
    assert page.locator("#heads td button").first.inner_text() == first
    assert state_of(page)["v"] == ["B"]


def test_the_reason_is_whys_with_its_words_marked(watched, nano):
    page = watched.page
    pick(watched, "L1H1")
    page.locator('#tokens .fill[data-i="4"]').click()
    watched.until("location.hash.includes('L1H1.11.4')")
    drawn(watched)
    theirs = qk.why(nano, PROMPT, "L1H1", 11, 4)
    assert page.locator("#answer").inner_text() == theirs.answer
    assert page.locator("#blocks .said dd").count() == len(theirs.tables["said"])
    causes = [row for row in theirs.tables.get("because", []) if row["cause"] == "yes"]
    shown = page.locator("#tokens .token.cause").evaluate_all(
        "(all) => all.map((each) => Number(each.dataset.i))"
    )
    assert set(shown) == {i for row in causes for i in range(row["position"], row["end"])}
    for cause in causes[:1]:
        page.locator(f'#tokens .fill[data-i="{cause["position"]}"]').hover()
        for told in (f"{cause['before']:.0%} → {cause['after']:.0%}", cause["goes_to"]):
            expect(page.locator("#tip")).to_contain_text(told, use_inner_text=True)


def test_a_writer_is_a_link_and_every_click_is_a_step_of_the_back_button(watched):
    page = watched.page
    pick(watched, "L2H0")
    title, link = page.title(), page.locator("#reason button.link").first
    page.locator("#blocks .parts summary").first.click()
    writer = link.inner_text()
    link.click()
    drawn(watched, writer)
    assert page.locator("#trail").inner_text().split()[:5] == ["Z", "‹", "L2H0", "‹", writer]
    assert [step.split(".")[0] for step in state_of(page)["s"]] == ["L2H0", writer]
    answer = page.locator("#answer").inner_text()
    page.go_back()
    drawn(watched, "L2H0")
    assert page.title() == title
    page.go_forward()
    drawn(watched, writer)
    assert page.locator("#answer").inner_text() == answer
    page.locator("#trail button", has_text="L2H0").click()
    drawn(watched, "L2H0")
    assert len(state_of(page)["s"]) == 1


def test_a_word_is_typed_over_and_undone_by_a_key(watched, nano):
    page = watched.page
    page.locator('#tokens .fill[data-i="4"]').dblclick()
    expect(page.locator("#tokens input")).to_have_value("jam")
    page.keyboard.type("cat")
    page.keyboard.press("Enter")
    drawn(watched, changes=1)
    watched.until("document.getElementById('moved').textContent.includes('P(Z)')")
    with nano.replace(4, "cat"):
        after = nano.model(**nano.encode([PROMPT]).inputs).logits[0, -1].softmax(-1)
    assert f"99.8% → {float(after[224]):.1%}" in page.locator("#changed-fold").text_content()
    assert state_of(page)["c"] == ["replace 4 cat"]
    page.locator('#tokens .fill[data-i="4"]').dblclick()
    expect(page.locator("#tokens input")).to_be_focused()
    page.keyboard.type("xyzzy")
    page.keyboard.press("Enter")
    watched.until(
        "document.getElementById('error').textContent.includes('xyzzy')"
    )  # the model has no such word
    drawn(watched, changes=0)
    page.go_back()
    drawn(watched, changes=1)
    page.locator("#ablate").click()
    drawn(watched, changes=2)
    page.keyboard.press("Control+z")
    drawn(watched, changes=1)
    page.locator(".change").click()
    drawn(watched, changes=0)
    assert "c" not in state_of(page)
    page.go_back()
    drawn(watched, changes=1)
    page.locator("#take").click()
    watched.until(
        f"document.getElementById('prompt').value === {PROMPT.replace('jam', 'cat', 1)!r}"
    )
    drawn(watched, changes=0)


def test_changes_are_copied_as_python_that_runs_and_saved_with_their_picture(
    watched, browser, nano, tmp_path
):
    page = watched.page
    page.evaluate(
        "navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }"
    )
    pick(watched, "L2H2")
    page.evaluate(
        "document.getElementById('hide').click(), document.getElementById('ablate').click()"
    )  # none is lost
    drawn(watched, changes=2)
    page.locator("#blocks .parts summary").first.click()
    page.locator("#python").click()
    watched.until("window.copied")
    code = page.evaluate("window.copied")
    key = state_of(page)["s"][0].split(".")[2]
    assert f'with scope.hide("L2H2", key={key}, query=11), scope.ablate("L2H2"):' in code
    said = []
    exec(code, {"print": lambda answer: said.append(str(answer))})
    assert "L2H2 at ':'" in said[0]
    with page.expect_download() as saved:
        page.locator("#save").click()
    saved.value.save_as(tmp_path / "why.html")
    offline = Watched(browser, (tmp_path / "why.html").as_uri())
    told = offline.page.locator("p.lead").inner_text()
    assert told.count("ablated") == 1
    assert offline.page.locator("section.tests", has_text="What if").locator(".track").count() == 1
    assert offline.page.locator(".made code").first.inner_text().startswith("qkscope why")
    assert offline.errors == []
    offline.page.close()


def test_the_address_is_the_whole_state_and_a_bad_one_gives_a_sentence_and_the_page(watched, live):
    page = watched.page
    page.locator('#tokens .fill[data-i="8"]').click(modifiers=["Shift"])
    watched.until("document.getElementById('after').textContent.includes('token 8')")
    drawn(watched)
    page.locator("#hide").click()
    drawn(watched, changes=1)
    shown, address = page.locator("#changed-answer").text_content(), page.evaluate("location.href")
    page.goto("about:blank")
    page.goto(address)
    drawn(watched, changes=1)
    assert page.locator("#changed-answer").text_content() == shown
    assert page.locator("#prompt").input_value() == PROMPT
    for bad, says in (
        ("q=99", "99 is out of range"),
        ("s=L9H9.11.1", "L9H9"),
        ("c=explode", "a change is ablate"),
    ):
        page.goto("about:blank")
        page.goto(f"{live.url}#{urlencode({'p': PROMPT})}&{bad}")
        watched.until(f"document.getElementById('error').textContent.includes({says!r})")
        drawn(watched)
        assert page.locator("h1").inner_text().split()[1] == "Z"


@pytest.mark.parametrize(("head", "instead"), [("L0H2", ""), ("L0H1", "L1H3")])
def test_where_it_looks_comes_first_and_whoever_leaves_ends_the_work(
    watched, live, monkeypatch, head, instead
):
    """The reason waits; meanwhile the row is there, and Escape or another head closes the
    connection.
    """
    page, ended, end = watched.page, threading.Event(), time.monotonic() + 60
    answer_question = session_module.answer_question

    def at_gate(question, *given, **options):
        with suppress(
            ConnectionError
        ):  # until the reader has left, which the work itself is to see again
            while str(question.head) == head and not ended.wait(0.02) and time.monotonic() < end:
                live.session.tell({})
        try:
            return answer_question(question, *given, **options)
        except ConnectionError:
            ended.set()
            raise

    monkeypatch.setattr(session_module, "answer_question", at_gate)
    pick(watched, head, wait=False)
    watched.until(f"document.title.startsWith('{head} → ')")
    assert page.locator("#answer").inner_text().startswith(f"{head} at ':' gives")
    assert page.locator("#tokens .token.key").count() == 1
    assert page.locator("#cancel").is_visible()
    if instead:
        pick(watched, instead, wait=False)
    else:
        page.keyboard.press("Escape")
        expect(page.locator("#doing")).to_contain_text("Cancelled")
    assert ended.wait(60)
    if not instead:
        page.locator("#doing button").click()
    drawn(watched, instead or head)
    assert page.locator("#blocks .said dd").count() > 0


def test_the_whole_pattern_is_shown_on_demand_and_points_at_the_prompt(watched, nano):
    page = watched.page
    pick(watched, "L1H1")
    page.locator("#pattern-fold summary").click()
    canvas = page.locator("#pattern canvas")
    canvas.scroll_into_view_if_needed()
    canvas.focus()
    page.keyboard.press("ArrowRight")
    pattern = nano.attention(PROMPT, "L1H1")
    expect(page.locator("#tip")).to_contain_text(f"{float(pattern[11, 0]):.0%}")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#tokens .token.on")).to_have_count(2)
    watched.press("ArrowRight", "ArrowRight", "Enter")
    watched.until("location.hash.includes('L1H1.10.2')")
    drawn(watched)
    page.locator("#patterns-fold summary").click()
    watched.until("document.querySelectorAll('.multiple canvas').length === 12")
    page.locator(".multiple", has_text="L2H1").click()
    drawn(watched, "L2H1")
    page.locator("#map-fold summary").click()
    page.locator('#map .cell[data-at="1,0"]').click()
    drawn(watched, "L1H0")


def test_keys_alone_are_enough_and_focus_is_seen(watched):
    page = watched.page
    page.locator("#tokens .prompt").focus()
    watched.press("Home", "ArrowRight", "ArrowRight", "q")
    watched.until("document.getElementById('after').textContent.includes('token 2')")
    drawn(watched)
    watched.press("Home", "ArrowRight", "Enter")
    watched.until("location.hash.endsWith('.2.1')")
    drawn(watched)
    watched.press("e")
    expect(page.locator("#tokens input")).to_be_focused()
    watched.press("c", "a", "t", "Enter")
    drawn(watched, changes=1)
    page.keyboard.press("Tab")
    watched.until("getComputedStyle(document.activeElement).outlineStyle === 'solid'")


def test_a_prompt_is_text_a_bad_one_a_sentence_and_every_screen_is_enough(watched):
    page = watched.page
    page.locator("#ablate").click()
    drawn(watched, changes=1)
    watched.check_screens("live")
    page.set_viewport_size({"width": 390, "height": 844})
    small = page.evaluate(
        "[...document.querySelectorAll('main button:not(.link), main select')].filter((each) => each.checkVisibility())"
        ".map((each) => each.getBoundingClientRect()).filter(({width, height}) => Math.min(width, height) < 32).length"
    )
    assert small == 0  # a finger hits each
    page.fill(
        "#prompt", "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> jam:"
    )
    expect(page.locator("#stale")).to_be_visible()  # what stands below is of the old prompt
    page.keyboard.press("Control+Enter")
    watched.until(
        "document.getElementById('error').textContent.includes('<script>window.hacked')"
    )  # it is quoted
    assert page.locator("#tokens .token").first.inner_text() == "<s>"
    assert page.locator("main img, main script, main s").count() == 0
    assert page.evaluate("window.hacked") is None
    page.fill("#prompt", "   ")
    page.click("#look")
    watched.until("document.getElementById('error').textContent.includes('the prompt is empty')")
    page.fill("#prompt", "jam: Z\njam:")
    page.click("#look")
    page.wait_for_selector("#error", state="hidden")


def test_a_rival_can_be_typed_and_a_what_if_puts_the_new_answer_first(watched, nano):
    page = watched.page
    page.locator("#typed").fill("B")
    page.locator("#typed").press("Enter")
    watched.until("document.getElementById('difference').textContent.includes('Z − B')")
    drawn(watched)
    page.locator("#ablate").click()
    watched.until("document.getElementById('was').textContent !== ''")
    head = page.locator("#heads tr.picked button").inner_text()
    with nano.ablate(head):
        after = nano.logits(PROMPT).softmax(-1)
    assert page.locator("#best").inner_text() == nano.tokenizer.decode(after.argmax())
    assert "(was 'Z' 99.8%)" in page.locator("#was").inner_text()
    assert "before the change" in page.locator("#tried").inner_text()
    assert page.locator("#before").is_visible()
