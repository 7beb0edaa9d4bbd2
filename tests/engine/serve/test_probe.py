"""Servers are asked what their logprobs mean before they are entered."""

from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from fakes.logprob_server import LogprobServer
from outloop.buffer.errors import OutloopError, PublishFailed, SettingsError
from outloop.engine.serve.logprob_convention import check_logprobs

REFUSED = r"ratio=1\.00.*2\.00 is allowed.*SGLANG_RETURN_ORIGINAL_LOGPROB"


@pytest.fixture
def start() -> Iterator[Callable[[str], LogprobServer]]:
    """Start a server that behaves as asked; all are ended."""
    started: list[LogprobServer] = []

    def start_one(behaviour: str) -> LogprobServer:
        started.append(LogprobServer(behaviour))
        return started[-1]

    yield start_one
    for server in started:
        server.close()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("behaviour", "dtype", "error", "sentence"),
    [
        ("scaled", "float32", None, ""),
        ("flat", "float32", None, ""),
        ("raw", "float32", SettingsError, REFUSED),
        ("none", "float32", PublishFailed, "no top logprobs"),
        ("scaled", "bfloat16", None, ""),
        ("rounded", "bfloat16", None, ""),
        ("rounded raw", "bfloat16", SettingsError, REFUSED),
    ],
)
def test_logprobs_must_be_those_of_what_is_sampled(
    behaviour: str,
    dtype: Literal["float32", "bfloat16"],
    error: type[OutloopError] | None,
    sentence: str,
    start: Callable[[str], LogprobServer],
) -> None:
    """At T = 0.5 differences double; a server that tells those of the logits is refused. Rounding
    alone refuses none."""
    server = start(behaviour)
    if error is None:
        check_logprobs("server-0", server.url, dtype=dtype, timeout_s=30)
        return
    with pytest.raises(error, match=sentence):
        check_logprobs("server-0", server.url, dtype=dtype, timeout_s=30)
