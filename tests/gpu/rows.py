"""The rows of `make gpu-check` that are no test of pytest: `python tests/gpu/rows.py NAME`.

Each prints lines that begin with PASS, FAIL or INFO, and ends with 1 if one FAILs, with 77 (and a
line NEEDS) if it cannot run here. Without a GPU a row does what of it a CPU can do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
GB = 1e9
CANNOT = 77
"""Exit code of a row that needs what is not here."""
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BACKEND: Any = "nccl" if HAS_GPU else "gloo"
NCCL_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
"""With an NCCL_HOSTID of its own each process counts as a host, so they may share one GPU."""
_failed: list[str] = []


def check(is_right: bool, text: str) -> None:
    """One line of the answer."""
    print("PASS" if is_right else "FAIL", text, flush=True)
    if not is_right:
        _failed.append(text)


def num_failed() -> int:
    """Lines that FAIL so far."""
    return len(_failed)


def tell(text: str) -> None:
    """One line of figures."""
    print("INFO", text, flush=True)


def need(is_there: bool, what: str) -> None:
    """End here without `what`."""
    if not is_there:
        print("NEEDS", what, flush=True)
        sys.exit(CANNOT)


def setting() -> None:
    """What this machine is."""
    where = "no GPU"
    if HAS_GPU:
        total = torch.cuda.mem_get_info()[1] / GB
        where = (
            f"{torch.cuda.get_device_name()}, {total:.1f} GB, NCCL "
            f"{'.'.join(str(part) for part in torch.cuda.nccl.version())}"
        )
    tell(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {where}")
    for name in ("megatron-core", "transformer-engine", "flash-attn", "apex", "triton"):
        try:
            tell(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            tell(f"{name} is not installed")


def gpu_hash() -> None:
    """Our restatement of the GPU's checksum against SGLang's kernel."""
    import sglang_receiver

    need(sglang_receiver.find("gpu_tensor_hash.py") is not None, sglang_receiver.NEEDED)
    need(HAS_GPU, "a GPU; under Triton's interpreter this is part of `make test-sglang`")
    theirs = sglang_receiver.load_file("gpu_tensor_hash.py", "gpu_tensor_hash").gpu_tensor_hash
    from outloop.engine.publish.verification.sglang_gpu_hash import GpuHash

    def ours(*parts: Tensor) -> str:
        made = GpuHash()
        for part in parts:
            made.update(part.reshape(-1).view(torch.uint8))
        return made.hexdigest()

    for length in (1, 3, 4, 5, 100, 32768, 32769, 40000, 100001, 2**20 + 3, 2**26, 2**28 + 2):
        content = torch.randint(0, 256, (length,), dtype=torch.uint8, device="cuda")
        check(ours(content) == f"{theirs(content):016x}", f"hash of {length} bytes")
    for shape in ((151936, 1024), (6144, 4096), (128, 1536, 2048)):
        weight = torch.randn(shape, device="cuda").bfloat16()
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        mine = ours(*weight.split(max(1, len(weight) // 3)))
        rate = weight.nbytes / GB / (time.perf_counter() - began_at)
        check(mine == f"{theirs(weight):016x}", f"hash of bfloat16 {shape}, {rate:.1f} GB/s")


# ------------------------------------------------------------------ buckets into SGLang's own code
def _read_buckets(pipe: Any) -> None:
    import sglang_receiver

    receiver = sglang_receiver.Receiver()
    held: dict[str, Tensor] = {}
    while (payload := pipe.recv()) is not None:
        for name, tensor in receiver.receive(payload):
            held[name] = tensor.clone()  # A load_weights without a synchronize.
        tensor = None
        pipe.send("success")  # As SGLang answers: nothing was waited for.
    pipe.send({name: t.float().cpu().numpy() for name, t in held.items()})


def buckets_into_sglang() -> None:
    """Payloads, as CUDA-IPC or shared memory, into SGLang's unpickler and bucket class."""
    import sglang_receiver

    need(sglang_receiver.find("common.py") is not None, sglang_receiver.NEEDED)
    from outloop.engine.publish.buckets.plan import TensorSpec, plan_buckets
    from outloop.engine.publish.buckets.staging import DeviceBuffer, SharedBuffer, Staging
    from outloop.engine.publish.flattened_bucket import write_bucket

    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    reader = context.Process(target=_read_buckets, args=(theirs,), daemon=True)
    reader.start()
    # Its death is then the end of what is received.
    theirs.close()
    num_tensors, num_rounds = (48, 20) if HAS_GPU else (12, 4)
    specs = [
        TensorSpec(name=f"t{index}", shape=(2048, 1024 + index), dtype=torch.bfloat16)
        for index in range(num_tensors)
    ]
    buckets = list(plan_buckets(specs, 16 * 2**20))
    room = max(bucket[-1].end for bucket in buckets)
    device = torch.device(DEVICE)
    make: Callable[[], Any] = SharedBuffer
    if HAS_GPU:
        make = lambda: DeviceBuffer(device, is_exported=True)  # noqa: E731
    staging = Staging(make(), make())
    sent: dict[str, Tensor] = {}
    began_at = time.perf_counter()
    for _ in range(num_rounds):
        sent = {spec.name: torch.randn(spec.shape, device=device).bfloat16() for spec in specs}
        for index, bucket in enumerate(buckets):
            content = staging.reserve(index, room)[: bucket[-1].end]
            for place in bucket:
                target = content[place.start : place.end].view(torch.bfloat16)
                target.copy_(sent[place.spec.name].view(-1))
            if HAS_GPU:
                torch.cuda.current_stream().synchronize()
            mine.send(write_bucket(content, bucket))
            assert mine.recv() == "success"
        content = target = None
        staging.end()
    took_ms = 1000 * (time.perf_counter() - began_at) / num_rounds / len(buckets)
    mine.send(None)
    got = mine.recv()
    wrong = [
        name
        for name in sent
        if not torch.equal(torch.from_numpy(got[name]), sent[name].float().cpu())
    ]
    reader.join(20)
    staging.close()
    way = "CUDA-IPC" if HAS_GPU else "shared memory"
    check(
        not wrong,
        f"{num_rounds} publishes of {len(buckets)} buckets by {way} into SGLang's SafeUnpickler "
        f"and FlattenedTensorBucket; wrong: {wrong}; {took_ms:.2f} ms a bucket, filling included",
    )


def exported_memory() -> None:
    """Two small buckets exported 21,000 times over 300 publishes, to a reader that lets go."""
    import sglang_receiver

    need(sglang_receiver.find("common.py") is not None, sglang_receiver.NEEDED)
    need(HAS_GPU, "a GPU; that staging lives for one publish is tested without one")
    from outloop.engine.publish.buckets.plan import TensorSpec, plan_buckets
    from outloop.engine.publish.buckets.staging import DeviceBuffer, Staging
    from outloop.engine.publish.flattened_bucket import write_bucket

    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    reader = context.Process(target=_read_buckets, args=(theirs,), daemon=True)
    reader.start()
    # Its death is then the end of what is received.
    theirs.close()
    spec = TensorSpec(name="t", shape=(2**20,), dtype=torch.bfloat16)
    (bucket,) = plan_buckets([spec], 2**22)
    device = torch.device("cuda")
    staging = Staging(*(DeviceBuffer(device, is_exported=True) for _ in range(2)))
    reserved = []
    began_at = time.perf_counter()
    for publish in range(300):
        for index in range(70):
            content = staging.reserve(index, bucket[-1].end)
            if index == 0:
                content.view(torch.bfloat16).fill_(publish)
                torch.cuda.current_stream().synchronize()
            mine.send(write_bucket(content, bucket))
            assert mine.recv() == "success"
        del content
        staging.end()
        reserved.append(torch.cuda.memory_reserved())
    took_s = time.perf_counter() - began_at
    staging.close()
    mine.send(None)
    mine.recv()
    check(
        reserved[-1] <= reserved[10],
        f"memory stays: {reserved[10] / GB:.3f} GB reserved after 10 publishes, "
        f"{reserved[-1] / GB:.3f} after 300; {1000 * took_s / 21000:.2f} ms an export",
    )


# ------------------------------------------------------------------ groups: two processes, one GPU
def _member(how: str, port: int, num_bytes: int, pipe: Any) -> None:
    os.environ.update(NCCL_ENVIRONMENT, NCCL_HOSTID="server")
    content = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    receive: Callable[[], None]
    if how == "ours":
        from outloop.engine.publish.process_group import join_group

        pipe.send("ready")
        group = join_group(
            "127.0.0.1", port, rank=1, world_size=2, name="g", backend=BACKEND, timeout_s=60
        )

        def receive() -> None:
            group.broadcast(content, timeout_s=60)

    else:
        import sglang_receiver
        import torch.distributed as dist

        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
        common = sglang_receiver.Receiver().common
        pipe.send("ready")
        # Joining a gloo group waits for all members; the other one is joining meanwhile.
        members = common.init_custom_process_group(
            backend=BACKEND,
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=1,
            group_name="g",
        )

        def receive() -> None:
            dist.broadcast(content, src=0, group=members)
            pipe.send(("returned", time.time()))  # When SGLang would answer.
            if HAS_GPU:
                torch.cuda.synchronize()

    pipe.send("joined")
    while pipe.recv() == "receive":
        receive()
        pipe.send(("sum", int(content.long().sum())))


def _group_of_two(how: str, *, timeout_s: float = 60.0) -> tuple[Any, Any, Any, Any]:
    from outloop.engine.publish.process_group import Rendezvous, join_group

    os.environ.update(NCCL_ENVIRONMENT, NCCL_HOSTID="trainer")
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    rendezvous = Rendezvous("127.0.0.1")
    arguments = (how, rendezvous.port, 64 * 2**20, theirs)
    member = context.Process(target=_member, args=arguments, daemon=True)
    member.start()
    # Deadlines are those of a group, not of a process that starts.
    assert mine.recv() == "ready"
    group = join_group(
        "127.0.0.1",
        rendezvous.port,
        rank=0,
        world_size=2,
        name="g",
        backend=BACKEND,
        timeout_s=timeout_s,
    )
    assert mine.recv() == "joined"
    return rendezvous, member, mine, group


def group(how: str = "ours") -> None:
    """Three broadcasts of 64 MiB to a member that joined as we do, or as SGLang does."""
    if how == "sglang":
        import sglang_receiver

        need(sglang_receiver.find("common.py") is not None, sglang_receiver.NEEDED)
    _rendezvous, member, pipe, made = _group_of_two(how)
    for attempt in range(3):
        content = torch.randint(0, 256, (64 * 2**20,), dtype=torch.uint8, device=DEVICE)
        pipe.send("receive")
        time.sleep(1.0 if attempt else 0.0)
        began_at = time.time()
        made.broadcast(content, timeout_s=60)
        took_s = time.time() - began_at
        word = pipe.recv()
        if word[0] == "returned":
            after_s = word[1] - began_at
            side = "after" if after_s > 0 else "before"
            tell(f"SGLang's broadcast returned {abs(after_s):.2f} s {side} ours began")
            word = pipe.recv()
        check(
            word[1] == int(content.long().sum()),
            f"{BACKEND} broadcast {attempt} of 64 MiB to a member as {how}: {took_s:.2f} s",
        )
    pipe.send("end")
    member.join(20)
    made.close()


def group_absent() -> None:
    """A member that joined and never takes part, in the first broadcast."""
    _rendezvous, member, _pipe, made = _group_of_two("ours", timeout_s=10.0)
    _expect_an_end(made, timeout_s=5.0, what="nobody took part in the first broadcast")
    member.kill()
    _expect_a_close(made)


def group_stopped() -> None:
    """A member that is stopped dead before the second broadcast; this process goes on."""
    _rendezvous, member, pipe, made = _group_of_two("ours", timeout_s=10.0)
    content = torch.zeros(64 * 2**20, dtype=torch.uint8, device=DEVICE)
    pipe.send("receive")
    made.broadcast(content, timeout_s=60)
    pipe.recv()
    os.kill(member.pid, signal.SIGSTOP)
    _expect_an_end(made, timeout_s=5.0, what="a member was stopped")
    os.kill(member.pid, signal.SIGKILL)
    _expect_a_close(made)
    # torch would end this process a minute after an error of NCCL.
    lives_s = 70.0 if HAS_GPU else 2.0
    until = time.monotonic() + lives_s
    while time.monotonic() < until:
        time.sleep(0.5)
        if HAS_GPU:
            torch.ones(1000, device="cuda").sum().item()
    check(True, f"this process lives and computes {lives_s:.0f} s later")


def _expect_an_end(made: Any, *, timeout_s: float, what: str) -> None:
    from outloop.buffer.errors import PublishFailed

    content = torch.zeros(64 * 2**20, dtype=torch.uint8, device=DEVICE)
    began_at = time.monotonic()
    try:
        made.broadcast(content, timeout_s=timeout_s)
    except PublishFailed as error:
        took_s = time.monotonic() - began_at
        check(took_s < 20.0, f"{what}: ended after {took_s:.1f} s: {str(error)[:150]}")
    else:
        check(False, f"{what}, and it succeeded")


def _expect_a_close(made: Any) -> None:
    from outloop.engine.publish.process_group import in_thread

    began_at = time.monotonic()
    closing = in_thread(made.close)
    longest_s = 0.0
    while not closing.done() and time.monotonic() - began_at < 30.0:
        before = time.monotonic()
        time.sleep(0.01)
        longest_s = max(longest_s, time.monotonic() - before)
    took_s = time.monotonic() - began_at
    check(closing.done(), f"the broken group was left in {took_s:.1f} s")
    check(longest_s < 1.0, f"other threads were held for {longest_s:.2f} s at most meanwhile")


# ------------------------------------------------------------------ ranks
def parity(*names: str) -> None:
    """Layouts of tests/engine/train/test_parity.py, on a GPU over NCCL between processes on it."""
    import json
    import tempfile

    for folder in ("tests/engine/train", "tests"):
        sys.path.insert(0, str(ROOT / folder))
    import test_parity

    from fakes.families import make_family

    work = Path(tempfile.mkdtemp())
    for name in {test_parity.MATRIX[name][1] for name in names}:
        kind, is_tied, sizes = test_parity.MODELS[name]
        make_family(kind, work / "models" / name, is_tied=is_tied, **sizes)

    def job(num_ranks: int, cases: list[dict[str, Any]]) -> None:
        if not cases:
            return
        (work / "cases.json").write_text(json.dumps(cases))
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        program = [str(HERE / "rank_alone.py"), str(test_parity.PROGRAM), str(work)]
        answer = subprocess.run(
            [sys.executable, *(torchrun if num_ranks > 1 else []), *program],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if answer.returncode:
            raise RuntimeError(answer.stderr[-1500:])

    try:
        test_parity.run_layouts(names, work, job)
    except RuntimeError as error:
        check(False, f"parity of {', '.join(names)}: {error}")
        return
    for name in names:
        try:
            test_parity.assert_parity(name, work)
        except AssertionError as error:
            check(False, f"parity over {BACKEND}: {name}: {str(error)[:300]}")
        else:
            check(True, f"parity over {BACKEND}: {name}")


if __name__ == "__main__":
    rows: dict[str, Callable[..., None]] = {
        each.__name__: each
        for each in (
            setting,
            gpu_hash,
            buckets_into_sglang,
            exported_memory,
            group,
            group_absent,
            group_stopped,
            parity,
        )
    }
    rows[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    # Without waiting for threads that a broken group may have left.
    os._exit(1 if num_failed() else 0)
