"""The calculator's folder on the path, a made policy, and the fake router to answer its agent."""

import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from outloop.engine.new_policy import write_policy

ROOT = Path(__file__).resolve().parents[2]
CALCULATOR = ROOT / "examples/calculator"
sys.path.insert(0, str(CALCULATOR))


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator's initial policy of seed 0."""
    from tasks import conversations

    folder = tmp_path_factory.mktemp("policy")
    write_policy(folder, 0, conversations())
    return folder


@pytest.fixture
async def router() -> AsyncIterator[Any]:
    """A started fake router."""
    spec = importlib.util.spec_from_file_location(
        "control_router", ROOT / "tests/fakes/control_router.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fake = module.FakeRouter()
    await fake.start()
    yield fake
    await fake.stop()
