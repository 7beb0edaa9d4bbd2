"""A Hugging Face hub on this machine that serves folders as repositories."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: Mapping[str, Path]
    gated: tuple[str, ...]

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        name, revision = "/".join(parts[:2]), parts[3] if len(parts) > 3 else "main"
        if name in self.gated:
            return self._send(403, b"{}", {"x-error-code": "GatedRepo"})
        if name not in self.repositories:
            return self._send(404, b"{}", {"x-error-code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._send(404, b"{}", {"x-error-code": "RevisionNotFound"})
        folder = self.repositories[name]
        if is_api:
            files = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
            facts = {"id": name, "sha": COMMIT, "siblings": files}
            return self._send(200, json.dumps(facts).encode(), {"content-type": "application/json"})
        content = (folder / "/".join(parts[4:])).read_bytes()
        etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
        return self._send(200, content, {"etag": f'"{etag}"', "x-repo-commit": COMMIT})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def model_hub(repositories: Mapping[str, Path], *, gated: tuple[str, ...] = ()) -> Iterator[str]:
    """Serve `repositories` by id at the URL that is given back; `gated` ones are refused.

    Each has one commit, COMMIT, as its branch main.
    """
    handler = type("Handler", (_Handler,), {"repositories": repositories, "gated": gated})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
