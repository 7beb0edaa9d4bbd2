"""A tap in front of a server process: passes every call on, and kills the server at one of them."""

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

MOMENTS = ("before", "during", "after")


class DeadlyTap(ThreadingHTTPServer):
    """Kills `server` before, during or after its first call of `path`, the `skip` ones aside."""

    daemon_threads = True

    def __init__(self, server: Any, path: str, moment: str, *, skip: int = 0) -> None:
        assert moment in MOMENTS
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = server
        self.path = path
        self.moment = moment
        self.num_skipped = skip
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop passing on."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A server that is dead breaks its callers' connections; nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DeadlyTap

    def do_GET(self) -> None:
        """Pass on."""
        self._pass_on(b"")

    def do_POST(self) -> None:
        """Pass on, or kill."""
        self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass_on(self, body: bytes) -> None:
        tap = self.server
        is_fatal = self.path == tap.path
        if is_fatal and tap.num_skipped:
            tap.num_skipped -= 1
            is_fatal = False
        moment = tap.moment if is_fatal else ""
        if moment == "before":
            tap.server.kill()
        parts = urlsplit(tap.server.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            if moment == "during":
                tap.server.kill()
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            self.close_connection = True
            return
        finally:
            connection.close()
        if moment == "after":
            tap.server.kill()
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""
