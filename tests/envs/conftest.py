"""A fake router, a user's folder to import from, and settings that name both."""

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outloop.buffer.settings import Settings, build_settings
from outloop.envs.runner.runner import run

FAKE = Path(__file__).resolve().parents[1] / "fakes/control_router.py"


@pytest.fixture(scope="session")
def fake_module() -> ModuleType:
    """The fake router's module; tests have no packages to import it from."""
    spec = importlib.util.spec_from_file_location("control_router", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["control_router"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def router(fake_module: ModuleType) -> AsyncIterator[Any]:
    """A started fake router."""
    fake = fake_module.FakeRouter()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The user's working directory; modules that a test puts there are forgotten afterwards."""
    before, path, writes_no_bytecode = set(sys.modules), [*sys.path], sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    with contextlib.chdir(tmp_path):
        yield tmp_path
    sys.path[:], sys.dont_write_bytecode = path, writes_no_bytecode
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def make_settings(folder: Path) -> Callable[..., Settings]:
    """Settings with the given values of `env`; other sections by keyword `trainer=` etc."""

    def make(trainer: dict[str, Any] | None = None, **env: Any) -> Settings:
        tree = {
            "model": {"path": str(folder)},
            # In the runner's process, unless a test is about processes.
            "env": {"tasks": "user:tasks", "rollout_function_path": "user:play", "num_workers": 0}
            | env,
            "trainer": trainer or {},
        }
        return build_settings(tree, source="test")

    return make


@pytest.fixture
def play_with(
    folder: Path, make_settings: Callable[..., Settings], fake_module: ModuleType
) -> Callable[..., Any]:
    """Write `source` as the user's module and run the runner against a fake router."""

    async def play(router: Any, source: str, timeout_s: float = 20.0, **env: Any) -> None:
        tasks = '\n\ndef tasks():\n    return [{"question": f"1{n}*2"} for n in range(5)]\n'
        (folder / "user.py").write_text(source + tasks)
        stop = asyncio.Event()
        playing = run(
            make_settings(**env),
            router_url=router.url,
            runner_key=fake_module.RUNNER_KEY,
            stop=stop,
        )
        await asyncio.wait_for(playing, timeout_s)

    return play
