"""The live page's server: loopback only, a secret in the address, and nothing but a fixed list of files and questions.

A request is answered only if its Host is ours (another site's page cannot reach us under its own name), its path starts
with the token, and a question is JSON (which a foreign form cannot send). No path is ever looked up on the disk.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from qkscope.errors import BadInput
from qkscope.explorer.session import Session
from qkscope.page.report import asset
from qkscope.runs.result import plain_value

log = logging.getLogger(__name__)

_STATIC = Path(__file__).parent / "static"
_SHARED = ("page.css", "base.js", "colours.js", "map.js", "passage.js")  # the report's own
_OWN = {"": "index.html"} | {name: name for name in ("explorer.css", "tokens.js", "answer.js", "explorer.js")}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_LARGEST = 1 << 20  # bytes of a question
_DIGITS = len(str(_LARGEST))
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Explorer(ThreadingHTTPServer):
    """Serves one session; its address is `url`."""

    daemon_threads = True

    def __init__(self, session: Session, port: int = 0) -> None:
        self.session, self.token = session, secrets.token_urlsafe(18)
        self.files = {name: (asset(name), _type(name)) for name in _SHARED}
        self.files |= {name: ((_STATIC / own).read_text(encoding="utf-8"), _type(own)) for name, own in _OWN.items()}
        self.questions: Mapping[str, Callable[..., dict[str, Any]]] = {
            "look": session.look, "why": session.why, "change": session.change, "fit": session.fit,
            "save": session.save,
        }  # fmt: skip
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise BadInput(f"port {port} cannot be used ({error.strerror}): choose another.") from None

    @property
    def url(self) -> str:
        """Where to look."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    @property
    def hosts(self) -> tuple[str, str]:
        """What the Host header may say."""
        return (f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "qkscope", ""
    timeout = 60

    def do_GET(self) -> None:
        name = self._allowed()
        if name is None:
            return
        if name == "api/model":
            self._answer(HTTPStatus.OK, self.server.session.describe())
        elif name in self.server.files:
            text, kind = self.server.files[name]
            self._send(HTTPStatus.OK, text.encode(), kind)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing at this address.")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        size = int(length) if length.isascii() and length.isdigit() and len(length) <= _DIGITS else -1
        body = self.rfile.read(size) if size >= 0 else b""  # read though too long: who still sends hears no answer
        if not 0 <= size <= _LARGEST:
            self.close_connection = True  # what was not read would pass for the next request
            return self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the prompt is too long to be sent: shorten it.")
        name = self._allowed()
        if name is None:
            return None
        if self.headers.get_content_type() != "application/json":
            return self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "questions are asked in JSON.")
        question = self.server.questions.get(name.removeprefix("api/")) if name.startswith("api/") else None
        if question is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "there is no such question.")
        try:
            found = question(**_fields(body))
        except BadInput as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            log.exception("a question failed")
            return self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "this went wrong; the terminal says more.")
        return self._answer(HTTPStatus.OK, found)

    def _allowed(self) -> str | None:
        """The path behind the token, if the request may be answered."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if host not in self.server.hosts or (origin is not None and origin != f"http://{host}"):
            self._refuse(HTTPStatus.FORBIDDEN, "this page is served to this machine only.")
            return None
        token, slash, name = self.path.split("?", 1)[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()) or not slash:
            self._refuse(HTTPStatus.NOT_FOUND, "the address lacks its token: open the one that qkscope view printed.")
            return None
        return name

    def _answer(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, json.dumps(plain_value(value), allow_nan=False).encode(), "application/json")

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._answer(status, {"error": sentence})

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        try:
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the reader closed the page while we were looking
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _type(name: str) -> str:
    return _TYPES[Path(name).suffix]


def _fields(body: bytes) -> dict[str, Any]:
    """What a question names; the session knows which names and kinds it takes."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise BadInput("the question is not JSON.") from None
    if not isinstance(asked, dict):
        raise BadInput("the question is a JSON object, but got something else.")
    return asked
