"""The tools for agents, asked by the SDK's own client: over stdio, and in this process."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest
from mcp import Client, StdioServerParameters

from qkscope import BadInput, Scope
from qkscope.cli import tools
from qkscope.cli.mcp_server import server_of
from qkscope.show.session import Session

PROMPT = "hat: O jam: Z jam:"


@pytest.fixture(scope="module")
def scope():
    return Scope.load("nano:mixed")


def run(ask):
    """Run a coroutine in a thread of its own: the browser of other tests keeps a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(anyio.run, ask).result()


def asked(server, *calls):
    """What a client is told by each call."""

    async def ask():
        async with Client(server) as client:
            return [await client.call_tool(name, given) for name, given in calls]

    return run(ask)


def test_a_client_over_stdio_is_answered_and_leaves_nothing(tmp_path):
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "qkscope", "mcp", "--model", "nano:mixed"],
        env=dict(os.environ),
        cwd=tmp_path,
    )

    async def ask():
        async with Client(server) as client:
            listed = await client.list_tools()
            why = await client.call_tool("why", {"prompt": PROMPT, "head": "L2H3"})
            wrong = await client.call_tool("why", {"prompt": PROMPT, "head": "L9H9"})
            again = await client.call_tool("why", {"prompt": PROMPT})
        return [tool.name for tool in listed.tools], why, wrong, again

    names, why, wrong, again = run(ask)
    assert names == tools.names()
    assert why.structured_content["tables"]["because"][0]["text"] == ":"
    assert why.content[0].text.startswith("L2H3 at ")
    assert wrong.is_error
    assert wrong.content[0].text == "L9H9 does not exist: nano:mixed has layers L0 to L2."
    assert again.structured_content["tables"]["heads"]
    assert not [*tmp_path.iterdir()]


def test_every_tool_answers_as_its_schema_says(scope):
    """The SDK's client holds each reply against the schema that the server declared."""
    given = {
        "why": {"prompt": PROMPT},
        "circuit": {"prompt": PROMPT},
        "heads": {"task": "induction", "n": 8},
        "trace": {"prompt": PROMPT, "heads": ["L2H3"]},
        "what_if": {"prompt": PROMPT, "head": "L2H3", "changes": ["ablate L1H0"]},
        "atlas": {},
    }
    assert [*given] == tools.names()
    replies = asked(server_of(scope), *given.items())
    for name, reply in zip(given, replies, strict=True):
        if name == "atlas":  # none ships for a nano
            assert reply.is_error
        else:
            assert reply.structured_content["answer"], name
            assert set(reply.structured_content["tables"]) <= set(tools.TABLES[name])
            assert all(
                len(rows) <= tools.ROWS for rows in reply.structured_content["tables"].values()
            )


def test_a_prompt_is_text_and_never_a_file(scope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"prompt": "secret"}\n')
    (reply,) = asked(server_of(scope), ("why", {"prompt": "mine.jsonl"}))
    assert "secret" not in str(reply)
    assert "('mine.jsonl')" in reply.content[0].text  # words that a nano does not know


REFUSED = [
    ("nope", {}, "there is no tool 'nope'"),
    ("why", {}, "missing required argument 'prompt'"),
    ("why", {"prompt": 3}, "prompt of why should be a valid string, but got 3."),
    ("why", {"prompt": PROMPT, "out": "here"}, "why has no input 'out'"),
    ("why", {"prompt": PROMPT, "model": "gpt2"}, "why has no input 'model'"),
    ("why", {"prompt": "a " * 3000}, "the model's context ends at 256"),
    ("why", {"prompt": "a" * 60_000}, "60000 characters: at most 50000"),
    ("why", {"prompt": PROMPT, "rows": 1000}, "rows is a number from 1 to 200"),
    ("why", {"prompt": PROMPT, "tables": ["all"]}, "there is no table 'all' in this result"),
    ("heads", {"task": "mine.jsonl"}, "task of heads should be 'binding'"),
    ("heads", {"task": "ioi", "n": 100_000}, "should be at most 256"),
    ("trace", {"prompt": PROMPT, "heads": []}, "trace takes 1 to 4 heads, but got 0."),
    (
        "what_if",
        {"prompt": PROMPT, "head": "L2H3", "changes": ["import os"]},
        "a change is ablate, hide or replace",
    ),
]


def test_every_refusal_is_a_sentence(scope):
    replies = asked(server_of(scope), *[(name, given) for name, given, _ in REFUSED])
    for reply, (name, given, expected) in zip(replies, REFUSED, strict=True):
        assert reply.is_error, (name, given)
        sentence = reply.content[0].text
        assert expected in sentence
        assert sentence.endswith(".")
        assert "\n" not in sentence


def test_a_call_is_stopped_when_its_time_is_up(scope):
    with pytest.raises(BadInput, match="took over 0 s and was stopped"):
        tools.call(Session(scope), "why", {"prompt": PROMPT}, seconds=0)
