"""One request of /generate: its wire form, its state in the engine, and how it ends.

`output_ids` and `logprobs` are equally long and `spans` cover them without gaps. A request ends
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from outloop.engine.serve.torch_server.sampling import (
    BadRequest,
    Constraint,
    SamplingParams,
    Support,
    Top,
)
from outloop.engine.serve.torch_server.tokenizer import Text

_MAX_TOP_LOGPROBS = 32
_REFUSED = (
    "text",
    "input_embeds",
    "token_ids_logprob",
    "return_hidden_states",
    "lora_path",
    "session_params",
)


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Body of POST /generate; unknown top-level fields are ignored, as by SGLang."""

    input_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    stream: bool = False
    rid: str | None = None
    extra_key: str | None = None
    text: Any = None
    input_embeds: Any = None
    token_ids_logprob: Any = None
    return_sampling_mask: bool = False
    """Among which ids each token was sampled, and its logprob over these; [] of more than 4096
    ids, where SGLang ends the request. No top_k is needed, as it is by SGLang."""
    return_routed_experts: bool = False
    """Left without an answer by a dense model, as by SGLang."""
    routed_experts_start_len: int = 0
    """First position whose experts are given."""
    return_hidden_states: bool = False
    lora_path: Any = None
    session_params: Any = None

    def check(self) -> None:
        """Refuse what this server cannot do.

        Raises:
            BadRequest: names the field and what is allowed.
        """
        self.sampling_params.check()
        for name in _REFUSED:
            if getattr(self, name):
                raise BadRequest(f"{name} is not supported by the torch server; leave it out")
        if not 0 <= self.routed_experts_start_len <= len(self.input_ids):
            raise BadRequest(
                f"routed_experts_start_len={self.routed_experts_start_len}; allowed: 0 to the "
                f"{len(self.input_ids)} input_ids"
            )
        if self.logprob_start_len not in (None, -1, 0):
            raise BadRequest(
                f"logprob_start_len={self.logprob_start_len}; allowed by the torch server: -1, 0"
            )
        if self.logprob_start_len == 0 and self.stream:
            raise BadRequest("logprob_start_len=0 with stream=true; send it without stream")
        if not 0 <= self.top_logprobs_num <= _MAX_TOP_LOGPROBS:
            raise BadRequest(
                f"top_logprobs_num={self.top_logprobs_num}; allowed by the torch server: "
                f"0 to {_MAX_TOP_LOGPROBS}"
            )


_decode = msgspec.json.Decoder(GenerateRequest).decode


def decode_request(body: bytes) -> GenerateRequest:
    """The request in `body`, checked.

    Raises:
        BadRequest: not JSON, wrong types, unknown sampling parameter, value out of range.
    """
    try:
        request = _decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from error
    request.check()
    return request


@dataclass(slots=True, eq=False)
class Running:
    """State of one sequence; written by the engine's thread only."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    extra_key: str | None
    is_streamed: bool
    on_progress: Callable[[Running], None]
    """Called in the event loop after tokens were sampled (streamed requests) and at the end."""
    seed: int = 0
    """Set when it runs for the first time."""
    num_top: int = 0
    """How many of the most probable ids to report for every sampled token."""
    constraint: Constraint | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    """As many as output_ids with `num_top`, else empty."""
    wants_support: bool = False
    supports: list[Support] = field(default_factory=list)
    """As many as output_ids with `wants_support`, else empty."""
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    """(weight_version, start, end) over output_ids."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Logprobs of prompt_ids after the first; with `logprob_start_len` 0, else empty."""
    prompt_tops: list[Top] = field(default_factory=list)
    """The most probable ids where each of these stands; with `num_top` too, else empty."""
    routes_from: int | None = None
    """First position whose experts are wanted."""
    routed_experts: bytes | None = None
    """int32 [rows, layers, k] once it has ended with a slot."""
    finish: dict[str, Any] | None = None
    final_version: str = ""
    """weight_version when it ended."""
    num_cached: int = 0
    num_retractions: int = 0
    slot: int = -1
    has_run: bool = False

    def add(
        self,
        token: int,
        logprob: float,
        version: str,
        top: Top | None = None,
        support: Support | None = None,
    ) -> None:
        """One more token was sampled under `version`."""
        if top is not None:
            self.tops.append(top)
        if support is not None:
            self.supports.append(support)
        position = len(self.output_ids)
        self.output_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], position + 1)
        else:
            self.spans.append((version, position, position + 1))

    def end_reason(self, text: Text) -> dict[str, Any] | None:
        """Why the request ends with its last token, or None; the length is looked at first."""
        if len(self.output_ids) >= self.params.max_new_tokens:
            return {"type": "length", "length": self.params.max_new_tokens}
        token = self.output_ids[-1]
        if token in self.stop_ids:
            return {"type": "stop", "matched": token}
        if self.params.stops:
            matched = text.match_stop(self.output_ids, self.params.stops)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        return None


def abort_reason(message: str = "Aborted", status_code: int | None = None) -> dict[str, Any]:
    """The finish_reason of a request that was ended from outside."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}
