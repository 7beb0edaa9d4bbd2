"""The compose stack, from build to stop: trains ten steps, and every service is killed once.

    make compose-test           # needs docker with compose v2; PYTHON_IMAGE and REDIS_IMAGE apply

What it leaves: nothing. What it refuses: a service that does not come back, a step that is missing
or trained twice, a runner that reaches Redis or a key that is not its own, a process of root.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"outloop-test-{os.getpid()}"
NUM_STEPS = 10
KILLED = ("redis", "server", "router", "runner", "trainer")
BUILD_TIMEOUT_S = 1800
UP_TIMEOUT_S = 900
STEP_TIMEOUT_S = 900
POLL_S = 2.0


ENVIRONMENT = {
    **os.environ,
    "OUTLOOP_PROJECT": str(ROOT / "tests/docker/project"),
    "OUTLOOP_PORT": str(free_ports(1)[0]),
}


def compose(*arguments: str, timeout_s: float = 120.0, check: bool = True) -> str:
    """What `docker compose` prints to stdout."""
    command = ["docker", "compose", "-p", PROJECT, "-f", str(ROOT / "docker/compose.yaml")]
    answer = subprocess.run(
        [*command, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and answer.returncode != 0:
        sys.exit(f"docker compose {' '.join(arguments)}: {answer.stdout}{answer.stderr}")
    return answer.stdout


def inspect(service: str, field: str) -> str:
    """One field of a service's container, running or not."""
    container = compose("ps", "-a", "-q", service).strip()
    answer = subprocess.run(
        ["docker", "inspect", "-f", "{{" + field + "}}", container],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return answer.stdout.strip()


def inside(service: str, script: str, *, check: bool = True) -> str:
    """What a shell script prints in a running container."""
    return compose("exec", "-T", service, "sh", "-c", script, check=check)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def wait_for(what: str, is_true: Callable[[], bool], timeout_s: float) -> None:
    """Until it is true; a service that has given up, or the deadline, ends the test."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            fail(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(POLL_S)


def fail(text: str) -> None:
    """Show every log, and end."""
    print(compose("ps", "-a"), compose("logs", "--no-color", "--tail", "60"))
    sys.exit(f"compose-test: {text}")


def metrics() -> list[dict]:
    """Rows of metrics.jsonl that are steps."""
    text = inside("router", "cat runs/stack/metrics.jsonl 2>/dev/null || true", check=False)
    rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return [row for row in rows if "train/loss" in row]


def has_finished() -> bool:
    return inspect("trainer", ".State.Status") == "exited" and (
        inspect("trainer", ".State.ExitCode") == "0"
    )


def kill_inside(service: str) -> None:
    """SIGKILL to all of a service's processes but its init: a crash, not a stop by the engine."""
    before = int(inspect(service, ".RestartCount"))
    steps = len(metrics()) if service != "router" else 0
    inside(service, "kill -KILL -1", check=False)
    say(f"killed {service} after step {steps}")

    def is_back() -> bool:
        is_running = inspect(service, ".State.Status") == "running"
        return int(inspect(service, ".RestartCount")) > before and (is_running or has_finished())

    wait_for(f"{service} started again", is_back, UP_TIMEOUT_S)
    say(f"{service} is back")


def check_boundaries() -> None:
    """What the stack promises about users, networks and secrets, asked from inside."""
    for service in KILLED:
        user = inside(service, "id -u").strip()
        assert user == "10001", f"{service} runs as uid {user}"
        assert inspect(service, ".HostConfig.ReadonlyRootfs") == "true", service
    looked_up = inside("runner", "getent hosts redis server trainer || true")
    assert looked_up == "", f"the runner reaches {looked_up}"
    assert "sgl-router" in inside("runner", "getent hosts sgl-router")
    assert inside("runner", "cat /keys/*/*").startswith("ol-runner-")
    assert inside("runner", "find /keys/run /keys/redis -type f") == ""
    password = inside("redis", "cat /keys/redis/password")
    run_folder = inside("router", "cat runs/stack/*.json")
    assert len(password) > 30, "no password was made"
    assert password not in run_folder, "the password is in the run folder"
    refused = inside("redis", "(redis-cli ping || valkey-cli ping) 2>&1", check=False)
    assert "NOAUTH" in refused, refused
    say("users, networks and secrets are as promised")


def check_training() -> None:
    """Every step once in the lineage that survived, in order, and a policy that was written."""
    rows = metrics_at_the_end()
    last: dict[int, dict] = {row["step"]: row for row in rows}
    assert sorted(last) == list(range(1, NUM_STEPS + 1)), sorted(last)
    versions = [last[step]["train/policy_version"] for step in sorted(last)]
    assert versions == sorted(set(versions)), versions
    assert all(last[step]["train/episodes"] == 8 for step in last)
    assert any(last[step]["train/turns_per_episode"] == 1 for step in last)
    say(f"steps 1 to {NUM_STEPS}, policy versions {versions}")


def metrics_at_the_end() -> list[dict]:
    text = compose("run", "--rm", "-T", "--no-deps", "--entrypoint", "cat", "trainer", METRICS)
    return [row for row in map(json.loads, text.splitlines()) if "train/loss" in row]


METRICS = "runs/stack/metrics.jsonl"


def play() -> None:
    started = time.monotonic()
    say("building")
    compose("build", timeout_s=BUILD_TIMEOUT_S)
    say(f"built in {time.monotonic() - started:.0f} s; starting")
    started = time.monotonic()
    compose("up", "-d", timeout_s=UP_TIMEOUT_S)
    say(f"up in {time.monotonic() - started:.0f} s, in the order of its health checks")
    check_boundaries()
    for service in KILLED:
        before = len(metrics())
        wait_for(
            f"a step after step row {before}", lambda n=before: len(metrics()) > n, STEP_TIMEOUT_S
        )
        kill_inside(service)
    wait_for("the last step", has_finished, STEP_TIMEOUT_S * 3)
    wait_for(
        "the runner's end", lambda: inspect("runner", ".State.ExitCode") == "0", STEP_TIMEOUT_S
    )
    check_training()
    compose("up", "-d", timeout_s=UP_TIMEOUT_S)
    say("a second `up` of the finished stack changes nothing")
    started = time.monotonic()
    compose("stop", timeout_s=200)
    say(f"stopped in {time.monotonic() - started:.0f} s")
    assert re.fullmatch(r"0|143", inspect("router", ".State.ExitCode"))


def main() -> None:
    try:
        play()
    finally:
        compose("down", "-v", "--remove-orphans", timeout_s=300, check=False)
    say("compose-test: passed")


if __name__ == "__main__":
    main()
