"""What somebody tries first with the SDKs."""

import anthropic
import openai
import pytest

SAID = [{"role": "user", "content": "hi"}]


def anthropic_client(stage, base_url: str, key: str, **options) -> anthropic.AsyncAnthropic:
    """Anthropic's client, closed with the stage."""
    client = anthropic.AsyncAnthropic(base_url=base_url, api_key=key, **options)
    stage.stack.push_async_callback(client.close)
    return client


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_models_are_listed_and_found_by_both_sdks(make_stage, sdk: str) -> None:
    """One list for both, names with slashes too; what is not served is their own 404."""
    judge = {"base_url": "http://127.0.0.1:1"}
    stage = await make_stage(model={"name": "org/policy"}, router={"upstreams": {"judge": judge}})
    episode = await stage.open()
    library = {"openai": openai, "anthropic": anthropic}[sdk]
    client = (
        await stage.client(episode)
        if sdk == "openai"
        else anthropic_client(stage, episode["base_url"], episode["api_key"])
    )
    assert [model.id async for model in client.models.list()] == ["org/policy", "judge"]
    for name in ("org/policy", "org/policy@0", "judge"):
        assert (await client.models.retrieve(name)).id == name
    with pytest.raises(library.NotFoundError, match="served: 'org/policy'"):
        await client.models.retrieve("org")


async def test_a_model_is_shown_to_its_episode_only(stage) -> None:
    """Finding one takes the same key as asking it."""
    for path in ("/v1/models", "/v1/models/policy", "/v1/v1/models/policy"):
        answer = await stage.get(path, key="sk-other")
        assert answer.status_code == 401
        assert answer.headers["x-should-retry"] == "false"
        assert (await stage.post(path, {}, key="sk-other")).status_code == 405


async def test_a_client_whose_key_is_fixed_has_its_episodes_in_the_path(stage) -> None:
    """The path alone says whose turn it is, in every dialect; nothing short of the key opens it."""
    one, other = await stage.open(), await stage.open()
    stage.server.answer = lambda request: stage.script("fine")
    url = f"{stage.url}/episodes/{one['api_key']}/v1"
    fixed = openai.AsyncOpenAI(base_url=url, api_key="EMPTY")
    stage.stack.push_async_callback(fixed.close)
    await fixed.chat.completions.create(model="policy", messages=SAID)
    await fixed.responses.create(model="policy", input="hi")
    await fixed.models.retrieve("policy")
    own = anthropic_client(stage, url.removesuffix("/v1"), "sk-ant-fixed")
    await own.messages.create(model="policy", messages=SAID, max_tokens=5)
    assert len(stage.turns(one)) == 3
    body = {"model": "policy", "messages": SAID}
    for episode_id, key, status in (
        (one["api_key"], one["api_key"], 200),
        (one["api_key"], other["api_key"], 403),
        (one["api_key"][:-1] + "x", "EMPTY", 401),
        (one["episode_id"], "EMPTY", 401),
        (one["api_key"], "ol-ep-x-0", 401),
    ):
        path = f"/episodes/{episode_id}/v1/chat/completions"
        assert (await stage.post(path, body, key)).status_code == status
    assert len(stage.turns(one)) == 4
    assert not stage.turns(other)
    # What is the runner's stays the runner's.
    path = f"/episodes/{one['api_key']}"
    assert (await stage.get(path, key="EMPTY")).status_code == 401
