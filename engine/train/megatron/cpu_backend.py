"""Lets megatron-core run on a machine without CUDA (gloo, CPU tensors).

This is the only place in the project where an installed package is patched. Where CUDA is, only
names that megatron-core uses and lacks are added. Releases that the tests were not run with are
refused (release.py), because each replacement stands in for certain lines.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outloop.engine.train.megatron.release import check_release, installed_release

_CPU = torch.device("cpu")
_INSTALLED = "_outloop_cpu_backend"
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "randn",
    "rand",
)
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


class _NullStream:
    """Stands in for torch.cuda.Stream: CPU work is already in order."""

    device = _CPU
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    def wait_event(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _NullEvent()

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


class _NullEvent:
    """Stands in for torch.cuda.Event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def install(installed: str | None = None) -> None:
    """Make the CPU look like the device that megatron-core asks for; call before importing it.

    Args:
        installed: the version of megatron-core; None: as its package says.

    Raises:
        SettingsError: the installed megatron-core is a release that was not tried.
    """
    check_release(installed or installed_release())
    if hasattr(torch.cuda, _INSTALLED):
        return
    setattr(torch.cuda, _INSTALLED, True)
    if torch.cuda.is_available():
        _name_missing_functions()
        return
    _replace_cuda_functions()
    _replace_factories()
    _replace_tensor_methods()
    _patch_megatron()


def _replace_cuda_functions() -> None:
    """torch.cuda.* that megatron-core calls without asking whether there is a device."""
    cuda: Any = torch.cuda
    stream = _NullStream()
    cuda.current_device = lambda: _CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.current_stream = lambda *args, **kwargs: stream
    cuda.default_stream = lambda *args, **kwargs: stream
    cuda.Stream = _NullStream
    cuda.Event = _NullEvent
    cuda.stream = lambda stream: contextlib.nullcontext(stream)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.random.set_rng_state = cuda.set_rng_state
    cuda.nvtx.range_push = lambda *args: 0
    cuda.nvtx.range_pop = lambda *args: 0


def _replace_factories() -> None:
    """`torch.zeros(..., device="cuda")` and its like, written literally in megatron-core."""

    def on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def factory(*args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            if device is not None and str(device).startswith("cuda"):
                kwargs["device"] = _CPU
                kwargs.pop("pin_memory", None)
            return original(*args, **kwargs)

        return factory

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _replace_tensor_methods() -> None:
    """`.cuda()`, `.record_stream()`, and `.type()` where it is compared to CUDA names."""
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.dtype in _CUDA_TYPE_NAMES:
            caller = sys._getframe(1).f_code.co_filename
            if "/megatron/core/" in caller:
                return _CUDA_TYPE_NAMES[self.dtype]
        return original(self, *args, **kwargs)

    tensor.type = type_


def _patch_megatron() -> None:
    """The random-state tracker, undefined names, and exchanges that gloo does not know."""
    from megatron.core.tensor_parallel import random as mcore_random

    class CpuRngTracker(mcore_random.CudaRNGStatesTracker):
        """Forks the CPU generator where megatron-core forks the CUDA one."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"rng state name={name!r} or seed={seed} exists already")
            self.seeds_.add(seed)
            generator = torch.Generator()
            generator.manual_seed(int(seed))
            self.states_[name] = generator.get_state()

        @contextlib.contextmanager
        def fork(self, name: str = mcore_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    mcore_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    mcore_random.CudaRNGStatesTracker = CpuRngTracker

    _name_missing_functions()
    _patch_token_dispatcher()


def _name_missing_functions() -> None:
    """Names that are used without Transformer Engine too, where they are not defined."""
    from megatron.core.transformer.moe import moe_utils

    for name in (
        "te_general_gemm",
        "fused_permute",
        "fused_unpermute",
        "fused_sort_chunks_by_index",
    ):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def _patch_token_dispatcher() -> None:
    """All-to-all gets its sizes as Python numbers only where they come from a GPU."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _patch_uneven_collectives()
    moe_utils.maybe_move_tensor_to_cpu = move_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu


def _patch_uneven_collectives() -> None:
    """Expert tensor parallelism exchanges parts of unequal size, which gloo refuses to."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        output = input_.new_empty((sum(output_split_sizes), *input_.shape[1:]))
        for rank, part in enumerate(output.split(output_split_sizes)):
            if rank == group.rank():
                part.copy_(input_)
            dist.broadcast(part, group=group, group_src=rank)
        return output

    def scatter_parts(
        input_: torch.Tensor,
        group: Any,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts
