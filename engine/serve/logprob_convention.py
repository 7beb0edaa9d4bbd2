"""Whether a server's logprobs are those of the distribution it samples from.

behavior_logprobs must be log_softmax(logits / T). What a server returns depends on its release and
environment: SGLang has a switch for it. The difference of two ids' logprobs is the difference of
their logits over T, whatever the sum over the vocabulary is; at T = 0.5 it must be twice that at
T = 1.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import structlog

from outloop.buffer.errors import PublishFailed, SettingsError
from outloop.engine.publish.server_client import ServerClient

_PROMPTS = ((1, 2, 3, 4, 5, 6), (2, 4, 6), (7,))
_TEMPERATURE = 0.5
_NUM_TOP = 16
_MIN_DIFFERENCES = {"float32": 0.02, "bfloat16": 0.5}
"""Smallest usable difference of two logprobs at T = 1, by dtype; below it rounding would decide:
bfloat16 rounds a logit of 8 to 16 to multiples of 1/16."""
_TOLERANCE = 0.1
_log = structlog.get_logger()


def check_logprobs(
    server_id: str,
    url: str,
    *,
    dtype: Literal["float32", "bfloat16"],
    timeout_s: float,
    key: str | None = None,
) -> None:
    """Ask the server at T = 1 and at T = 0.5, and compare.

    A server that was left paused is resumed, so that it can answer. A prompt whose likeliest ids
    lie too close together for `dtype` is passed over; a server of which no prompt can be used is
    accepted, with a warning.

    Args:
        dtype: of the served weights.

    Raises:
        SettingsError: its logprobs are not those of the distribution it samples from.
        ServerUnavailable, PublishFailed: it cannot answer.
        DeadlineExceeded: it did not answer within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    client = ServerClient(server_id, url, key=key)
    try:
        client.resume(deadline)
        for prompt in _PROMPTS:
            plain, scaled = (
                _top_logprobs(client, prompt, temperature, deadline)
                for temperature in (1.0, _TEMPERATURE)
            )
            ratio = _ratio(plain, scaled, _MIN_DIFFERENCES[dtype])
            if ratio is not None:
                _judge(server_id, url, ratio)
                return
    finally:
        client.close()
    _log.warning(
        "logprobs_not_probed",
        server_id=server_id,
        reason=f"the likeliest ids differ by less than {_MIN_DIFFERENCES[dtype]} nats",
    )


def _judge(server_id: str, url: str, ratio: float) -> None:
    expected = 1 / _TEMPERATURE
    if abs(ratio - expected) > _TOLERANCE * expected:
        raise SettingsError(
            f"{server_id} at {url} returns logprobs that are not those of sampling at "
            f"temperature={_TEMPERATURE}: differences grow by ratio={ratio:.2f} from "
            f"temperature=1.0, {expected:.2f} is allowed. Start it so that logprobs are those of "
            "logits / temperature (SGLang: without SGLANG_RETURN_ORIGINAL_LOGPROB)"
        )


def _ratio(
    plain: dict[int, float], scaled: dict[int, float], min_difference: float
) -> float | None:
    """How a difference of logprobs grows from T = 1; None where none is large enough."""
    common = sorted(plain.keys() & scaled.keys(), key=plain.__getitem__)
    if len(common) < 2:
        return None
    low, high = common[0], common[-1]
    difference = plain[high] - plain[low]
    if difference < min_difference:
        return None
    return (scaled[high] - scaled[low]) / difference


def _top_logprobs(
    client: ServerClient, prompt: tuple[int, ...], temperature: float, deadline: float
) -> dict[int, float]:
    """Logprobs of the likeliest next ids."""
    answer = client.generate(
        {
            "input_ids": list(prompt),
            "sampling_params": {
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": 1,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": _NUM_TOP,
            # A prefix from the cache goes through another kernel, whose last bit may differ.
            "extra_key": f"logprobs-{uuid.uuid4().hex}",
        },
        deadline,
    )
    try:
        entries: list[list[Any]] = answer["meta_info"]["output_top_logprobs"][0]
        return {int(entry[1]): float(entry[0]) for entry in entries}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise PublishFailed(
            f"{client.server_id} at {client.url} gives no top logprobs "
            f"(meta_info={answer.get('meta_info')!r}): {error!r}; it needs SGLang's /generate"
        ) from error
