"""Sandboxes for the tests: bubblewrap with and without cgroups."""

from collections.abc import AsyncIterator

import pytest

from outloop.envs.sandbox.api import Limits, Sandbox
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox

LIMITS = Limits(wall_s=20, cpu_s=10, memory_bytes=256 * 2**20, max_processes=16)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A bubblewrap sandbox with small limits."""
    made = BubblewrapSandbox(LIMITS)
    yield made
    await made.close()
