"""A server that scores ids as it is told to; for what a teacher's servers may get wrong.

    server = ScoringServer("uniform")      # every id alike, the first ones as most probable
    server = ScoringServer("busy")         # 503, always
    server = ScoringServer("refuses")      # 400: an id outside of its vocabulary
    server = ScoringServer("short")        # one score fewer than ids
    server = ScoringServer("other")        # scores of other ids
    server = ScoringServer("foreign")      # names ids beyond VOCAB as most probable
    server = ScoringServer("nothing")      # no scores of its input
    server = ScoringServer("nan")          # scores that are no numbers

Serves `/generate` and `/model_info`; `close` ends it.
"""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCAB = 400


class ScoringServer(ThreadingHTTPServer):
    """Behaves as told, and as told otherwise later."""

    daemon_threads = True

    def __init__(self, behaviour: str, *, tokenizer_path: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = behaviour
        self.tokenizer_path = tokenizer_path
        self.num_requests = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScoringServer

    def do_GET(self) -> None:
        """What is loaded."""
        self._answer(200, {"tokenizer_path": self.server.tokenizer_path})

    def do_POST(self) -> None:
        """One row."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.num_requests += 1
        behaviour = self.server.behaviour
        if behaviour in ("busy", "refuses"):
            status = 503 if behaviour == "busy" else 400
            self._answer(status, {"error": {"message": "id 399; allowed: 0 to 99"}})
            return
        ids = body["input_ids"]
        logprob = None if behaviour == "nan" else -math.log(VOCAB)
        scored = [token + 1 for token in ids] if behaviour == "other" else ids
        entries: list[Any] = [
            [logprob if at else None, token, None] for at, token in enumerate(scored)
        ]
        first = VOCAB if behaviour == "foreign" else 0
        top = [[-math.log(VOCAB), first + at, None] for at in range(body["top_logprobs_num"])]
        meta: dict[str, Any] = {"input_token_logprobs": entries}
        meta["input_top_logprobs"] = [None, *([top] * (len(ids) - 1))]
        if behaviour == "short":
            entries.pop()
        if behaviour == "nothing":
            meta = {}
        self._answer(200, {"output_ids": [0], "meta_info": meta})

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Silent."""
