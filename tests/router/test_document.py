"""The OpenAPI document against the router: bodies drawn from its schemas, answers as it says."""

from functools import cache
from typing import Any

from fake_server import Script
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ADMIN = {"/servers", "/pause", "/resume", "/policy_version"}
OPEN = {"/health", "/ready", "/metrics"}
NUM_DRAWS = 8
# What no schema says; without these words every body would be refused at once.
LIKELY = {
    "model": ("policy",),
    "role": ("user", "user", "assistant", "system"),
    "type": ("text", "message", "function"),
    "text": ("said", ""),
    "content": ("said", "\u00e9", [{"type": "text", "text": "said"}]),
    "prompt": ("said", [1, 2]),
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


def bodies_of(document: dict) -> Any:
    """From a schema of the document to values that it allows."""

    @cache
    def named(name: str) -> st.SearchStrategy:
        return st.deferred(lambda: drawn(document["components"]["schemas"][name]))

    def field(name: str, schema: dict) -> st.SearchStrategy:
        any_value = drawn(schema)
        if name not in LIKELY:
            return any_value
        likely = st.sampled_from(LIKELY[name])
        return st.integers(0, 9).flatmap(lambda number: likely if number else any_value)

    def drawn_object(schema: dict) -> st.SearchStrategy:
        fields = {name: field(name, one) for name, one in schema.get("properties", {}).items()}
        if not fields:
            inner = schema.get("additionalProperties")
            values = drawn(inner) if isinstance(inner, dict) else ANYTHING
            return st.dictionaries(st.text(max_size=4), values, max_size=2)
        required = set(schema.get("required", ()))
        must = {name: one for name, one in fields.items() if name in required}
        may = {name: one for name, one in fields.items() if name not in required}
        few = (
            st.lists(st.sampled_from(sorted(may)), max_size=2, unique=True) if may else st.just([])
        )
        return few.flatmap(
            lambda chosen: st.fixed_dictionaries({**must, **{name: may[name] for name in chosen}})
        )

    def drawn(schema: dict) -> st.SearchStrategy:
        if "$ref" in schema:
            return named(schema["$ref"].rpartition("/")[2])
        if "anyOf" in schema:
            return st.one_of([drawn(one) for one in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kinds = {
            "string": lambda: st.text(max_size=6),
            "integer": lambda: st.integers(1, 4) | st.integers(-1, 1 << 40),
            "number": lambda: st.floats(0, 2) | st.floats(allow_nan=False, allow_infinity=False),
            "boolean": st.booleans,
            "null": st.none,
            "array": lambda: (
                st.lists(drawn(schema.get("items", {})), min_size=1, max_size=3) | st.just([])
            ),
            "object": lambda: drawn_object(schema),
        }
        return kinds[schema["type"]]() if "type" in schema else ANYTHING

    return drawn


def operations_of(document: dict) -> list[tuple[str, str, dict | None]]:
    """Method, path and body's schema of each; pausing and resuming come last, in this order."""
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            found.append((method, path, content.get("application/json", {}).get("schema")))
    return sorted(found, key=lambda one: (one[1] in ADMIN, one[1]))


@given(data=st.data())
@settings(
    max_examples=NUM_DRAWS,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_every_route_answers_as_the_document_says(stage, data) -> None:
    """Whatever a body holds that the document allows: a documented status, no failure of ours, and
    a refusal in the form of refusals; an unknown key opens nothing."""
    stop = stage.renderer.stop_ids[0]
    script = Script(ids=[stop], finish={"type": "stop", "matched": stop})
    stage.server.answer = lambda request: script
    document = (await stage.get("/openapi.json")).json()
    draw, answered = bodies_of(document), set()
    for method, path, schema in operations_of(document):
        episode = await stage.open()
        key = episode["api_key"] if "/v1/" in path else stage.run.keys.runner_key
        key = stage.run.keys.admin_key if path in ADMIN else key
        body = data.draw(draw(schema), label=path) if schema is not None else None
        where = path.replace("{episode_id}", episode["episode_id"])
        headers = {"Authorization": f"Bearer {key}"}
        answer = await stage.http.request(method, where, json=body, headers=headers)
        said = (path, body, answer.status_code, answer.text)
        documented = document["paths"][path][method]["responses"]
        assert {str(answer.status_code), f"{answer.status_code // 100}XX"} & documented.keys(), said
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], said
            is_final = answer.status_code < 500
            assert answer.headers["x-should-retry"] == ("false" if is_final else "true"), said
        answered |= {path} if answer.status_code == 200 else set()
        if path not in OPEN:
            headers = {"Authorization": "Bearer nobody"}
            refused = await stage.http.request(method, where, json=body, headers=headers)
            assert refused.status_code == 401, said
    assert answered >= {*ADMIN, *OPEN, "/v1/models"}
