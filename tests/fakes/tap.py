"""A tap in front of a server: passes every call on, and lets a test in between."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class Tap(ThreadingHTTPServer):
    """Passes calls on to the server at `target`; subclasses act on the way."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def on_call(self, path: str) -> bytes | None:
        """Before a call is passed on; what is returned is the answer, and nothing is passed on."""
        return None

    def on_sent(self, path: str) -> None:
        """When a call was passed on and is not answered yet."""

    def on_answer(self, path: str) -> None:
        """When the server has answered."""

    def close(self) -> None:
        """Stop passing on."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A server that is dead breaks its callers' connections; nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Tap

    def do_GET(self) -> None:
        """Pass on."""
        self._pass_on(b"")

    def do_POST(self) -> None:
        """Pass on, or not."""
        self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass_on(self, body: bytes) -> None:
        tap = self.server
        own = tap.on_call(self.path)
        if own is not None:
            self._answer(200, own)
            return
        parts = urlsplit(tap.target)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            tap.on_sent(self.path)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        finally:
            connection.close()
        tap.on_answer(self.path)
        self._answer(answer.status, content)

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""
