"""Descriptions as files: YAML that keeps the order in which it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outloop.buffer.errors import SettingsError


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Several documents as one text.

    Raises:
        SettingsError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise SettingsError(
            "`outloop manifests` needs the package PyYAML; run pip install 'outloop[deploy]'"
        ) from error

    class Dumper(yaml.SafeDumper):
        """Writes a value out wherever it stands, and a text of several lines as its lines."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000))


def write_files(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write each text under its name; the paths, in order.

    Raises:
        SettingsError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, text in files.items():
            path = folder / name
            path.write_text(text)
            if name.endswith(".sh"):
                path.chmod(0o755)
            paths.append(path)
    except OSError as error:
        raise SettingsError(
            f"--out={str(folder)!r} cannot be written ({error}); give a folder that you may write"
        ) from error
    return paths
