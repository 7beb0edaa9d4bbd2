"""The OpenAPI document against the router, under schemathesis: bodies that it allows, bodies that
it does not, and answers as it says."""

import asyncio
import copy
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi_checks

import outloop
from fakes.fake_server import Script

ADMIN = {"/servers", "/pause", "/resume", "/policy_version"}
OPEN = {"/health", "/ready", "/metrics"}
CONFORMS = [
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]
ALLOWED, NOT_ALLOWED = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
NUM_DRAWS = 3
MESSAGES = [{"role": "user", "content": "said"}]
LIKELY = {
    "/tasks/claim": {"key": "k", "count": 1},
    "/v1/chat/completions": {"model": "policy", "messages": MESSAGES},
    "/v1/completions": {"model": "policy", "prompt": "said"},
    "/v1/responses": {"model": "policy", "input": "said"},
    "/v1/messages": {"model": "policy", "messages": MESSAGES, "max_tokens": 8},
    "/v1/messages/count_tokens": {"model": "policy", "messages": MESSAGES},
}
"""What no schema says: without these words nearly every body would be refused at once."""


class Documented:
    """A router's document, and cases of it sent to that router."""

    def __init__(self, stage, document: dict, episode: dict) -> None:
        stop = stage.renderer.stop_ids[0]
        script = Script(ids=[stop], finish={"type": "stop", "matched": stop})
        stage.server.answer = lambda request: script
        self.url = stage.url
        self.document = document
        self.schema = schemathesis.openapi.from_dict(copy.deepcopy(document))
        self.operations = [result.ok() for result in self.schema.get_all_operations()]
        self._episode = episode
        self._keys = stage.run.keys

    def key(self, path: str) -> str:
        """The key that opens a route."""
        if path in ADMIN:
            return self._keys.admin_key
        return self._episode["api_key"] if "/v1/" in path else self._keys.runner_key

    def send(self, case: Any, key: str | None = None) -> Any:
        """The answer to a case, which is about the test's episode."""
        names = {"model_id": "policy", **(case.path_parameters or {})}
        names["episode_id"] = self._episode["episode_id"]
        case.path_parameters = {n: v for n, v in names.items() if f"{{{n}}}" in case.path}
        headers = {"Authorization": f"Bearer {key or self.key(case.operation.path)}"}
        return case.call(base_url=self.url, headers=headers)

    def hold(self, operation: Any, mode: GenerationMode, num_draws: int) -> set[int]:
        """Send what is sampled and hold the answers to the document; returns their statuses."""
        bare = operation.path.removeprefix("/episodes/{episode_id}")
        likely = LIKELY.get(bare if "/v1/" in bare else operation.path)
        statuses = set()

        @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
        @settings(
            max_examples=num_draws,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        def answers(case: Any, data: st.DataObject) -> None:
            if likely is not None and mode is ALLOWED:
                names = st.sampled_from(sorted(case.body))
                kept = data.draw(st.sets(names, max_size=3)) if case.body else ()
                case.body = {**{name: case.body[name] for name in kept}, **likely}
            answer = self.send(case)
            case.validate_response(answer, checks=[checks.not_a_server_error, *CONFORMS])
            statuses.add(answer.status_code)

        answers()
        if likely is not None and mode is ALLOWED:
            case = operation.Case(body=likely)
            case.validate_response(answer := self.send(case), checks=CONFORMS)
            statuses.add(answer.status_code)
        return statuses


@pytest.fixture
async def documented(stage) -> Documented:
    """The document of a router with default settings."""
    document = (await stage.get("/openapi.json")).json()
    return Documented(stage, document, await stage.open())


@pytest.mark.medium
async def test_every_route_answers_as_the_document_says(documented) -> None:
    """Whatever is sent, allowed or not: a documented status, type, headers and body, and no failure
    of ours; each route that takes no body, and each dialect, is also seen to serve."""

    def hold_all() -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        # What is closed answers all else with one sentence.
        for operation in sorted(documented.operations, key=lambda one: "/close" in one.path):
            # The same routes by path differ in nothing but the path.
            is_same = operation.path.startswith("/episodes/{episode_id}/v1/")
            num_draws = 1 if is_same or operation.path in OPEN else NUM_DRAWS
            found[operation.path] = documented.hold(operation, ALLOWED, num_draws)
            if operation.body:
                found[operation.path] |= documented.hold(operation, NOT_ALLOWED, num_draws)
        return found

    found = await asyncio.to_thread(hold_all)
    assert found.keys() == documented.document["paths"].keys()
    served = {path for path, statuses in found.items() if 200 in statuses}
    assert served >= {*ADMIN, *OPEN, *LIKELY, "/v1/models", "/episodes/{episode_id}"}


@pytest.mark.medium
async def test_an_unknown_key_opens_no_route(documented) -> None:
    """401 as documented, whatever the body."""

    def ask_all() -> None:
        for operation in documented.operations:
            if operation.path not in OPEN:
                case = operation.Case(body={}) if operation.body else operation.Case()
                answer = documented.send(case, key="nobody")
                case.validate_response(answer, checks=CONFORMS)
                assert answer.status_code == 401, operation.path

    await asyncio.to_thread(ask_all)


@pytest.mark.medium
async def test_what_fails_is_answered_as_the_document_says(make_stage) -> None:
    """Without Redis every route that needs it is a 503 as documented."""
    stage = await make_stage(router={"buffer_timeout_s": 0})
    document = (await stage.get("/openapi.json")).json()
    documented = Documented(stage, document, await stage.open())
    stage.buffer.twin.is_away = True

    def ask_all() -> set[str]:
        failed = set()
        for operation in documented.operations:
            body = LIKELY.get(operation.path)
            if body is not None and operation.path != "/v1/messages/count_tokens":
                case = operation.Case(body=body)
                answer = documented.send(case)
                case.validate_response(answer, checks=CONFORMS)
                assert answer.status_code == 503, operation.path
                failed.add(operation.path)
        return failed

    assert len(await asyncio.to_thread(ask_all)) == len(LIKELY) - 1
    stage.buffer.twin.is_away = False


@pytest.mark.medium
@pytest.mark.parametrize("wrong", ["status", "type", "header", "body"])
async def test_a_document_that_is_wrong_is_found_out(stage, documented, wrong: str) -> None:
    """The checks do check: a document that promises something else fails."""
    document = copy.deepcopy(documented.document)
    responses = document["paths"]["/v1/models"]["get"]["responses"]
    if wrong == "status":
        responses["201"] = responses.pop("200")
    elif wrong == "type":
        responses["200"]["content"] = {"text/csv": {}}
    elif wrong == "header":
        responses["200"]["headers"] = {"x-promised": {"required": True, "schema": {}}}
    else:
        responses["200"]["content"]["application/json"]["schema"]["required"] += ["promised"]
    other = Documented(stage, document, await stage.open())
    (operation,) = (one for one in other.operations if one.path == "/v1/models")
    with pytest.raises(FailureGroup):
        await asyncio.to_thread(other.hold, operation, ALLOWED, 1)


async def test_the_document_names_this_release(stage) -> None:
    """Whoever reads it knows what answers."""
    document = (await stage.http.get("/openapi.json")).json()
    assert document["info"]["version"] == outloop.__version__


@pytest.mark.parametrize("path", ["/pause/", "/status/", "/metrics/", "/docs/", "/nothing/", "//x"])
async def test_no_path_leads_to_where_the_host_header_says(stage, path) -> None:
    """A key would go there with the request."""
    for method in ("GET", "POST"):
        answer = await stage.http.request(method, path, headers={"host": "elsewhere.example"})
        assert not answer.is_redirect
        assert "location" not in answer.headers
