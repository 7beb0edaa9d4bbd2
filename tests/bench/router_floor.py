"""The floor of `make bench-router` in one place: a relay that makes a turn's calls of `renderers`.

    python tests/bench/router_floor.py PORT MOCK_PORT MODEL_FOLDER

It is the bare relay, and in the same event loop it bridges the last message of each body onto a
prompt and an answer, which are always the same, and parses that answer once the server's is there,
with the router's own tokenizer.
It reads no more of a body than that message, and keeps nothing. The garbage collector is set as the
router sets it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from router_load import TOOLS, Conversation
from router_mock import FILLER_ID, NUM_GENERATED, Relay, serve_relay
from router_package import NUM_TAIL

from outloop.buffer.settings import build_settings
from outloop.router.main import own_the_process
from outloop.router.rendering.renderer import PolicyRenderer

_MESSAGE, _END = b'{"role":"user"', b'"}'
_decode = msgspec.json.Decoder(dict[str, str]).decode


class RenderingRelay(Relay):
    """The relay and the calls."""

    def __init__(self, target: str, policy: PolicyRenderer) -> None:
        super().__init__(target)
        self._package: Any = policy._renderer
        messages = Conversation("e00000").messages
        prompt = self._package.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
        self._tail = prompt[-NUM_TAIL:]
        self._answer = [FILLER_ID] * (NUM_GENERATED - 1) + [policy.stop_ids[0]]

    def asked(self, body: bytes) -> None:
        """Bridge what is said last."""
        start = body.rfind(_MESSAGE)
        if start < 0:
            # Who started it asks whether it is there.
            return
        new = _decode(body[start : body.find(_END, start) + len(_END)])
        bridged = self._package.bridge_to_next_turn(self._tail, self._answer, [new], tools=TOOLS)
        assert bridged is not None

    def answered(self) -> None:
        """Parse an answer."""
        self._package.parse_response(self._answer, tools=TOOLS, prompt_ids=self._tail)


def main() -> None:
    """Run until killed."""
    port, target, folder = sys.argv[1:]
    model = {
        "path": str(Path(folder)),
        "renderer": "qwen3",
        "renderer_options": {"enable_thinking": False},
    }
    policy = PolicyRenderer(build_settings({"model": model}, source="bench").model)
    uvloop.install()
    own_the_process()
    serve_relay(RenderingRelay(f"http://127.0.0.1:{target}", policy), int(port))


if __name__ == "__main__":
    main()
