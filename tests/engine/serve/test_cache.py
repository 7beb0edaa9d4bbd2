"""Which computed prefixes are used again."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outloop.engine.serve.torch_server.config import ModelConfig, read_config
from outloop.engine.serve.torch_server.kv_cache import KVCache

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(make_model: Callable[..., Path]) -> ModelConfig:
    """Shape of the tiny model."""
    return read_config(make_model())


def _cache(config: ModelConfig, max_running: int = 2) -> KVCache:
    return KVCache(config, max_running=max_running, max_tokens=64, dtype=torch.float32, device=CPU)


def _compute(cache: KVCache, ids: list[int], key: str = "0") -> tuple[int, int]:
    """Run a sequence: its keys hold the ids themselves."""
    row = np.array(ids, dtype=np.int32)
    slot, num_cached = cache.acquire(row, key)
    cache.keys[:, slot, :, : len(ids)] = torch.tensor(ids, dtype=torch.float32)[:, None]
    cache.length[slot] = len(ids)
    return slot, num_cached


def test_an_extension_continues_in_place(config: ModelConfig) -> None:
    """A request that extends a finished sequence takes its slot over; all but the rest is there."""
    cache = _cache(config)
    slot, num_cached = _compute(cache, list(range(20)))
    assert num_cached == 0
    cache.release(slot)
    assert _compute(cache, list(range(30))) == (slot, 20)


def test_nothing_is_reused_under_another_key_or_after_new_weights(config: ModelConfig) -> None:
    """extra_key separates prefixes; forget drops them, those of running requests included."""
    cache = _cache(config)
    ids = list(range(20))
    slot, _ = _compute(cache, ids, "0")
    assert _compute(cache, ids, "1")[1] == 0
    cache.forget()
    cache.release(slot)
    assert _compute(cache, [*ids, 99], "0")[1] == 0


def test_the_last_id_is_always_computed(config: ModelConfig) -> None:
    """An identical prompt reuses all but one id: its logits are needed."""
    cache = _cache(config)
    slot, _ = _compute(cache, list(range(20)))
    cache.release(slot)
    assert _compute(cache, list(range(20)))[1] == 19


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(9, 40)), min_size=1, max_size=25))
@settings(deadline=None, max_examples=40)
def test_what_is_reused_is_what_would_be_computed(
    config: ModelConfig, moves: list[tuple[int, int]]
) -> None:
    """Whatever was run before, the reused positions hold the keys of the request's own ids."""
    cache = _cache(config, max_running=3)
    running: list[int] = []
    for family, length in moves:
        if len(running) == 3:
            cache.release(running.pop(0))
        ids = [(i * (family + 1)) % 50 for i in range(length)]
        row = np.array(ids, dtype=np.int32)
        slot, num_cached = cache.acquire(row, "0")
        assert slot not in running
        assert num_cached < length
        held = cache.keys[:, slot, :, :num_cached]
        expected = torch.tensor(ids[:num_cached], dtype=torch.float32)[:, None]
        assert torch.equal(held, expected.expand_as(held))
        cache.keys[:, slot, :, :length] = torch.tensor(ids, dtype=torch.float32)[:, None]
        cache.length[slot] = length
        running.append(slot)


def test_growing_keeps_what_is_there(config: ModelConfig) -> None:
    """More capacity does not lose keys."""
    cache = KVCache(config, max_running=2, max_tokens=500, dtype=torch.float32, device=CPU)
    slot, _ = _compute(cache, list(range(50)))
    before = cache.keys[:, slot, :, :50].clone()
    cache.reserve(400)
    assert cache.capacity > 400
    assert torch.equal(cache.keys[:, slot, :, :50], before)
