"""The live page's server, and `view`: the one call that opens any page.

Loopback only, and nothing but a fixed list of files and questions. A request is answered only if
its Host is ours (another site's page cannot reach us under its own name), a question is JSON (which
a foreign form cannot send), and the path starts with a secret; a port that somebody chose has none,
so that its address stays. No path is ever looked up on the disk. An answer is a line of JSON; what
is known early comes in lines before it, and a reader who closes the connection ends the work.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import select
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

from qkscope import BadInput, Scope
from qkscope.checking import Interval, checked_call
from qkscope.results.result import Result, made_result, plain_value
from qkscope.show.page import STATIC, asset, page_of
from qkscope.show.session import Session, features_result, read_features

log = logging.getLogger(__name__)

_FILES = {path.name for path in [*STATIC.glob("*.css"), *STATIC.glob("*.js")]}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_DEFAULT = "smollm2-135m"  # the model that is looked into where none is named
_LARGEST = 1 << 20  # bytes of a question
_NOTHING = "There is nothing at this address: open the one that qkscope view printed."
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@checked_call
def view(
    folder: str | Path | None = None,
    *,
    live: bool = False,
    made: bool = False,
    model: str | None = None,
    fit: str | Path | None = None,
    port: Annotated[int, Interval(ge=0, le=65535)] = 0,
    browser: bool = True,
    say: Callable[[str], object] = log.info,
) -> str | Result:
    """Open a run's page or the live page (stop it with Ctrl-C), or say what made a run.

    Parameters
    ----------
    folder : a run folder, as demo, decompose or reproduce write; for made also a .safetensors file
        of ours.
    live : look into a model: what comes next, which heads decide it, why, and what if.
    made : say what made the run: the command to type again, model, seed, versions, and whether they
        are the same here.
    model : of the live page: hub id, folder, .gguf file, or a name that fetch takes; the fit's by
        default.
    fit : of the live page: what decompose or atlas wrote.
    port : of the live page: a fixed port, whose address stays; any free one by default.
    browser : whether to open the page in a browser; its address is printed.
    say : told the address before it is opened or served.

    Examples
    --------
    >>> import tempfile
    >>> run = Result("mine", {"heads": [{"head": "L0H1", "score": 0.9}]}, answer="L0H1 finds it.")
    >>> address = view(run.write(tempfile.mkdtemp() + "/run"), browser=False)
    >>> address.startswith("file://")
    True
    """
    if live == (folder is not None):
        raise BadInput(
            "name a run folder to view, or ask for the live page of a model; "
            "a folder can be its fit."
        )
    if not live and (fit is not None or model is not None or port):
        raise BadInput("model, fit and port are for the live page: ask for it, or leave them out.")
    if made and folder is not None:
        return made_result(folder)
    show = webbrowser.open if browser else str
    if folder is not None:
        url = page_of(folder).absolute().as_uri()
        say(url)
        show(url)
        return url
    session = _session(model, fit)
    with Server(session, port) as server, suppress(KeyboardInterrupt):  # how one stops it
        say(server.url)
        show(server.url)
        while True:  # Ctrl-C may reach a thread that answers: it is seen when this one wakes
            time.sleep(0.2)
    return server.url


def _session(model: str | None, fit: str | Path | None) -> Session:
    """Load what is looked into; a folder without features is refused before a model is loaded."""
    if fit is None:
        return Session(Scope.load(_DEFAULT if model is None else model))
    fitted = features_result(fit).model or _DEFAULT
    scope = Scope.load(fitted if model is None else model)
    return Session(scope, read_features(fit, scope), str(fit))


class Server(ThreadingHTTPServer):
    """Serves one session from a thread while it is open; its address is `url`.

    A thread that is still inside torch when Python ends aborts the whole process. So all threads
    are joined at the end: connections are closed, idle ones with them, and questions that wait for
    their turn are not asked any more.
    """

    daemon_threads = False
    request_queue_size = 128  # readers who connect at once

    def __init__(self, session: Session, port: int = 0) -> None:
        self.session = session
        self.path = "/" if port else f"/{secrets.token_urlsafe(18)}/"
        self.turn = threading.Lock()  # the model answers one question at a time
        self._connections: set[Any] = set()
        self._loop = threading.Thread(target=self.serve_forever, args=(0.1,))
        questions = (
            session.look,
            session.why,
            session.circuit,
            session.change,
            session.patterns,
            session.save,
        )
        self.questions: dict[str, Callable[..., dict[str, Any]]] = {}
        for question in questions:
            self.questions[f"api/{question.__name__}"] = question
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise BadInput(
                f"port {port} cannot be used ({error.strerror}): choose another."
            ) from None
        # what Host may say
        self.hosts = [f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")]
        self.url = f"http://{self.hosts[0]}{self.path}"

    def __enter__(self) -> Server:
        self._loop.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._loop.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, and remember the connection."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Close every connection, and wait for the threads."""
        self.questions = {}
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note a connection that its reader broke."""
        log.debug("a connection broke", exc_info=True)


class _Refusal(Exception):
    """An HTTP status, and the sentence that goes with it."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "qkscope"
    sys_version = ""
    timeout = 60
    early = False  # whether a part of the answer was sent
    unread = 0  # bytes of the body that are still to be read

    def do_GET(self) -> None:
        self._reply(self._get)

    def do_POST(self) -> None:
        self._reply(self._post)

    def _get(self, name: str) -> Any:
        if name == "api/model":
            return self.server.session.describe()
        if name and name not in _FILES:
            raise _Refusal(404, _NOTHING)
        file = name or "live.html"
        return asset(file).encode(), _TYPES[Path(file).suffix]

    def _post(self, name: str) -> Any:
        if self.unread > _LARGEST:
            raise _Refusal(413, "the prompt is too long to be sent: shorten it.")
        body = self.rfile.read(self.unread)
        self.unread = 0
        if self.headers.get_content_type() != "application/json":
            raise _Refusal(415, "questions are asked in JSON.")
        try:
            question = json.loads(body)
        except (ValueError, RecursionError):
            question = None
        if not isinstance(question, dict):
            raise _Refusal(400, "the question is not a JSON object.")
        with self.server.turn, self.server.session.told(self._tell):
            if name not in self.server.questions:
                raise _Refusal(404, "there is no such question.")
            return self.server.questions[name](**question)

    def _body_length(self) -> int:
        """How many bytes of a body the request claims; one of no length ends the connection."""
        length = self.headers.get("Content-Length", "")
        if "Transfer-Encoding" in self.headers or not length.isdecimal():
            self.close_connection = self.close_connection or self.command == "POST"
            return 0
        return int(length[:18])  # more digits are as many bytes as nobody sends

    def _allowed(self) -> str:
        """The path behind the secret, if the request may be answered."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        foreign = origin is not None and origin != f"http://{host}"
        if foreign or host not in self.server.hosts:
            raise _Refusal(403, "This page is served to this machine only.")
        path = self.path.split("?", 1)[0]
        secret = self.server.path
        start = path[: len(secret)]
        if not hmac.compare_digest(start.encode(), secret.encode()):
            raise _Refusal(404, _NOTHING)
        return path[len(secret) :]

    def _reply(self, answer: Callable[[str], Any]) -> None:
        """Send a file with its type, an answer as JSON, or the sentence of a refusal.

        Nothing of a body is read before Host, path and size are known to be ours.
        """
        self.early = False
        self.unread = self._body_length()
        status = 200
        try:
            value = answer(self._allowed())
        except _Refusal as refusal:
            status = refusal.status
            value = {"error": str(refusal)}
        except BadInput as error:
            status = 400
            value = {"error": str(error)}
        except (ConnectionError, TimeoutError):  # the reader left, while we were looking
            self.close_connection = True
            return
        except Exception:
            log.exception("a question failed")
            status = 500
            value = {"error": "this went wrong; the terminal says more."}
        if status != 200 and self.command == "GET":
            page = f"<!doctype html><title>qkscope</title><p>{escape(value['error'])}</p>"
            value = (page.encode(), "text/html")
        if isinstance(value, tuple):
            body, kind = value
        else:
            body = _line(value)
            kind = "application/json"
        headers = {"Content-Length": str(len(body))}
        if self.unread:
            self.close_connection = True
            headers["Connection"] = "close"
        with suppress(ConnectionError, TimeoutError):
            if not self.early:
                self._head(status, kind, headers)
            self.wfile.write(body)
            self._discard()

    def _discard(self) -> None:
        """Read a little of what a refused request goes on sending, so that it hears the refusal."""
        left = min(self.unread, 2 * _LARGEST)
        if left:
            self.wfile.flush()
            self.connection.settimeout(1)
        while left > 0:
            chunk = self.rfile.read1(min(left, 1 << 16))
            if not chunk:
                return
            left -= len(chunk)

    def _head(self, status: int, kind: str, more: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, text in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", **more}.items():
            self.send_header(name, text)
        self.end_headers()

    def _tell(self, early: dict[str, Any]) -> None:
        """Send a line before the answer; whoever has left ends the work."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError
        if not early:
            return
        if not self.early:
            self.early = True
            self.close_connection = True
            self._head(200, "application/x-ndjson", {"Connection": "close"})
        self.wfile.write(_line(early))

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _line(value: Any) -> bytes:
    """Encode a value as a line of JSON."""
    return json.dumps(plain_value(value), allow_nan=False).encode() + b"\n"
