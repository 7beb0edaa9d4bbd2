"""The page that shows runs, `outloop view`: what their folders hold, read only."""

from __future__ import annotations

import importlib.util

from outloop.buffer.errors import SettingsError

_PACKAGES = ("duckdb", "fastapi", "pyarrow", "uvicorn")


def require_packages() -> None:
    """Make sure that what the page needs is installed.

    Raises:
        SettingsError: something is not.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"the page needs {', '.join(missing)}, which is not installed; run "
            "pip install 'outloop[view]'"
        )
