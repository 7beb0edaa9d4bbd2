"""The command line and environment of one SGLang server of a run.

The raw table never overrides a setting of ours, and nothing that decides what is sampled is left to
SGLang's defaults. The installed SGLang itself judges the arguments (entrypoint.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from outloop.buffer.errors import DeadlineExceeded, SettingsError
from outloop.buffer.routed_experts import replayed_shape
from outloop.buffer.settings import Settings
from outloop.engine.serve.sglang.cpu_environment import find_python, shims_folder
from outloop.engine.serve.sglang.gpu_environment import gpu_environment

REFUSED_EXIT_CODE = 2
"""Exit code of entrypoint.py when SGLang does not know an argument."""
_CPU_KV_TOKENS = 65536
"""SGLang would take half of the memory for the cache of a model that is smaller than its cache."""
_CHECK_TIMEOUT_S = 180.0


def start_command(settings: Settings, *, port: int, identity: str) -> list[str]:
    """The command that becomes an SGLang server on `port`.

    `identity` is its weight_version until a publish names another: the server that answers with it
    is this one, and not another one that was quicker to take the port.

    Raises:
        SettingsError: there is no environment that holds SGLang.
    """
    return _command(settings, json.dumps(argument_table(settings, port=port, identity=identity)))


def check_arguments(settings: Settings) -> None:
    """Let the installed SGLang judge the arguments; nothing is started.

    Raises:
        SettingsError: there is no SGLang, or it refuses an argument.
        DeadlineExceeded: it did not answer in time.
    """
    table = json.dumps(argument_table(settings, port=settings.server.port or 1, identity="check"))
    command = _command(settings, "--check", table)
    try:
        answer = subprocess.run(
            command,
            env=process_environment(settings),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(
            who="launcher", phase="check of server.sglang", peer=command[0], after_s=error.timeout
        ) from error
    if answer.returncode == 0:
        return
    lines = [line for line in answer.stderr.splitlines() if line.startswith("outloop: ")]
    if answer.returncode == REFUSED_EXIT_CODE and lines:
        raise SettingsError(lines[-1].removeprefix("outloop: "))
    raise SettingsError(
        f"the check of SGLang's arguments by {command[0]!r} failed:\n{answer.stderr[-2000:]}"
    )


def argument_table(settings: Settings, *, port: int, identity: str) -> dict[str, Any]:
    """SGLang's arguments by upstream name: ours, then what the raw table adds or changes."""
    server = settings.server
    config = _read_config(settings)
    table: dict[str, Any] = {
        "model_path": str(settings.model.path),
        "host": server.host,
        "port": port,
        "device": server.device,
        "dtype": server.dtype,
        "tp_size": server.tensor_parallel_size,
        "max_running_requests": server.max_running_requests,
        "context_length": _context_tokens(settings, config),
        "weight_version": identity,
        "skip_server_warmup": True,
        "enable_metrics": True,
        # Requests name every sampling parameter; the model folder's defaults must not fill gaps.
        "sampling_defaults": "openai",
        "incremental_streaming_output": True,
        "log_level": "warning",
    }
    if server.tls_cert_file is not None and server.tls_key_file is not None:
        table["ssl_certfile"] = str(server.tls_cert_file.absolute())
        table["ssl_keyfile"] = str(server.tls_key_file.absolute())
    if settings.trainer.is_colocated and server.device != "cpu":
        # Without it the calls that release memory release none.
        table["enable_memory_saver"] = True
    if replayed_shape(settings) is not None:
        table["enable_return_routed_experts"] = True
    if config.get("n_shared_experts"):
        # On GPUs SGLang would make them one more of the routed ones, in memory that publish.verify
        # takes for theirs alone.
        table["disable_shared_experts_fusion"] = True
    if server.device == "cpu":
        table |= {"attention_backend": "torch_native", "max_total_tokens": _CPU_KV_TOKENS}
        # Otherwise its scheduler spins while there is nothing to do.
        table["sleep_on_idle"] = True
    return table | {key.replace("-", "_"): value for key, value in server.sglang.items()}


def process_environment(settings: Settings) -> dict[str, str]:
    """Environment variables of SGLang's processes."""
    threads = str(settings.server.num_threads)
    own = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The health route answers at once, also while paused, and generates no token.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # It checks every second, not every four, whether a client is still connected.
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
        # A crashed scheduler ends its server at once; otherwise it lingers for a minute.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    environment = {**own, **os.environ}
    # SGLang must not import our packages.
    environment.pop("PYTHONPATH", None)
    if settings.server.device.startswith("cuda"):
        environment |= gpu_environment(settings, environment)
    if settings.server.device == "cpu":
        environment |= {
            "PYTHONPATH": str(shims_folder()),
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        if settings.server.tensor_parallel_size > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = _cores_of_ranks(settings)
    return environment


def _cores_of_ranks(settings: Settings) -> str:
    """Cores for each rank, as SGLang wants them named; ranks share cores where there are few."""
    cores = sorted(os.sched_getaffinity(0))
    num_ranks, num = settings.server.tensor_parallel_size, settings.server.num_threads
    of_rank = [
        [cores[(rank * num + thread) % len(cores)] for thread in range(min(num, len(cores)))]
        for rank in range(num_ranks)
    ]
    return "|".join(",".join(str(core) for core in sorted(set(own))) for own in of_rank)


def _command(settings: Settings, *arguments: str) -> list[str]:
    python = find_python(settings.server.sglang_python)
    # -P: imports find SGLang's modules, not those beside the script.
    return [str(python), "-P", str(Path(__file__).with_name("entrypoint.py")), *arguments]


def _read_config(settings: Settings) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        SettingsError: it cannot be read.
    """
    path = settings.model.path / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(settings, error) from error
    if not isinstance(config, dict):
        raise _unreadable(settings, TypeError("it is no table"))
    return config


def _context_tokens(settings: Settings, config: dict[str, Any]) -> int:
    """As many positions as the model has, or fewer by setting.

    Raises:
        SettingsError: config.json says something else than a number.
    """
    most = settings.model.max_context_tokens
    try:
        positions = int(config.get("max_position_embeddings", most))
    except (ValueError, TypeError) as error:
        raise _unreadable(settings, error) from error
    return min(positions, most)


def _unreadable(settings: Settings, error: Exception) -> SettingsError:
    return SettingsError(
        f"model.path={str(settings.model.path)!r} has no readable config.json: {error}"
    )
