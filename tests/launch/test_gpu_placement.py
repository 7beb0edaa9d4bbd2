"""Which GPUs parts get; the list is a program's answer, and the environment a real process's."""

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings
from outloop.engine.launch.gpu_placement import GpuPlacement, place_gpus
from outloop.engine.launch.launcher import Launcher
from outloop.engine.launch.restarts import DEFAULT_BACKOFF
from outloop.engine.machine.visible_gpus import Gpu, list_gpus

EIGHT = tuple(Gpu(id=f"GPU-{number}", name="H100") for number in range(8))
SGLANG = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16"}


def place(
    server: dict[str, Any], trainer: dict[str, Any], gpus: tuple[Gpu, ...] = EIGHT, **parts: bool
) -> GpuPlacement:
    """Where these settings put their parts."""
    settings = Settings(model={"path": "m"}, server=server, trainer=trainer)
    return place_gpus(settings, gpus, **parts)


def visible(placement: GpuPlacement, part: str, index: int = 0) -> str | None:
    """What a part sees; None: what its starter sees."""
    return placement.environment(part, index).get("CUDA_VISIBLE_DEVICES")


def test_servers_come_first_and_the_trainer_behind_them() -> None:
    """The example of docs/servers.md: four servers of two GPUs each would fill a node of eight."""
    found = place(SGLANG | {"num_servers": 2, "tensor_parallel_size": 2}, {"num_ranks": 4})
    assert visible(found, "server", 0) == "GPU-0,GPU-1"
    assert visible(found, "server", 1) == "GPU-2,GPU-3"
    assert visible(found, "trainer") == "GPU-4,GPU-5,GPU-6,GPU-7"
    assert visible(found, "router") is visible(found, "runner") is None
    assert found.lines()[:2] == ["server-0: GPU 0, 1 (H100)", "server-1: GPU 2, 3 (H100)"]
    assert found.lines()[-1] == "trainer rank 3: GPU 7 (H100)"


def test_given_lists_hold_and_the_others_take_what_is_free() -> None:
    """By servers in their order, by ranks one each."""
    found = place(
        SGLANG | {"num_servers": 2, "tensor_parallel_size": 2, "gpus": [6, 4, 1, 0]},
        {"num_ranks": 2},
    )
    assert visible(found, "server", 0) == "GPU-6,GPU-4"
    assert visible(found, "server", 1) == "GPU-1,GPU-0"
    assert visible(found, "trainer") == "GPU-2,GPU-3"
    found = place(SGLANG | {"num_servers": 2}, {"gpus": [0]})
    assert [visible(found, "server", index) for index in (0, 1)] == ["GPU-1", "GPU-2"]
    assert visible(found, "trainer") == "GPU-0"


def test_gpus_that_are_named_for_parts_on_the_cpu_are_a_rehearsal() -> None:
    """They see the names that they would have; without names they see no GPU."""
    cpu = {"kind": "sglang", "num_servers": 2, "tensor_parallel_size": 2}
    shared = {"device": "cpu", "num_ranks": 4, "is_colocated": True}
    found = place(cpu | {"gpus": [0, 1, 2, 3]}, shared | {"gpus": [0, 1, 2, 3]})
    assert visible(found, "server", 1) == "GPU-2,GPU-3"
    assert visible(found, "trainer") == "GPU-0,GPU-1,GPU-2,GPU-3"
    assert found.lines()[-1] == "trainer rank 3: GPU 3 (H100)"
    found = place(cpu, shared)
    assert visible(found, "server", 1) == visible(found, "trainer") == ""


def test_colocated_parts_begin_at_the_same_gpu() -> None:
    """On one GPU, and on a node."""
    found = place(SGLANG, {"is_colocated": True}, EIGHT[:1])
    assert visible(found, "server") == visible(found, "trainer") == "GPU-0"
    both = [0, 1]
    found = place(
        SGLANG | {"num_servers": 2, "gpus": both},
        {"num_ranks": 2, "gpus": both, "is_colocated": True},
    )
    assert visible(found, "server", 1) == "GPU-1"
    assert visible(found, "trainer") == "GPU-0,GPU-1"


def test_what_runs_on_the_cpu_sees_no_gpu() -> None:
    """The newcomer's run on a machine with a GPU: the trainer has it, the torch server none."""
    found = place({}, {}, EIGHT[:1])
    assert visible(found, "server") == ""
    assert visible(found, "trainer") == "GPU-0"
    found = place({"device": "cuda"}, {"device": "cpu"})
    assert visible(found, "server") == "GPU-0"
    assert visible(found, "trainer") == ""
    found = place({}, {}, ())
    assert visible(found, "trainer") is None
    assert found.lines() == []


def test_parts_that_are_not_started_take_nothing() -> None:
    """Serving without a trainer, SFT without servers, each on the only GPU."""
    found = place(SGLANG, {}, EIGHT[:1], has_trainer=False)
    assert visible(found, "server") == "GPU-0"
    found = place(SGLANG, {"mode": "sft"}, EIGHT[:1], has_servers=False)
    assert visible(found, "trainer") == "GPU-0"


def test_devices_chosen_by_hand_are_left_to_whoever_chose() -> None:
    """SGLang's own first GPU, a torch server's numbered device, a trainer's."""
    found = place(SGLANG | {"sglang": {"base-gpu-id": 3}}, {"device": "cuda:1"})
    assert visible(found, "server") is visible(found, "trainer") is None
    assert visible(place({"device": "cuda:1"}, {"device": "cpu"}), "server") is None


@pytest.mark.parametrize(
    ("server", "trainer", "sentence"),
    [
        (
            SGLANG | {"num_servers": 4, "tensor_parallel_size": 2},
            {},
            "1 GPUs are needed for the trainer, and 0 of 8 are free .*is_colocated = true",
        ),
        (
            SGLANG | {"num_servers": 2, "gpus": [0, 1]},
            {"gpus": [1]},
            r"server.gpus=\[0, 1\] and trainer.gpus=\[1\] share \[1\].* trainer.is_colocated",
        ),
        (SGLANG | {"gpus": [0, 1]}, {}, "names 2 GPUs; 1 are needed"),
        (
            SGLANG | {"num_servers": 2, "gpus": [3, 3]},
            {},
            r"server.gpus=\[3, 3\] names a GPU twice",
        ),
        (SGLANG | {"gpus": [8]}, {}, "GPU 8 is not here; 0 to 7 are allowed"),
        ({"gpus": [0]}, {}, r"server.gpus=\[0\] names 1 GPUs; 0 are needed"),
        (SGLANG | {"gpus": [0], "sglang": {"base_gpu_id": 1}}, {}, "leave one of them out"),
        ({}, {"num_ranks": 2, "gpus": [5]}, "names 1 GPUs; 2 are needed"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    server: dict[str, Any], trainer: dict[str, Any], sentence: str
) -> None:
    """Before anything is started, with what to change."""
    with pytest.raises(SettingsError, match=sentence):
        place(server, trainer)


NVIDIA_SMI = """#!/bin/sh
cat <<END
0, GPU-aa, NVIDIA H100 80GB HBM3, 81559
1, GPU-bb, NVIDIA H100 80GB HBM3, 81559
2, GPU-cc, NVIDIA H100 80GB HBM3, 81559
END
"""


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """An environment whose nvidia-smi lists three GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("answer", "generation"),
    [("9.0", 9), ("10.0", 10), ("12.1", 12), ("[N/A]", None)],
)
def test_the_generation_is_what_the_driver_says(
    tmp_path: Path, answer: str, generation: int | None
) -> None:
    """By the compute capability; not known where the driver does not say."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\necho '0, GPU-aa, NVIDIA H100, 81559, {answer}, 00000000:3B:00.0'\n"
    )
    program.chmod(0o755)
    (gpu,) = list_gpus({"PATH": str(tmp_path)})
    assert (gpu.id, gpu.memory_mb, gpu.generation) == ("GPU-aa", 81559, generation)
    assert gpu.pci == "0000:3b:00.0"


def test_gpus_are_those_that_this_process_sees(driver: dict[str, str]) -> None:
    """All that the driver lists, or those of CUDA_VISIBLE_DEVICES, in its order, by any name."""
    assert [gpu.id for gpu in list_gpus(driver)] == ["GPU-aa", "GPU-bb", "GPU-cc"]
    assert list_gpus(driver)[0].memory_mb == 81559
    some = list_gpus(driver | {"CUDA_VISIBLE_DEVICES": "2,GPU-aa"})
    assert [gpu.id for gpu in some] == ["GPU-cc", "GPU-aa"]
    assert list_gpus(driver | {"CUDA_VISIBLE_DEVICES": ""}) == ()
    slice_ = list_gpus(driver | {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert [gpu.id for gpu in slice_] == ["MIG-1"]
    assert list_gpus({"PATH": "/nowhere"}) == ()


class Saying:
    """In the place of every part: a program that says which GPUs it sees."""

    def command(self, name: str, part: str, command: Sequence[str]) -> list[str]:
        """Of the program."""
        code = "import json, os; print(json.dumps(os.environ.get('CUDA_VISIBLE_DEVICES')))"
        return [sys.executable, "-c", code]


@pytest.mark.medium
def test_a_process_gets_its_gpus_and_no_others(driver: dict[str, str], tmp_path: Path) -> None:
    """In its environment, which is all that CUDA looks at."""
    server, nobody = SGLANG | {"num_servers": 2}, cast(Any, None)
    settings = Settings(model={"path": "m"}, server=server)
    run = create_run(settings, tmp_path / "run", "unix:///none")
    gpus = place_gpus(settings, list_gpus(driver))
    launcher = Launcher(run, nobody, threading.Event(), gpus, DEFAULT_BACKOFF, Saying())
    seen = []
    for part, *extra in (("server", "--index", "1"), ("trainer",), ("runner",)):
        launcher.start(part, part, *extra)
        process = launcher.parts[part]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        process.stop(20.0)
        log = run.dir / "logs" / f"{part}.log"
        seen.append(json.loads(log.read_text().splitlines()[-1]))
    assert seen[:2] == ["GPU-bb", "GPU-cc"]
    assert seen[2] == os.environ.get("CUDA_VISIBLE_DEVICES")
