"""What the router writes to its log."""

import json
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

BODY = {"model": "policy", "messages": [{"role": "user", "content": "a private question"}]}


async def test_every_turn_is_logged_with_its_ids_and_no_secret(make_stage) -> None:
    """Recorded, failed and refused turns name their episode; no key and no text is in the log."""
    stage = await make_stage(router={"buffer_timeout_s": 0})
    stage.says("a private answer", "another private answer")
    episode = await stage.open()
    key = episode["api_key"]
    with capture_logs() as logs:
        headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        assert (await stage.post("/v1/chat/completions", BODY, key, **headers)).status_code == 200
        stage.buffer.twin.is_away = True
        assert (await stage.post("/v1/chat/completions", BODY, key)).status_code == 503
        stage.buffer.twin.is_away = False
        close = {"outcome": "completed", "key": "c"}
        path = f"/episodes/{episode['episode_id']}/close"
        assert (await stage.post(path, close)).status_code == 200
        assert (await stage.post("/v1/chat/completions", BODY, key)).status_code == 404
    (turn,) = stage.turns(episode)
    logs = [entry for entry in logs if entry["event"].startswith("turn_")]
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [
        ("turn_recorded", "debug"),
        ("turn_failed", "info"),
        ("turn_refused", "info"),
    ]
    assert {entry["episode_id"] for entry in logs} == {episode["episode_id"]}
    recorded, failed, refused = logs
    assert recorded["turn_id"] == turn.turn_id
    assert recorded["num_output_ids"] == len(turn.output_ids)
    assert (recorded["server_id"], recorded["policy_versions"]) == ("server-0", [0])
    assert (recorded["finish_reason"], recorded["branch_cause"]) == ("stop", "root")
    assert recorded["traceparent"] == headers["traceparent"]
    assert (len(failed["turn_ids"]), failed["code"]) == (1, "buffer_unavailable")
    assert refused["code"] == "episode_closed"
    keys = stage.run.keys
    for secret in (key.rpartition("-")[2], keys.runner_key, keys.admin_key, "private"):
        assert secret not in repr(logs)


@pytest.mark.parametrize(("log_turns", "level"), [(False, "debug"), (True, "info")])
async def test_turns_are_logged_at_the_level_of_the_run(
    make_stage, log_turns: bool, level: str
) -> None:
    """`router.log_turns` lifts the line of each turn, and nothing else, to info."""
    stage = await make_stage(router={"log_turns": log_turns})
    stage.says("said")
    episode = await stage.open()
    with capture_logs() as logs:
        await stage.post("/v1/chat/completions", BODY, episode["api_key"])
    logged = [(x["log_level"], x["turn_id"]) for x in logs if x["event"] == "turn_recorded"]
    assert logged == [(level, stage.turns(episode)[0].turn_id)]


@pytest.mark.medium
def test_a_process_writes_one_json_object_per_line_above_its_level() -> None:
    """`telemetry.log_level` decides; each line has its part, level and time."""
    program = (
        "import structlog; from outloop.buffer.telemetry import configure_logging\n"
        "configure_logging('router', 'info'); log = structlog.get_logger()\n"
        "log.debug('turn_recorded', turn_id='a'); log.info('turn_refused', episode_id='e')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    (line,) = done.stderr.splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp")
    assert entry == {
        "event": "turn_refused",
        "episode_id": "e",
        "level": "info",
        "part": "router",
    }


async def test_a_key_in_a_path_is_not_logged(stage) -> None:
    """A failure of ours names the route, and not the episode."""
    episode = await stage.open()
    stage.writer.load_error = LookupError("ours")
    with capture_logs() as logs:
        path = f"/episodes/{episode['api_key']}/v1/chat/completions"
        assert (await stage.post(path, BODY, "EMPTY")).status_code == 500
    (failed,) = (entry for entry in logs if entry["event"] == "request_failed")
    assert failed["path"] == "/episodes/*/v1/chat/completions"
    assert episode["api_key"] not in repr(logs)
