"""``qkscope mcp``: the tools of `qkscope.cli.tools` by the Model Context Protocol, on stdio.

The model is loaded once, before the first question, and stays; one question runs at a time. A
refusal is a reply marked as an error, whose text is one sentence. Nothing is written, no file is
read, and nothing that a client sends is run as code.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from threading import Event, Lock
from typing import Any

from qkscope import BadInput, Scope, __version__
from qkscope.checking import Count, checked_call
from qkscope.cli import tools
from qkscope.show.session import Session

log = logging.getLogger(__name__)

_INSTRUCTIONS = (
    "Why an attention head of {model} attended to a token. Start with `why` on a prompt without a"
    " head: it ranks the heads that decide the next token; then ask `why` with one of them. Every"
    " statement stands beside its control and ends in a verdict: shown, not shown, untested."
    " 'Not shown' and 'untested' are no evidence for the opposite. Tokens are named by place or by"
    " text, as ' John' with its blank; heads as L18H6."
)


@checked_call
def serve(scope: Scope, seconds: Count = 120) -> None:
    """Answer agents over stdin and stdout (MCP) until stdin closes.

    Parameters
    ----------
    scope : the model that is asked about.
    seconds : after which a call is stopped.
    """
    try:
        import_module("mcp")
    except ImportError:
        raise BadInput("qkscope mcp needs the MCP SDK: run `pip install 'qkscope[mcp]'`.") from None
    import anyio

    anyio.run(_serve, server_of(scope, seconds))


async def _serve(server: Any) -> None:
    """Run a server on stdin and stdout."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def server_of(scope: Scope, seconds: float = 120) -> Any:
    """Make the SDK's server for one model.

    Parameters
    ----------
    scope : the model.
    seconds : after which a call is stopped.
    """
    import anyio
    import mcp_types as types
    from mcp.server.lowlevel import Server

    session = Session(scope)
    turn = Lock()  # held by the thread: one that nobody waits for ends at its next layer

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_declared(name) for name in tools.names()])

    async def call_tool(_context: Any, params: Any) -> types.CallToolResult:
        stopped = Event()

        def run() -> types.CallToolResult:
            with turn:
                return _called(session, params.name, params.arguments or {}, seconds, stopped)

        try:
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            stopped.set()
            raise

    return Server(
        "qkscope",
        version=__version__,
        instructions=_INSTRUCTIONS.format(model=scope.name),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _declared(name: str) -> Any:
    """A tool as the protocol declares it."""
    import mcp_types as types

    hints = types.ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
    return types.Tool(
        name=name,
        description=tools.description(name),
        input_schema=tools.input_schema(name),
        output_schema=tools.output_schema(name),
        annotations=hints,
    )


def _called(
    session: Session, name: str, given: Mapping[str, Any], seconds: float, stopped: Event
) -> Any:
    """What a call answers: JSON with its lines, or the sentence of a refusal or of a fault."""
    import mcp_types as types

    def text(sentence: str) -> list[types.TextContent]:
        return [types.TextContent(type="text", text=sentence)]

    try:
        answered = tools.call(session, name, given, seconds, stopped)
    except BadInput as refusal:
        return types.CallToolResult(content=text(str(refusal)), is_error=True)
    except Exception:
        log.exception("%s failed.", name)
        sentence = f"{name} failed inside qkscope; the server's log has the details."
        return types.CallToolResult(content=text(sentence), is_error=True)
    lines = "\n".join([answered["answer"], *answered["lines"]])
    return types.CallToolResult(content=text(lines), structured_content=answered)
