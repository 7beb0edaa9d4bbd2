"""Servers are asked what their logprobs mean before they are entered."""

from collections.abc import Callable, Iterator

import pytest

from fakes.logprob_server import LogprobServer
from outloop.buffer.errors import OutloopError, PublishFailed, SettingsError
from outloop.engine.serve.logprob_convention import check_logprobs


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


@pytest.mark.parametrize(
    ("behaviour", "error", "sentence"),
    [
        ("scaled", None, ""),
        ("flat", None, ""),
        ("raw", SettingsError, r"ratio=1\.00.*2\.00 is allowed.*SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ("none", PublishFailed, "no top logprobs"),
    ],
)
def test_logprobs_must_be_those_of_what_is_sampled(
    behaviour: str,
    error: type[OutloopError] | None,
    sentence: str,
    start: Callable[[str], LogprobServer],
) -> None:
    """At T = 0.5 differences double; a server that tells those of the logits is refused."""
    server = start(behaviour)
    if error is None:
        check_logprobs("server-0", server.url, timeout_s=30)
        return
    with pytest.raises(error, match=sentence):
        check_logprobs("server-0", server.url, timeout_s=30)
