"""Addresses of episodes behind a proxy."""

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import build_settings

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


async def test_episodes_get_addresses_under_the_public_url(make_stage) -> None:
    stage = await make_stage(router={"public_url": "https://rl.example.org/run-7"})
    stage.server.answer = lambda request: stage.script("fine")
    opened = await stage.open()
    assert opened["base_url"] == "https://rl.example.org/run-7/v1"
    # The proxy takes its prefix away.
    answer = await stage.post("/v1/chat/completions", BODY, opened["api_key"])
    assert answer.status_code == 200


async def test_without_one_they_get_the_address_that_was_asked(make_stage) -> None:
    stage = await make_stage()
    opened = await stage.open()
    assert opened["base_url"] == f"{str(stage.http.base_url).rstrip('/')}/v1"


@pytest.mark.parametrize("url", ["rl.example.org", "https://x/", "ftp://x", "https://x/?a=1"])
def test_what_is_no_base_of_addresses_is_refused(url: str) -> None:
    tree = {"model": {"path": "model"}, "router": {"public_url": url}}
    with pytest.raises(SettingsError, match=r"router\.public_url"):
        build_settings(tree, source="a test")
