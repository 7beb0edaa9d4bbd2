"""Host memory is registered with CUDA while it is there, and no longer."""

import torch

from outloop.engine.train.megatron.host_memory import host_bytes


class Runtime:
    """In the place of CUDA's runtime: keeps the addresses that are registered."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Remember it."""
        self.calls.append("register")
        self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Forget it."""
        self.calls.append("unregister")
        del self.registered[address]
        return 0


def test_memory_that_is_dropped_is_registered_no_longer() -> None:
    """Another copy in its place is registered by itself."""
    runtime = Runtime()
    memory = host_bytes(4096, runtime)
    assert runtime.registered == {memory.data_ptr(): 4096}
    memory.copy_(torch.arange(4096, dtype=torch.int32).to(torch.uint8))
    memory = host_bytes(8192, runtime)
    assert runtime.registered == {memory.data_ptr(): 8192}
    assert runtime.calls == ["register", "register", "unregister"]
    del memory
    assert runtime.registered == {}


def test_memory_that_cannot_be_registered_is_given_all_the_same() -> None:
    """An error of CUDA's leaves nothing to undo; nothing is asked of it for no bytes."""
    runtime = Runtime(error=2)
    assert host_bytes(64, runtime).numel() == 64
    assert host_bytes(0, runtime).numel() == 0
    assert host_bytes(64, None).numel() == 64
    assert runtime.calls == ["register"]
