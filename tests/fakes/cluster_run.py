"""A run of forty short steps for the tests of clusters, and waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def cluster_settings(name: str, *, checkpoint_every: int) -> dict[str, dict[str, Any]]:
    """Changes to the settings of a user's folder."""
    return {
        "run": {"name": name},
        "env": {"max_concurrent_episodes": 16, "episode_deadline_s": 60},
        "trainer": {
            "num_steps": 40,
            "groups_per_step": 4,
            "checkpoint_every": checkpoint_every,
            "take_timeout_s": 200,
            "device": "cpu",
        },
    }


def wait_until(what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
    """Fail with `what` when it has not become true."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
