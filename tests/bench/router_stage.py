"""The programs of `make bench-router`, each a process of its own.

Owns: a model folder, Redis, the router of a run, the mock, the relay and the two other projects'
routers. Does not own: load, figures. Invariant: everything started here is ended here, by its id.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from outloop.buffer.reader import BufferReader
from outloop.buffer.records import ServerEntry
from outloop.buffer.redis.embedded import EmbeddedRedis
from outloop.buffer.redis.run_meta import init_run
from outloop.buffer.run import Run, create_run
from outloop.buffer.settings import build_settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
BENCH_BIN = ROOT / ".venv-bench" / "bin"
MOCK = Path(__file__).with_name("router_mock.py")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
VOCAB_SIZE = 32_000
CORPUS_BYTES = 12 * 2**20
START_TIMEOUT_S = 120.0


def make_model(folder: Path) -> None:
    """A byte-level BPE of 32,000 tokens trained on the standard library, with Qwen3's markers."""
    if (folder / "tokenizer.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")):
        text = path.read_text(errors="ignore")
        texts.append(text)
        size += len(text)
        if size > CORPUS_BYTES:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer.save(str(folder / "tokenizer.json"))


@dataclass
class Program:
    """A running program and the port it listens on."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all threads of it and its children so far, to the nanosecond."""
        own = psutil.Process(self.process.pid)
        pids = [own.pid, *(child.pid for child in own.children(recursive=True))]
        tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    @property
    def rss_bytes(self) -> int:
        """Memory that it holds."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def stop(self) -> None:
        """End it and its children."""
        own = psutil.Process(self.process.pid)
        for child in own.children(recursive=True):
            child.kill()
        self.process.kill()
        self.process.wait()


def start(command: list[Any], port: int, log: Path, health: str = "/health") -> Program:
    """Start a program and wait until it answers.

    Raises:
        RuntimeError: it ended, or did not answer in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "DISABLE_ADMIN_UI": "True"}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            list(map(str, command)), stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{health}", timeout=2):
                return Program(process, port)
        except OSError:
            pass
        time.sleep(0.2)
    Program(process, port).stop()
    raise RuntimeError(f"{command[0]} does not answer at port={port}; see {log}")


def _stopped_by(started: ExitStack, program: Program) -> Program:
    started.callback(program.stop)
    return program


class Stage:
    """All programs of the bench; `close` ends them."""

    def __init__(self, folder: Path, model: Path, *, group_size: int, num_groups: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._model = folder, model
        make_model(model)
        with ExitStack() as started:
            self.mock = _stopped_by(started, self._python("serve"))
            self.relay = _stopped_by(started, self._python("relay", self.mock.port))
            self.sglang_router = _stopped_by(started, self._sglang_router())
            self.litellm = _stopped_by(started, self._litellm())
            self._start_run(started, group_size, num_groups)
            # Programs that have started are ended if a later one does not start.
            self._started = started.pop_all()

    def _start_run(self, started: ExitStack, group_size: int, num_groups: int) -> None:
        self.redis = EmbeddedRedis(self.folder / "redis", fsync="everysec", max_memory_mb=4096)
        self.redis_url = self.redis.start()
        started.callback(self.redis.stop)
        self.run = self._run(group_size, num_groups)
        self.reader = BufferReader.connect(self.run)
        started.callback(self.reader.close)
        self.reader.announce_version(0, None)
        url = f"http://127.0.0.1:{self.mock.port}"
        self.reader.registry.register_server(
            ServerEntry(
                server_id="mock", url=url, kind="torch", policy_version=0, is_quarantined=False
            )
        )
        self.reader.registry.set_server_version("mock", 0, quarantined=False)
        self.reader.acknowledge_version(0)
        self.router = _stopped_by(started, self.start_router())

    def start_router(self) -> Program:
        """One more router process of the run."""
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "outloop.cli", "router", "--run", self.run.dir]
        return start([*command, "--port", port], port, self.folder / f"router-{port}.log")

    def close(self) -> None:
        """End everything."""
        self._started.close()

    def _run(self, group_size: int, num_groups: int) -> Run:
        settings = build_settings(
            {
                "run": {"name": "router", "dir": str(self.folder)},
                "model": {
                    "path": str(self._model),
                    "renderer": "qwen3",
                    "renderer_options": {"enable_thinking": False},
                    "max_context_tokens": 200_000,
                },
                "sampling": {"max_new_tokens": 40_000},
                "env": {"episode_deadline_s": 7200},
                "router": {"max_turns_per_episode": 256},
                "buffer": {
                    "group_size": group_size,
                    "max_staleness": 0,
                    "group_deadline_s": 7200,
                    "max_memory_mb": 4096,
                },
                "trainer": {"groups_per_step": num_groups},
            },
            source="bench",
        )
        run = create_run(settings, self.folder / f"run-{secrets.token_hex(3)}", self.redis_url)
        init_run(run)
        return run

    def _python(self, kind: str, *words: Any) -> Program:
        (port,) = free_ports(1)
        return start([sys.executable, MOCK, kind, port, *words], port, self.folder / f"{kind}.log")

    def _sglang_router(self) -> Program:
        port, metrics = free_ports(2)
        command = [BENCH_BIN / "python", "-m", "sglang_router.launch_router"]
        command += ["--host", "127.0.0.1", "--port", port, "--policy", "round_robin"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics]
        command += ["--worker-urls", f"http://127.0.0.1:{self.mock.port}", "--log-level", "warn"]
        return start(command, port, self.folder / "sglang-router.log", "/readiness")

    def _litellm(self) -> Program:
        (port,) = free_ports(1)
        config = self.folder / "litellm.yaml"
        key = f"sk-{secrets.token_hex(24)}"
        config.write_text(
            "model_list:\n"
            "  - model_name: policy\n"
            "    litellm_params:\n"
            "      model: openai/policy\n"
            f"      api_base: http://127.0.0.1:{self.mock.port}/v1\n"
            "      api_key: none\n"
            f"general_settings:\n  master_key: {key}\n"
        )
        self.litellm_key = key
        command = [BENCH_BIN / "litellm", "--config", config, "--host", "127.0.0.1"]
        return start(
            [*command, "--port", port], port, self.folder / "litellm.log", "/health/liveliness"
        )
