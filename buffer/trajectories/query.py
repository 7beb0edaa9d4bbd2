"""SQL over the archive of one run, by DuckDB.

The views `episodes` and `turns` have the columns of `tables`; `runs/NAME/trajectories` is all that
is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb

from outloop.buffer.errors import SettingsError
from outloop.buffer.trajectories.folder import part_paths, read_manifest
from outloop.buffer.trajectories.tables import EPISODES, TURNS


def connect(folder: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory with the views `episodes` and `turns` of the archive as it is now.

    It can read no file but those of the archive, and nothing of the network.

    Raises:
        SchemaMismatch: the archive was written by another release.
    """
    parts = read_manifest(folder).parts
    connection = duckdb.connect(config={"autoinstall_known_extensions": False})
    for index, (name, schema) in enumerate((("episodes", EPISODES), ("turns", TURNS))):
        paths = [str(part_paths(folder, part)[index].absolute()) for part in parts]
        if paths:
            quoted = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
            source = f"read_parquet([{quoted}], union_by_name=true)"
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {source}")
        else:
            empty = schema.empty_table()
            connection.register("nothing", empty)
            connection.execute(f"CREATE TABLE {name} AS SELECT * FROM nothing")
            connection.unregister("nothing")
    connection.execute(f"SET allowed_directories=['{_quoted(folder.absolute())}/']")
    connection.execute("SET enable_external_access=false")
    connection.execute("SET lock_configuration=true")
    return connection


def query(folder: Path, sql: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
    """The rows of a query as dictionaries.

    Raises:
        SettingsError: the query is wrong.
    """
    connection = connect(folder)
    try:
        cursor = connection.execute(sql, parameters or [])
        names = [column[0] for column in cursor.description or ()]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    except duckdb.Error as error:
        raise SettingsError(f"sql={sql!r}: {error}") from error
    finally:
        connection.close()


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
