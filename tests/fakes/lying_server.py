"""A server that acknowledges every call of a publish but may do something else, or nothing.

    python lying_server.py BEHAVIOUR [PHASE]

Behaviours: `wrong` holds other weights than it was sent; `hang` never answers PHASE; `error`
answers PHASE with 500; `refuse` answers it with 200 and success=false; `claim` answers it with
success and does nothing. PHASE "first_byte" is the broadcast that tries a group, "broadcast" those
of weights. Prints its URL on one line.
"""

import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from outloop.engine.publish.flattened_bucket import read_bucket
from outloop.engine.publish.verification.checksum import tensor_checksum
from outloop.engine.serve.torch_server.schemas import FromGroupBody
from outloop.engine.serve.torch_server.weight_update import UpdateRefused
from outloop.engine.serve.torch_server.weight_update_groups import UpdateGroups

PATHS = {
    "pause": "/pause_generation",
    "join": "/init_weights_update_group",
    "first_byte": "/update_weights_from_distributed",
    "broadcast": "/update_weights_from_distributed",
    "begin": "/begin_weight_update",
    "bucket": "/update_weights_from_tensor",
    "disk": "/update_weights_from_disk",
    "end": "/end_weight_update",
    "verify": "/weights_checker",
    "version": "/update_weight_version",
    "continue": "/continue_generation",
}


class LyingServer(ThreadingHTTPServer):
    """Behaves as told; `calls` lists the paths that were asked for."""

    daemon_threads = True

    def __init__(self, behaviour: str, phase: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = behaviour
        self.path_of_phase = PATHS.get(phase, "")
        self.is_for_byte = phase == "first_byte"
        self.sums: dict[str, str] = {}
        self.calls: list[str] = []
        self.info: dict[str, Any] = {}
        self.groups = UpdateGroups(torch.device("cpu"))
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        """End everything, answers that hang included."""
        self.closing.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are written apart: with it the second waits for the first's acknowledgement.
    disable_nagle_algorithm = True
    server: LyingServer

    def do_GET(self) -> None:
        """Alive, and what it says of itself."""
        self._answer(200, self.server.info)

    def do_POST(self) -> None:
        """One call of a publish."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        lie = self.server
        lie.calls.append(self.path)
        if self.path == lie.path_of_phase and _is_byte(body) == lie.is_for_byte:
            if lie.behaviour == "hang":
                lie.closing.wait(60)
                return None
            if lie.behaviour == "error":
                return self._answer(500, {"error": "it broke"})
            if lie.behaviour == "refuse":
                return self._answer(200, {"success": False, "message": "no"})
            if lie.behaviour == "claim":
                return self._answer(200, {"success": True, "message": ""})
        for name, tensor in self._received(body):
            held = tensor + 1 if lie.behaviour == "wrong" else tensor
            lie.sums[name] = tensor_checksum(held)
        answer: dict[str, Any] = {"success": True, "message": "", "new_version": None}
        answer["new_version"] = body.get("new_version")
        answer["ranks"] = [{"checksums": lie.sums}]
        return self._answer(200, answer)

    def _received(self, body: dict[str, Any]) -> list[tuple[str, Any]]:
        """Named tensors of an update, taken as a real server takes them."""
        groups = self.server.groups
        if self.path == PATHS["bucket"]:
            return read_bucket(body["serialized_named_tensors"][0])
        if self.path == PATHS["disk"]:
            files = Path(body["model_path"]).glob("*.safetensors")
            return [item for file in files for item in load_file(file).items()]
        if self.path == PATHS["join"]:
            host, port, name = body["master_address"], body["master_port"], body["group_name"]
            rank, size = body["rank_offset"], body["world_size"]
            groups.join(host, port, rank=rank, world_size=size, name=name, backend="gloo")
        elif self.path == "/destroy_weights_update_group":
            with contextlib.suppress(UpdateRefused):
                groups.leave(body["group_name"])
        elif self.path == PATHS["broadcast"]:
            received = groups.receive(FromGroupBody(**body))
            return [] if _is_byte(body) else received
        return []

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""


def _is_byte(body: dict[str, Any]) -> bool:
    """Whether a call is for the byte that tries a group."""
    return body.get("shapes") == [[1]]


if __name__ == "__main__":
    with LyingServer(*sys.argv[1:]) as server:
        print(server.url, flush=True)
        server.serve_forever()
