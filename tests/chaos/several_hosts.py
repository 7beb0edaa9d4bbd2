"""`make test-hosts`: a run over seven hosts, parts started one by one, and hosts that go away.

Hosts are network namespaces (hosts), each with a service manager's habit: what ends there is
started again. Redis, router, two servers, two trainer nodes that meet by torchrun's rendezvous, and
a runner each have their own. Hosts are lost (everything on them killed, their link cut) and come
back, are cut off and joined again, or have a link of 1 Mbit/s. Exit code 0 if two more steps are
made after each within --patience-s, and the audit is clean. Needs root.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
from hosts import Host, hosts, why_not
from reliability_page import record_hosts
from stack import audit_of, steps_of, write_config
from tiny import make_model

NAMES = ("redis", "router", "server0", "server1", "node0", "node1", "runner")
FAULTS = (
    ("lost", "server0"),
    ("lost", "runner"),
    ("lost", "router"),
    ("lost", "node1"),
    ("cut off", "server1"),
    ("cut off", "runner"),
    ("cut off", "redis"),
    ("cut off", "node1"),
    ("slow link", "server1"),
    ("slow link", "node1"),
    ("slow link", "redis"),
)
REDIS_PORT, ROUTER_PORT, SERVER_PORT, RENDEZVOUS_PORT = 6379, 8000, 9000, 29500
HANG_S = 20
CHANGES: dict[str, dict[str, Any]] = {
    "router": {"host": "0.0.0.0", "port": ROUTER_PORT},
    "server": {"host": "0.0.0.0", "num_servers": 2},
    "trainer": {"num_ranks": 2, "hang_timeout_s": HANG_S},
    "buffer": {"max_staleness": 1},
}
_POLL_S = 0.05


class Fleet:
    """The run, and what is started on each host."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        made: Mapping[str, Host],
        changes: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`made`: the host of each part, by the part's name."""
        self.folder, self.hosts = folder, made
        self.run_dir = folder / "runs/stack"
        self.down: set[str] = set()
        self.num_starts = 0
        (folder / "model").symlink_to(model)
        write_config(folder, (made["redis"].address, REDIS_PORT), {}, changes)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start("redis")
        deadline = time.monotonic() + 60
        words = self._outloop("init", "run.toml")
        while subprocess.run(words, cwd=folder, check=False, capture_output=True).returncode:
            assert time.monotonic() < deadline, "Redis does not come up"

    @staticmethod
    def _outloop(*words: str) -> list[str]:
        return [sys.executable, "-m", "outloop.cli", *words]

    def _command(self, name: str) -> list[str]:
        run, address = ("--run", str(self.run_dir)), self.hosts[name].address
        if name == "redis":
            password = ("--password-file", str(self.folder / "password"))
            where = ("--host", address, "--port", str(REDIS_PORT))
            return self._outloop("redis", "--dir", str(self.folder / "redis"), *where, *password)
        if name == "router":
            return self._outloop("router", *run, "--advertise", address)
        if name.startswith("server"):
            where = ("--index", name[-1], "--port", str(SERVER_PORT), "--advertise", address)
            return self._outloop("server", *run, *where)
        if name.startswith("runner"):
            return self._outloop("runner", *run)
        if name == "trainer":
            return self._outloop("trainer", *run)
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
            *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--max-restarts", "100"),
            *("--rdzv-endpoint", f"{self.hosts['node0'].address}:{RENDEZVOUS_PORT}"),
            *("--rdzv-id", "stack", "--local-addr", address),
            # It would look for the address under the machine's name, which all hosts share.
            *("--rdzv-conf", f"is_host={int(name == 'node0')}"),
            *("-m", "--", "outloop.cli", "trainer", *run),
        ]

    def _start(self, name: str) -> None:
        self.num_starts += 1
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.hosts[name].command(self._command(name)),
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def tend(self) -> None:
        """Start again what ended on hosts that are up."""
        for name in self.hosts:
            process = self.processes.get(name)
            if name not in self.down and (process is None or process.poll() is not None):
                self._start(name)

    def wait(self, seconds: float, num_steps: int) -> bool:
        """Until so many steps are recorded from now on; False if they are not within `seconds`."""
        began_at, deadline = time.time(), time.monotonic() + seconds
        while len([1 for _, at in steps_of(self.run_dir) if at > began_at]) < num_steps:
            if time.monotonic() > deadline:
                return False
            self.tend()
            time.sleep(_POLL_S)
        return True

    def kill(self, name: str) -> None:
        """Everything on a host."""
        process = self.processes[name]
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in below:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        process.wait()

    def play(self, kind: str, name: str, hold_s: float, patience_s: float) -> dict[str, Any]:
        """One fault; its figures."""
        host, began_at = self.hosts[name], time.time()
        if kind == "slow link":
            host.slow()
        else:
            host.cut()
        if kind == "lost":
            self.down.add(name)
            self.kill(name)
        self.wait(hold_s, sys.maxsize)
        if kind == "slow link":
            host.hurry()
        else:
            host.join()
        self.down.discard(name)
        ended_at = time.time()
        is_back = self.wait(patience_s, 2)
        meanwhile = [1 for _, at in steps_of(self.run_dir) if began_at < at < ended_at]
        figures = {"hold_s": hold_s, "steps_meanwhile": len(meanwhile)}
        if not is_back:
            return {**figures, "failed": f"no two steps within {patience_s:.0f} s"}
        return {**figures, "back_s": round(time.time() - ended_at, 1)}

    def end_training(self) -> None:
        """SIGTERM to both trainer nodes, which write a checkpoint; nothing is started again."""
        nodes = [self.processes[name] for name in ("node0", "node1")]
        for process in nodes:
            process.terminate()
        for process in nodes:
            process.wait(120)

    def stop(self) -> None:
        """End what is left, each by its id."""
        for name in self.processes:
            self.kill(name)

    def logs(self) -> str:
        """The end of each."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1200:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


def main() -> int:
    """Play the faults; a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hold-s", type=float, default=10.0)
    parser.add_argument("--patience-s", type=float, default=120.0)
    parser.add_argument("--start-s", type=float, default=180.0)
    parser.add_argument("--only", default="", help="such as: lost,cut off/node1")
    words = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    num_failed = 0
    with ExitStack() as context:
        model = Path(context.enter_context(tempfile.TemporaryDirectory()))
        make_model(model)
        folder = Path(context.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        fleet = Fleet(folder, model, context.enter_context(hosts(NAMES)), CHANGES)
        context.callback(fleet.stop)
        if not fleet.wait(words.start_s, 2):
            print(f"the run did not start\n{fleet.logs()}")
            return 1
        for kind, name in FAULTS:
            if words.only and not {kind, f"{kind}/{name}"} & set(words.only.split(",")):
                continue
            figures = fleet.play(kind, name, words.hold_s, words.patience_s)
            record_hosts(f"{name}/{kind}", figures)
            print(f"{name} {kind}: {figures}", flush=True)
            if "failed" in figures:
                num_failed += 1
                print(fleet.logs(), flush=True)
                break
        try:
            fleet.end_training()
            print(f"{audit_of(fleet.run_dir)}, {fleet.num_starts} starts")
        except (AssertionError, subprocess.TimeoutExpired) as error:
            num_failed += 1
            print(f"FAILED: {error}\n{fleet.logs()}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
