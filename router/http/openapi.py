"""The OpenAPI document of every route, raw ones included.

Owns: descriptions of the raw routes. Does not own: what they do. Invariant: bodies are described
by the same types that decode them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from outloop.router.dialects.messages_request import CountRequest
from outloop.router.dialects.table import DIALECTS
from outloop.router.http.response_schemas import responses_of
from outloop.router.routes import schemas as bodies

_ROUTES: tuple[tuple[str, str, str, type | None], ...] = (
    ("get", "/v1/models", "The models that may be named.", None),
    ("get", "/v1/models/{model_id}", "One of them.", None),
    ("post", "/v1/messages/count_tokens", "How many ids a conversation has.", CountRequest),
    ("post", "/tasks", "Register the run's tasks.", bodies.TasksBody),
    ("post", "/tasks/claim", "Claim attempts to play.", bodies.ClaimBody),
    ("post", "/runners/heartbeat", "A runner is there.", bodies.HeartbeatBody),
    ("post", "/episodes", "Open an episode.", bodies.EpisodeBody),
    ("get", "/episodes/{episode_id}", "Read an episode and its turns.", None),
    ("post", "/episodes/{episode_id}/reward", "Score an episode.", bodies.RewardBody),
    ("post", "/episodes/{episode_id}/close", "End an episode.", bodies.CloseBody),
    ("post", "/trajectories", "Episodes or conversations.", bodies.TrajectoriesBody),
    ("get", "/episodes/{episode_id}/v1/models", "The same as /v1/models, by path.", None),
    ("get", "/episodes/{episode_id}/v1/models/{model_id}", "One of them, by path.", None),
    (
        "post",
        "/episodes/{episode_id}/v1/messages/count_tokens",
        "How many ids a conversation has, by path.",
        CountRequest,
    ),
    *(
        ("post", prefix + path, served.summary, served.body)
        for prefix in ("", "/episodes/{episode_id}")
        for path, served in DIALECTS.items()
    ),
)


def describe(app: FastAPI) -> None:
    """Make `/openapi.json` list the raw routes beside FastAPI's own."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        types = [body for *_, body in _ROUTES if body is not None]
        schemas, components = msgspec.json.schema_components(
            types, ref_template="#/components/schemas/{name}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        for path, operations in document["paths"].items():
            for found in operations.values():
                # FastAPI's own routes refuse as all others do.
                found["responses"] = responses_of(path)
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        remaining = iter(schemas)
        for method, path, summary, body in _ROUTES:
            operation: dict[str, Any] = {
                "summary": summary,
                "security": [{"key": []}],
                "responses": responses_of(path),
            }
            names = [name for name in ("episode_id", "model_id") if f"{{{name}}}" in path]
            if names:
                operation["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in names
                ]
            if body is not None:
                content = {"application/json": {"schema": next(remaining)}}
                operation["requestBody"] = {"required": True, "content": content}
            document["paths"].setdefault(path, {})[method] = operation
        return document

    app.openapi = openapi  # type: ignore[method-assign]
