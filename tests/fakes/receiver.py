"""Something on loopback that is posted to: a webhook, a collector of spans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def receiver(*, refuses: int = 0) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """(its address, path and body of what it accepted); the first `refuses` requests get a 503."""
    received: list[tuple[str, bytes]] = []
    left = [refuses]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if left[0]:
                left[0] -= 1
                self.send_response(503)
            else:
                received.append((self.path, body))
                self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
