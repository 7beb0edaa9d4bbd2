"""What importing each part loads, and where it comes from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(m.split('.')[0] for m in sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return set(answer.stdout.split())


@pytest.mark.medium
@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import outloop.router.main", {"torch", "megatron", "sglang", "transformers"}),
        (
            "import outloop.envs.runner.runner, outloop.envs.runner.preflight",
            {"torch", "redis", "megatron", "fastapi"},
        ),
        ("import outloop.buffer.reader, outloop.buffer.writer", {"torch", "fastapi", "openai"}),
        ("import outloop.buffer.settings, outloop.buffer.records", {"torch", "redis"}),
        ("import outloop.engine.launch.plan.report", {"torch", "megatron", "fastapi", "click"}),
        ("import outloop.engine.launch.training", {"torch", "megatron", "fastapi"}),
        (
            "import outloop",
            {"torch", "numpy", "redis", "click", "pydantic", "rich", "msgspec", "structlog"},
        ),
        (
            "import outloop.buffer.trajectories.query, outloop.buffer.trajectories.reading",
            {"torch", "redis", "fastapi"},
        ),
        (
            "import outloop.cli",
            {"pyarrow", "duckdb", "torch", "redis", "fastapi", "openai", "aiohttp"},
        ),
    ],
)
def test_importing_a_part_loads_nothing_heavy(statement: str, forbidden: set[str]) -> None:
    """Each part stays importable where the others' dependencies are missing."""
    assert not _loaded_after(statement) & forbidden


def test_parts_are_imported_by_their_full_name_only() -> None:
    """No source imports `router` etc. without `outloop.`: it would be a second module object."""
    answer = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--select", "TID251", str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout


def test_the_tests_run_against_the_intended_package() -> None:
    """Under OUTLOOP_TEST_SITE the package comes from the wheel, otherwise from the checkout."""
    import outloop

    expected = os.environ.get("OUTLOOP_TEST_SITE", str(ROOT))
    assert str(Path(outloop.__file__).resolve()).startswith(str(Path(expected).resolve()))


def test_the_wheel_holds_the_data_files() -> None:
    """Lua scripts and the typing marker travel with the package."""
    from importlib.resources import files

    names = {p.name for p in files("outloop.buffer.redis").joinpath("scripts").iterdir()}
    assert any(name.endswith(".lua") for name in names)
    assert files("outloop").joinpath("py.typed").is_file()
    assert files("outloop").joinpath("requirements.lock").is_file()
    assert files("outloop.engine.serve.sglang").joinpath("requirements-cpu.txt").is_file()
