"""Servers that share the trainer's devices give their memory for a step and take it again."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fakes.deadly_tap import DeadlyTap
from fakes.interrupted_tensors import InterruptedTensors
from fakes.local_tensors import LocalTensors
from fakes.scored_source import source_of
from fakes.tap import Tap
from outloop.buffer.errors import DeadlineExceeded, PublishFailed, SettingsError
from outloop.buffer.settings import build_settings
from outloop.engine.serve.sglang.arguments import argument_table

SHORT_S = 10.0
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
PATHS = {
    "pause": "/pause_generation",
    "flush": "/flush_cache",
    "release": RELEASE,
    "resume weights": RESUME,
    "begin": "/begin_weight_update",
    "bucket": "/update_weights_from_tensor",
    "end": "/end_weight_update",
    "version": "/update_weight_version",
    "resume kv_cache": RESUME,
    "continue": "/continue_generation",
}


class NotingTap(Tap):
    """Notes the calls; answers those that `error` names with 500, once each."""

    def __init__(self, target: str, calls: list[str], errors: Sequence[str] = ()) -> None:
        self.calls = calls
        self.errors = list(errors)
        super().__init__(target)

    def on_call(self, path: str) -> bytes | None:
        """Note it; what is no JSON breaks the caller's phase."""
        self.calls.append(path)
        if path in self.errors:
            self.errors.remove(path)
            return b"it broke"
        return None


class Leaving(LocalTensors):
    """Tensors that note in `calls` when they leave."""

    def __init__(self, tensors: dict[str, torch.Tensor], calls: list[str]) -> None:
        super().__init__(tensors)
        self._calls = calls

    def leave(self) -> None:
        """Note it."""
        self._calls.append("leave")


@pytest.fixture
def taps() -> Iterator[list[Tap]]:
    """Taps to be closed."""
    made: list[Tap] = []
    yield made
    for tap in made:
        tap.close()


@pytest.fixture
def colocated(make_publisher: Callable[..., Any]) -> Callable[..., Any]:
    """A publisher to servers on the trainer's devices."""

    def make(num_servers: int = 1, **publish: Any) -> Any:
        settings = {"bucket_mb": 0.05, "phase_timeout_s": SHORT_S, "fallback": "none"} | publish
        return make_publisher(num_servers=num_servers, is_colocated=True, **settings)

    return make


@pytest.mark.medium
def test_the_order_of_a_step_is_the_one_that_sglang_asserts(
    server_process: Callable[..., Any],
    colocated: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    expected_ids: list[int],
    greedy: Callable[[str], Any],
    taps: list[Tap],
) -> None:
    """Released before the step; cache taken only after the trainer's tensors have left."""
    calls: list[str] = []
    taps.append(NotingTap(server_process().url, calls))
    registry.add("server-0", taps[0].url)
    publisher = colocated()
    publisher.take_devices()
    assert registry.entries["server-0"].released == ("kv_cache", "cuda_graph", "weights")
    assert registry.is_claimed
    report = publisher.publish(Leaving(other_weights, calls), 3)
    steps = [path for path in calls if path != "/model_info"]
    first, last = steps.index(PATHS["bucket"]), steps.index(PATHS["end"])
    assert set(steps[first:last]) == {PATHS["bucket"]}
    assert [*steps[:first], *steps[last:]] == [
        *("/pause_generation", "/flush_cache", RELEASE),
        *("/pause_generation", RESUME, "/begin_weight_update"),
        *("/end_weight_update", "/weights_checker"),
        *("leave", RESUME, "/update_weight_version", "/continue_generation"),
    ]
    assert registry.entries["server-0"].released == ()
    assert registry.state("server-0") == (3, False)
    assert not registry.is_claimed
    assert report.pause_s > 0
    assert greedy(taps[0].url)["output_ids"] == expected_ids


@pytest.mark.medium
def test_a_turn_in_flight_goes_on_after_the_step(
    server_process: Callable[..., Any],
    colocated: Callable[..., Any],
    registry: Any,
    post: Callable[..., Any],
    other_weights: dict[str, torch.Tensor],
) -> None:
    """Its ids are kept, its cache is computed again, and it carries both versions."""
    url = server_process().url
    registry.add("server-0", url)
    publisher = colocated()
    answers: list[Any] = []
    fields = {"max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": [3, 9, 27], "sampling_params": fields}
    turn = threading.Thread(target=lambda: answers.append(post(url, "/generate", body)))
    turn.start()
    publisher.take_devices()
    # No memory: nothing can be asked of the weights.
    assert post(url, "/weights_checker", {"action": "checksum"})[0] == 400
    publisher.publish(LocalTensors(other_weights), 1)
    turn.join(SHORT_S)
    ((status, answer),) = answers
    assert status == 200
    assert len(answer["output_ids"]) == 400
    spans = answer["meta_info"]["weight_versions"]
    assert spans[-1]["version"] == "1"
    assert spans[-1]["end"] == 400


@pytest.mark.medium
def test_servers_that_keep_their_weights_go_on_with_them(
    server_process: Callable[..., Any],
    colocated: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    expected_ids: list[int],
    greedy: Callable[[str], Any],
) -> None:
    """For a checkpoint the cache alone is given; a server that joins is given weights then."""
    good, late = server_process(), server_process()
    registry.add("good", good.url)
    publisher, source = colocated(), LocalTensors(other_weights)
    publisher.take_devices()
    publisher.publish(source, 1)
    publisher.take_devices(keeps_weights=True)
    assert registry.entries["good"].released == ("kv_cache", "cuda_graph")
    publisher.give_devices(source)
    assert greedy(good.url)["output_ids"] == expected_ids
    registry.add("late", late.url)
    publisher.take_devices(keeps_weights=True)
    publisher.publish(source, 1)
    for server_id, process in (("good", good), ("late", late)):
        assert registry.entries[server_id].released == ()
        assert registry.state(server_id) == (1, False)
        assert greedy(process.url)["output_ids"] == expected_ids


@pytest.mark.medium
@pytest.mark.parametrize(
    ("phase", "moment"),
    [
        *((phase, "during") for phase in PATHS),
        ("release", "after"),
        ("resume weights", "after"),
        ("end", "after"),
        ("resume kv_cache", "before"),
        ("resume kv_cache", "after"),
    ],
)
def test_a_server_that_dies_in_any_phase_costs_only_itself(
    phase: str,
    moment: str,
    server_process: Callable[..., Any],
    colocated: Callable[..., Any],
    registry: Any,
    make_model: Callable[..., Path],
    greedy: Callable[[str], Any],
    taps: list[Tap],
) -> None:
    """While its memory is away too; the other serves this version and the next."""
    good, victim = server_process(), server_process()
    skip = phase in ("resume kv_cache", "bucket")
    taps.append(DeadlyTap(victim, PATHS[phase], moment, skip=int(skip)))
    registry.add("good", good.url)
    registry.add("victim", taps[0].url)
    # The tap outlives the server, as no part of a dead server does.
    threading.Thread(target=_close_with, args=(taps[0], victim), daemon=True).start()
    publisher, source = colocated(num_servers=2), source_of(make_model(seed=1))
    began_at = time.monotonic()
    for version in (1, 2):
        publisher.take_devices()
        publisher.publish(source, version)
        assert registry.state("good") == (version, False)
    assert time.monotonic() - began_at < 4 * SHORT_S
    assert registry.state("victim") == (None, True)
    assert greedy(good.url)["meta_info"]["weight_version"] == "2"


def _close_with(tap: Tap, process: Any) -> None:
    while process.is_alive:
        time.sleep(0.02)
    tap.socket.close()


@pytest.mark.medium
@pytest.mark.parametrize("path", [RESUME, PATHS["begin"], PATHS["end"], PATHS["bucket"]])
def test_a_server_that_refuses_between_its_weights_and_its_cache_is_fed_at_the_next_step(
    path: str,
    server_process: Callable[..., Any],
    colocated: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    expected_ids: list[int],
    greedy: Callable[[str], Any],
    taps: list[Tap],
) -> None:
    """It is quarantined with part of its memory away, which the registry knows."""
    good = server_process()
    taps.append(NotingTap(server_process().url, [], errors=[path]))
    registry.add("good", good.url)
    registry.add("shaky", taps[0].url)
    publisher, source = colocated(num_servers=2, fallback="disk"), LocalTensors(other_weights)
    publisher.take_devices()
    report = publisher.publish(source, 1)
    assert report.quarantined == ("shaky",)
    assert "kv_cache" in registry.entries["shaky"].released
    assert registry.entries["good"].released == ()
    publisher.take_devices()
    assert publisher.publish(source, 2).quarantined == ()
    assert registry.entries["shaky"].released == ()
    assert registry.state("shaky") == (2, False)
    assert greedy(taps[0].url)["output_ids"] == expected_ids


@pytest.mark.medium
@pytest.mark.parametrize("moment", ["asleep", "first bucket", "late bucket", "leaves"])
def test_a_trainer_that_dies_while_memory_is_away_is_followed_by_another(
    moment: str,
    server_process: Callable[..., Any],
    colocated: Callable[..., Any],
    registry: Any,
    other_weights: dict[str, torch.Tensor],
    expected_ids: list[int],
    greedy: Callable[[str], Any],
) -> None:
    """What the first one left is in the registry: the next asks for no part twice."""
    url = server_process().url
    registry.add("server-0", url)
    first = colocated()
    first.take_devices()

    class Killed(BaseException):
        """As a SIGKILL: nobody handles it."""

    class Dying(InterruptedTensors):
        def leave(self) -> None:
            raise Killed

    at = {"first bucket": 0, "late bucket": len(other_weights) - 1}.get(moment)

    def die(index: int) -> None:
        if index == at:
            raise Killed

    if moment != "asleep":
        with pytest.raises(Killed):
            first.publish(Dying(other_weights, die), 1)
    first.close()
    second = colocated()
    second.wait_for_servers(lambda sentence: None)
    second.take_devices()
    assert set(registry.entries["server-0"].released) == {"kv_cache", "cuda_graph", "weights"}
    assert second.publish(LocalTensors(other_weights), 2).quarantined == ()
    assert greedy(url)["output_ids"] == expected_ids


@pytest.mark.medium
@pytest.mark.parametrize("phase", ["pause", "flush", "release"])
def test_a_server_that_keeps_its_memory_ends_the_run_with_its_name(
    phase: str, colocated: Callable[..., Any], registry: Any, lying_server: Callable[..., Any]
) -> None:
    """It is there and does not answer: the trainer would find no room on the device."""
    liar = lying_server("hang", phase)
    liar.path_of_phase = PATHS[phase]
    registry.add("stuck", liar.url)
    waits: list[str] = []
    with pytest.raises(PublishFailed, match="stuck at .* does not give .* end that server"):
        colocated(phase_timeout_s=0.5).take_devices(on_wait=waits.append)
    assert any("stuck to end" in sentence for sentence in waits)


@pytest.mark.medium
def test_a_server_that_is_starting_is_waited_for(
    server_process: Callable[..., Any], colocated: Callable[..., Any], registry: Any
) -> None:
    """What it takes of the GPU depends on what is free; one that never comes is named."""
    registry.add("server-0", server_process().url)
    registry.starting = ["server-1"] * 3
    waits: list[str] = []
    publisher = colocated()
    publisher.take_devices(on_wait=waits.append)
    assert len(waits) == 3
    assert "server-1 to start" in waits[0]
    registry.starting = ["server-1"] * 10_000
    with pytest.raises(DeadlineExceeded, match="server-1, which started and is not there yet"):
        colocated(start_timeout_s=0.3).take_devices()


@pytest.mark.medium
def test_nothing_is_asked_of_servers_with_devices_of_their_own(
    server_process: Callable[..., Any],
    make_publisher: Callable[..., Any],
    registry: Any,
    make_model: Callable[..., Path],
    taps: list[Tap],
) -> None:
    """The same calls of the loop do nothing."""
    calls: list[str] = []
    taps.append(NotingTap(server_process().url, calls))
    registry.add("server-0", taps[0].url)
    publisher = make_publisher()
    source = LocalTensors(load_file(make_model(seed=1) / "model.safetensors"))
    publisher.take_devices()
    publisher.publish(source, 1)
    publisher.give_devices(source)
    assert not {RELEASE, RESUME} & set(calls)
    assert source.num_left == 0


CUDA = {"kind": "sglang", "device": "cuda", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"publish": {"mode": "in_place"}}, 'publish.mode="in_place" with .*"retract"'),
        ({"publish": {"transport": "collective"}}, "NCCL refuses two processes on one GPU"),
        ({"server": CUDA | {"sglang": {"enable-memory-saver": False}}}, "would keep the memory"),
    ],
)
def test_settings_that_cannot_share_devices_are_refused(
    sections: dict[str, Any], sentence: str
) -> None:
    """Before anything starts, each with what to do."""
    tree = {"model": {"path": "m"}, "server": CUDA, "trainer": {"is_colocated": True}}
    with pytest.raises(SettingsError, match=sentence):
        build_settings(tree | sections, source="test")


def test_sglang_on_shared_gpus_can_release_its_memory(make_model: Callable[..., Path]) -> None:
    """It is asked to at its start; turns are retracted, with a probe aborted."""
    model = {"path": str(make_model())}
    tree = {"model": model, "server": CUDA, "trainer": {"is_colocated": True}}
    settings = build_settings(tree, source="test")
    assert settings.pause_mode == "retract"
    probed = build_settings(tree | {"publish": {"verify": "probe"}}, source="test")
    assert probed.pause_mode == "abort"
    apart = build_settings(tree | {"trainer": {}}, source="test")
    assert apart.pause_mode == "retract"
    for chosen, is_asked in ((settings, True), (apart, None)):
        table = argument_table(chosen, port=1, identity="x")
        assert table.get("enable_memory_saver") is is_asked
