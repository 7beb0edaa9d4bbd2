"""What is refused before anything is built."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.engine.train import cpu_backend
from outloop.engine.train.main import check_settings


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"trainer": {"num_ranks": 2}}, r"trainer\.num_ranks=2, but .*WORLD_SIZE=1"),
        ({"trainer": {"device": "cuda"}}, r"trainer\.device='cuda'"),
        (
            {
                "model": {"path": "m", "max_context_tokens": 99},
                "trainer": {"max_microbatch_tokens": 98},
            },
            r"max_context_tokens=99 exceeds trainer\.max_microbatch_tokens=98",
        ),
    ],
)
def test_impossible_settings_are_refused(sections: dict[str, Any], sentence: str) -> None:
    """Each with what, value and what to do."""
    with pytest.raises(SettingsError, match=sentence):
        check_settings(Settings(**({"model": {"path": "m"}} | sections)))


def test_the_defaults_are_accepted(tiny_folder: Callable[..., Path]) -> None:
    """On a machine without CUDA."""
    check_settings(Settings(model={"path": tiny_folder()}))


def test_the_cpu_backend_knows_one_megatron_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version is refused with the command that installs the right one."""
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.0")
    with pytest.raises(SettingsError, match=r"pip install megatron-core==0\.16\.1"):
        cpu_backend.install()
