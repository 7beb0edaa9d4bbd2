"""Task order and version bounds, and that keys are what their page says."""

import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outloop.buffer.records import Turn, VersionSpan
from outloop.buffer.redis.keys import KEYS, markdown_table, prefix
from outloop.buffer.tasks.order import STORED_ORDER_TASKS, task_index

ROOT = Path(__file__).resolve().parents[2]


@given(st.integers(1, 50), st.integers(0, 5), st.integers(-5, 2**40))
def test_every_epoch_is_a_permutation(num_tasks: int, epoch: int, seed: int) -> None:
    """Each task is played once per epoch, in the same order in every process."""
    slots = range(epoch * num_tasks, (epoch + 1) * num_tasks)
    order = [task_index(slot, num_tasks, seed) for slot in slots]
    assert sorted(order) == list(range(num_tasks))
    assert order == [task_index(slot, num_tasks, seed) for slot in slots]


@pytest.mark.medium
def test_an_epoch_of_a_long_list_is_a_permutation_too() -> None:
    """Its order is computed slot by slot."""
    num_tasks = STORED_ORDER_TASKS + 1
    order = np.array([task_index(num_tasks + slot, num_tasks, 3) for slot in range(num_tasks)])
    assert np.array_equal(np.sort(order), np.arange(num_tasks))
    # Shuffled: neither place nor neighbour says anything. Ten standard deviations.
    bound = 10 / num_tasks**0.5
    assert abs(np.corrcoef(order, np.arange(num_tasks))[0, 1]) < bound
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < bound


def test_the_order_is_fixed() -> None:
    """A release that orders tasks otherwise would play other tasks after a resume."""
    assert [task_index(slot, 5, 0) for slot in range(10)] == [0, 2, 1, 4, 3, 3, 2, 4, 1, 0]
    ten_million = [task_index(slot, 10**7, 0) for slot in (0, 1, 10**7 - 1, 10**7)]
    assert ten_million == [4667264, 8882131, 2109939, 3540762]


def test_epochs_and_seeds_differ() -> None:
    """No epoch repeats another's order."""
    orders = {
        tuple(task_index(slot, 20, seed) for slot in range(20 * epoch, 20 * epoch + 20))
        for epoch in range(4)
        for seed in range(3)
    }
    assert len(orders) == 12


@pytest.mark.parametrize(
    ("loss_spans", "expected"),
    [
        (((0, 4),), (3, 5)),
        # Drawn by 5 from keys and values that 3 computed.
        (((2, 4),), (3, 5)),
        (((1, 3),), (3, 5)),
        ((), (None, 5)),
        (((2, 2),), (None, 5)),
    ],
)
def test_only_trained_tokens_make_a_turn_old(
    make_turn: Callable[..., Turn],
    loss_spans: tuple[tuple[int, int], ...],
    expected: tuple[int | None, int],
) -> None:
    """The oldest version goes by what trained tokens attended to, the newest by all tokens."""
    spans = (
        VersionSpan(policy_version=3, start=0, end=2),
        VersionSpan(policy_version=5, start=2, end=4),
        VersionSpan(policy_version=9, start=4, end=4),
    )
    turn = replace(make_turn("e"), version_spans=spans, loss_spans=loss_spans)
    assert turn.trained_version_bounds == expected


def test_the_page_of_keys_is_the_module() -> None:
    """docs/buffer-keys.md and buffer/redis/keys.py hold the same table."""
    assert markdown_table() in (ROOT / "docs/buffer-keys.md").read_text()
    assert len({spec.name for spec in KEYS}) == len(KEYS)
    assert prefix("run") == "{run:0}:"


def test_scripts_use_declared_keys_only() -> None:
    """Every key that a script names is in the table."""
    declared = {spec.name.split(":")[0] for spec in KEYS}
    used: set[str] = set()
    for script in files("outloop.buffer.redis.scripts").iterdir():
        if script.name.endswith(".lua"):
            text = script.read_text()
            used |= set(re.findall(r"key\('([a-z_]+):?'", text))
            used |= set(re.findall(r"prefix \.\. '([a-z_]+):?'", text))
    used -= {"nothing"}
    assert len(used) > 20
    assert used <= declared


def test_every_script_states_its_contract() -> None:
    """Each header names arguments, answer and what it keeps."""
    for script in files("outloop.buffer.redis.scripts").iterdir():
        if script.name.endswith(".lua") and script.name not in ("core.lua", "lifecycle.lua"):
            header = script.read_text().split("\n\n")[0:2]
            assert "-- Returns " in "\n".join(header), script.name
            assert "-- Keeps " in "\n".join(header), script.name
