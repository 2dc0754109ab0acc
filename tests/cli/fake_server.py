"""HTTP on a Unix socket, for fake agents. They can misbehave as agents do in life: hang, close the connection without
an answer, send junk."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ValidationError

from agents.api import models as m

TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass
class Refuse(Exception):
    status: int
    body: m.ErrorBody


def refuse(code: str, thing: str, reason: str, hint: str = "") -> Refuse:
    return Refuse(m.ERROR_CODES[code][0], m.ErrorBody(code=code, thing=thing, reason=reason, hint=hint))


class FakeServer:
    """`answer` says what is answered to a request: a model, or a list of them. Raises Refuse, ValidationError."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.mode = "ok"
        self.metrics = ""
        self.requests: list[tuple[str, str]] = []
        self.down = threading.Event()
        self._server: socketserver.BaseServer | None = None
        self._connections: set[socket.socket] = set()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> Any:
        raise NotImplementedError

    def start(self) -> None:
        agent = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                agent._handle(self, "GET")

            def do_POST(self) -> None:
                agent._handle(self, "POST")

            def address_string(self) -> str:
                return "unix"

            def log_message(self, *args: Any) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: Any) -> None:
                pass

            def process_request(self, request: Any, client_address: Any) -> None:
                agent._connections.add(request)
                super().process_request(request, client_address)

            def shutdown_request(self, request: Any) -> None:
                agent._connections.discard(request)
                super().shutdown_request(request)

        self.down = threading.Event()
        self.path.unlink(missing_ok=True)
        self._server = Server(str(self.path), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """As a killed agent: the socket file stays, nobody listens, and what was connected is cut off."""
        if self._server is not None:
            self.down.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            for connection in list(self._connections):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _handle(self, http: BaseHTTPRequestHandler, method: str) -> None:
        length = int(http.headers.get("content-length") or 0)
        body = http.rfile.read(length)
        path = urlsplit(http.path)
        self.requests.append((method, path.path))
        if self.mode == "hang":
            self.down.wait(30)
            http.close_connection = True
            return
        if self.mode == "close" or (self.mode == "close-posts" and method == "POST"):
            http.close_connection = True
            return
        if self.mode == "redirect":
            _answer(http, 307, b"", {"location": "http://127.0.0.1:1/"})
            return
        if self.mode == "junk":
            _answer(http, 200, b"<html>hello</html>")
            return
        if self.mode == "huge":
            _answer(http, 200, b"[" + b" " * (17 * 1024 * 1024) + b"]")
            return
        try:
            if path.path == "/metrics" and http.headers.get("authorization") == f"Bearer {TOKEN}":
                _answer(http, 200, self.metrics.encode())
                return
            if path.path != "/healthz" and http.headers.get("authorization") != f"Bearer {TOKEN}":
                raise refuse("unauthorized", f"agent of {self.name}", "the token is not known here")
            _answer(http, 200, _json(self.answer(method, path.path, parse_qs(path.query), body)))
        except Refuse as error:
            _answer(http, error.status, _json(error.body))
        except ValidationError as error:
            _answer(http, 422, _json(m.ErrorBody(code="bad-request", thing=path.path, reason=str(error.errors()[0]))))
        except BrokenPipeError:
            http.close_connection = True


def _json(value: Any) -> bytes:
    if isinstance(value, list):
        return json.dumps([item.model_dump(mode="json", by_alias=True) for item in value]).encode()
    assert isinstance(value, BaseModel)
    return value.model_dump_json(by_alias=True).encode()


def _answer(http: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    http.send_response(status)
    for name, value in (headers or {}).items():
        http.send_header(name, value)
    http.send_header("content-length", str(len(body)))
    http.end_headers()
    http.wfile.write(body)
