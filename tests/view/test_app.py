"""The page over HTTP: only with its key, read-only, and no foreign script may run."""

import re
import shutil
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from outloop.buffer.errors import SettingsError
from outloop.buffer.trajectories.trained import write_trained
from outloop.view.app import create_app
from outloop.view.archive import RunFolder
from outloop.view.lanes import mean_number
from outloop.view.server import demo_folder, find_runs

KEY = "k" * 20
WITH_KEY = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def client(run_folder: Path) -> TestClient:
    """Of a page that shows the recorded run."""
    return TestClient(create_app(find_runs([run_folder]), KEY), follow_redirects=False)


def get(client: TestClient, path: str, **query: Any) -> Any:
    """What a route answers to who has the key."""
    answer = client.get(f"/api/runs{path}", params=query, headers=WITH_KEY)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(client: TestClient, **query: Any) -> list[str]:
    """Ids of the listed episodes."""
    return [row["episode_id"] for row in get(client, "/shown/episodes", **query)["episodes"]]


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/runs", "/nothing"])
def test_nothing_is_served_without_the_key(client: TestClient, path: str) -> None:
    """Neither without one nor with another; and nothing can be written with it."""
    client.cookies.clear()
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"Authorization": "Bearer other"}).status_code == 401
    assert client.get(f"{path}?key=other").status_code == 401
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, path, headers=WITH_KEY).status_code == 405


def test_the_link_leaves_the_key_as_a_cookie(client: TestClient) -> None:
    """It leaves the address bar, scripts cannot read it, and no other site can send it."""
    answer = client.get(f"/?key={KEY}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    assert client.get("/").status_code == 200
    client.cookies.clear()


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/runs", "/api/runs/none/overview", "/x"])
def test_every_answer_forbids_foreign_scripts(client: TestClient, path: str) -> None:
    """Also refusals: scripts, styles and requests of this origin alone, and no inline ones."""
    for headers in (WITH_KEY, {}):
        answer = client.get(path, headers=headers)
        policy = dict(
            part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; ")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_no_script_of_ours_reads_text_as_markup() -> None:
    """Elements are made one by one, and nothing is loaded from elsewhere."""
    static = files("outloop.view").joinpath("static")
    for item in static.iterdir():
        text = item.read_text()
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function"
        assert not re.search(forbidden, text), item.name
        urls = set(re.findall(r"https?://[^\"' )]+", text)) - {"http://www.w3.org/2000/svg"}
        assert urls == set(), item.name


@pytest.mark.medium
def test_episodes_are_found_by_what_they_are(client: TestClient) -> None:
    """By text, reward, outcome, fate, task, version, length; sorted; in pages."""
    assert set(ids(client)) == {"good", "bad", "failed", "attack"}
    assert ids(client, text="QUESTION wrong") == []
    assert set(ids(client, text="QueStion")) == {"good", "bad", "failed"}
    assert ids(client, text="sandbox did not") == ["failed"]
    assert ids(client, text="100%") == []
    assert ids(client, max_reward=0.5) == ["bad"]
    assert ids(client, outcome="failed") == ["failed"]
    assert ids(client, fate="lost/environment") == ["failed"]
    assert ids(client, purpose="eval") == ["attack"]
    assert ids(client, task="sum", group="g1-2") == ["failed"]
    assert ids(client, min_version=4) == ["good"]
    assert set(ids(client, min_tokens=7, max_tokens=9)) == {"failed", "attack"}
    assert ids(client, sort="tokens")[0] == "failed"
    assert ids(client, sort="tokens", descending=False)[-1] == "failed"
    page = get(client, "/shown/episodes", limit=1, offset=1)
    assert page["total"] == 4
    assert len(page["episodes"]) == 1


def test_an_episode_is_shown_whole(client: TestClient) -> None:
    """Its turns with texts, its parts of the reward and its group; tokens with their columns."""
    one = get(client, "/shown/episodes/good")
    assert [turn["turn_id"] for turn in one["turns"]] == ["good.0", "good.1", "good.2"]
    assert one["num_branches"] == 2
    assert one["reward_components"]["exact"] == 1.0
    assert [other["episode_id"] for other in one["group"]] == ["good", "bad"]
    tokens = get(client, "/shown/episodes/good/tokens")
    second = tokens["turns"][1]
    assert second["version_spans"] == [3, 0, 1, 4, 1, 2]
    assert second["loss_spans"] == [0, 1]
    assert tokens["texts"][str(second["output_ids"][0])] == "4"
    assert [one["episode_id"] for one in get(client, "/shown/groups/g0-1")] == ["good", "bad"]


def test_a_task_is_compared_across_versions(client: TestClient) -> None:
    """Versions with their rewards, oldest first; each attempt parts from the version before it."""
    found = get(client, "/shown/task", task_id="sum")
    assert [(row["version"], row["number"]) for row in found["versions"]] == [(3, 2), (4, 1)]
    assert found["versions"][1]["mean_reward"] == 1.0
    assert found["shown"] == [3, 4]
    # Of the attempts of version 3, the failed one ended last: `wrong` nine times.
    assert [row["episode_id"] for row in found["attempts"]][2] == "good"
    bad, good = (
        next(row for row in found["attempts"] if row["episode_id"] == one)
        for one in ("bad", "good")
    )
    assert (bad["num_shared"], bad["differs"]) == (0, "5 wrong wrong <|im_end|>\n")
    assert good["differs"].startswith('<tool_call>{"name": "add"')
    assert "question" in found["prompt"]
    assert get(client, "/shown/task", task_id="sum", before="4")["shown"] == [3]
    assert client.get("/api/runs/shown/task?task_id=none", headers=WITH_KEY).status_code == 404


def test_the_overview_has_curves_fates_and_events(client: TestClient) -> None:
    """All of metrics.jsonl, and what became of episodes."""
    shown = get(client, "/shown/overview")
    assert len(shown["metrics"]) == 8
    assert shown["events"][0]["part"] == "router-0"
    assert {(row["fate"], row["reason"]): row["number"] for row in shown["fates"]} == {
        ("trained", ""): 2,
        ("lost", "environment"): 1,
        ("evaluated", ""): 1,
    }
    means = {row["name"]: row["mean"] for row in shown["components"] if row["version"] == 4}
    assert means["exact"] == 1.0
    assert shown["run"]["is_live"] is False


def test_what_is_not_there_is_one_sentence(client: TestClient) -> None:
    """Runs, episodes and groups; and no path leads out of the package or to the run's keys."""
    for path in ("/none/overview", "/shown/episodes/none", "/shown/groups/none"):
        answer = client.get(f"/api/runs{path}", headers=WITH_KEY)
        assert answer.status_code == 404
        assert "none" in answer.json()["error"]
    for path in ("/secrets.json", "/..%2fsecrets.json", "/static/app.js", "/api/runs/shown"):
        answer = client.get(path, headers=WITH_KEY)
        assert answer.status_code == 404
        assert "ol-admin" not in answer.text


def test_unknown_filters_and_folders_are_refused(client: TestClient, tmp_path: Path) -> None:
    """A filter that is not known is no filter; a folder without a run is named."""
    answer = client.get("/api/runs/shown/episodes?colour=red", headers=WITH_KEY)
    assert answer.status_code == 422
    with pytest.raises(SettingsError, match="holds no run"):
        find_runs([tmp_path])


@pytest.mark.medium
def test_the_demo_is_a_whole_run() -> None:
    """In the package: curves, and episodes of each fate with their tokens."""
    runs = find_runs([demo_folder()])
    client = TestClient(create_app(runs, KEY))
    (run,) = get(client, "")
    assert run["num_steps"] >= 20
    assert run["num_episodes"] >= 500
    (row,) = get(client, f"/{run['name']}/episodes", fate="trained", limit=1)["episodes"]
    tokens = get(client, f"/{run['name']}/episodes/{row['episode_id']}/tokens")
    assert any(one is not None for turn in tokens["turns"] for one in turn["advantages"])


def test_tokens_have_the_policy_s_own_logprobs(run_folder: Path, tmp_path: Path) -> None:
    """What the trainer wrote of an update, at the tokens that it trained; None elsewhere."""
    folder = tmp_path / "shown"
    shutil.copytree(run_folder, folder)
    prompt, output = 4, 4
    trained = np.array([False] * prompt + [True, True, True, False])
    logprobs = np.where(trained, -np.arange(prompt + output, dtype=np.float32), np.nan)
    write_trained(
        folder,
        4,
        episode_ids=["bad"],
        branches=[0],
        starts=[0, prompt + output],
        trained=trained,
        advantages=np.where(trained, 0.5, 0.0).astype(np.float32),
        policy_logprobs=logprobs.astype(np.float32),
    )
    (found,) = RunFolder(folder, "shown").tokens("bad")["turns"]
    assert found["policy_logprobs"] == [-4.0, -5.0, -6.0, None]
    assert found["advantages"] == [0.5, 0.5, 0.5, None]


@pytest.mark.medium
def test_lanes_say_who_waited_for_whom(client: TestClient) -> None:
    """Turns in flight, open and waiting episodes over time, and what each step was spent on."""
    found = get(client, "/shown/lanes")
    assert len(found["servers"]) == len(found["agents"]) == len(found["queue"]) == 240
    assert max(found["servers"]) > 0
    assert [step["step"] for step in found["steps"]] == list(range(1, 9))
    assert found["steps"][0]["wait_s"] == 1.0
    assert 0 < found["trainer_waited"] <= 1
    late = get(client, "/shown/lanes", last_s=2.5)
    assert late["end"] - late["begin"] == pytest.approx(2.5)
    assert [step["step"] for step in late["steps"]] == [6, 7, 8]


@pytest.mark.medium
@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 50)).map(lambda one: (one[0], one[0] + one[1])),
        max_size=30,
    )
)
def test_numbers_in_a_lane_are_means_over_their_time(intervals: list[tuple[float, float]]) -> None:
    """As by counting each interval's overlap with each piece of time."""
    edges = np.linspace(10.0, 90.0, 17)
    found = mean_number(np.array(intervals, np.float64).reshape(-1, 2), edges)
    wanted = [
        sum(max(0.0, min(end, high) - max(begin, low)) for begin, end in intervals) / (high - low)
        for low, high in pairwise(edges.tolist())
    ]
    assert found == pytest.approx(wanted, abs=1e-6)
