"""Pages of other origins, as a browser lets them use the router."""

import pytest

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
ORIGIN = "https://page.example"
PATHS = ["/v1/chat/completions", "/episodes", "/v1/models/policy"]


async def preflight(stage, path: str, origin: str = ORIGIN):
    """What a browser asks before it sends a page's request."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-retry-count",
    }
    return await stage.http.options(path, headers=headers)


@pytest.mark.parametrize("path", PATHS)
async def test_a_page_of_a_named_origin_may_use_the_router(make_stage, path: str) -> None:
    """Preflight and answer say so, streamed and refused answers too."""
    stage = await make_stage(router={"cors_origins": [ORIGIN]})
    stage.server.answer = lambda request: stage.script("fine")
    asked = await preflight(stage, path)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert "x-stainless-retry-count" in asked.headers["access-control-allow-headers"]
    key = (await stage.open())["api_key"]
    for body, status in ((BODY, 200), ({**BODY, "stream": True}, 200), ({}, 400)):
        answer = await stage.post("/v1/chat/completions", body, key, Origin=ORIGIN)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "x-should-retry" in answer.headers["access-control-expose-headers"]


async def test_pages_of_other_origins_may_not(make_stage) -> None:
    """Neither where others are named nor by default."""
    for router in ({"cors_origins": [ORIGIN]}, {}):
        stage = await make_stage(router=router)
        stage.server.answer = lambda request, stage=stage: stage.script("fine")
        asked = await preflight(stage, PATHS[0], "https://other.example")
        assert asked.status_code in (400, 405)
        assert "access-control-allow-origin" not in asked.headers
        key = (await stage.open())["api_key"]
        answer = await stage.post(PATHS[0], BODY, key, Origin="https://other.example")
        assert "access-control-allow-origin" not in answer.headers
