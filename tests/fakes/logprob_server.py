"""A server whose next-id distribution is known, and whose logprobs may be those of another one.

    server = LogprobServer("scaled")    # logprobs of logits / T, as SGLang's
    server = LogprobServer("raw")       # of the logits, whatever T is
    server = LogprobServer("flat")      # every logit alike
    server = LogprobServer("none")      # no top logprobs at all
    server = LogprobServer("rounded")   # of logits that were rounded to bfloat16
    server = LogprobServer("rounded raw")

Rounded logits lie near 8. Those of a prompt of six ids are closer together than others, and
a prefix from the cache moves the likeliest one by a bit.

Serves `/continue_generation` and `/generate` with `top_logprobs_num`; `close` ends it.
"""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_IDS = 40
BIT = 1 / 16
"""The last bit of a bfloat16 from 8 to 16."""


class LogprobServer(ThreadingHTTPServer):
    """Behaves as told."""

    daemon_threads = True

    def __init__(self, behaviour: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = behaviour
        self._cached: set[tuple[str | None, tuple[int, ...]]] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self.shutdown()
        self.server_close()

    def top_logprobs(
        self, prompt: tuple[int, ...], extra_key: str | None, temperature: float, num: int
    ) -> list[list[Any]]:
        """The likeliest ids' logprobs, as this server tells them."""
        if "raw" in self.behaviour:
            temperature = 1.0
        logits = self._logits(prompt, is_cached=(extra_key, prompt) in self._cached)
        self._cached.add((extra_key, prompt))
        logits = [logit / temperature for logit in logits]
        total = math.log(sum(math.exp(logit) for logit in logits))
        return [[logit - total, index, None] for index, logit in enumerate(logits[:num])]

    def _logits(self, prompt: tuple[int, ...], *, is_cached: bool) -> list[float]:
        if "rounded" not in self.behaviour:
            step = 0.0 if self.behaviour == "flat" else 0.1
            return [-step * index for index in range(NUM_IDS)]
        step = 0.01 if len(prompt) == 6 else 0.1
        logits = [round((9 - step * index) / BIT) * BIT for index in range(NUM_IDS)]
        return [logits[0] + (BIT if is_cached else 0.0), *logits[1:]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LogprobServer

    def do_POST(self) -> None:
        """One call."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        answer: dict[str, Any] = {"status": "ok"}
        if self.path == "/generate":
            answer = {"output_ids": [0], "meta_info": {}}
            if self.server.behaviour != "none":
                temperature = body["sampling_params"]["temperature"]
                top = self.server.top_logprobs(
                    tuple(body["input_ids"]),
                    body.get("extra_key"),
                    temperature,
                    body["top_logprobs_num"],
                )
                answer["meta_info"]["output_top_logprobs"] = [top]
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Say nothing."""
