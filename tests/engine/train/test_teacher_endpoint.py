"""A teacher that is served elsewhere: the scores of a real server, and everything that can be wrong
with one."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.bandit_run import FAST, Setup
from fakes.scoring_server import VOCAB, ScoringServer
from fakes.torch_server_process import ServerProcess
from outloop.buffer.errors import SettingsError, UpdateRefused
from outloop.buffer.settings import Settings
from outloop.engine.train.data.samples import Sample
from outloop.engine.train.data.train_batch import TrainBatch
from outloop.engine.train.megatron.model_and_optimizer import read_config
from outloop.engine.train.step.reference_model import load_reference
from outloop.engine.train.step.teacher import teacher_columns
from outloop.engine.train.step.teacher_endpoint import TeacherEndpoint

MakeSamples = Callable[..., list[Sample]]
MakeRun = Callable[..., Setup]


@pytest.fixture
def serve() -> Iterator[Callable[..., ScoringServer]]:
    """Start a server that behaves as told."""
    servers: list[ScoringServer] = []

    def start(behaviour: str, **options: Any) -> ScoringServer:
        servers.append(ScoringServer(behaviour, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def ask() -> Iterator[Callable[..., TeacherEndpoint]]:
    """Make the asking side."""
    made: list[TeacherEndpoint] = []

    def make(*urls: str, **teacher: Any) -> TeacherEndpoint:
        settings = settings_of(*urls, **teacher)
        assert settings.trainer.teacher is not None
        made.append(TeacherEndpoint(settings.trainer.teacher, vocab_size=VOCAB))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def settings_of(*urls: str, path: Path = Path("m"), **teacher: Any) -> Settings:
    """A run with a served teacher."""
    return Settings(
        model={"path": path},
        trainer={"recipe": "distill", "teacher": {"urls": urls, "timeout_s": 20.0} | teacher},
    )


def columns_of(endpoint: TeacherEndpoint, samples: list[Sample], **contexts: Any) -> Any:
    """What the endpoint makes of them; what it said meanwhile is left out."""
    return endpoint.columns(TrainBatch.of(samples), contexts, on_wait=lambda sentence: None)


@pytest.mark.medium
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_server_scores_as_the_ranks_do(
    top_k: int,
    ask: Callable[..., TeacherEndpoint],
    make_samples: MakeSamples,
    tiny_folder: Callable[..., Path],
) -> None:
    """One folder, behind our torch server and on this rank: the same columns, whatever the teacher
    alone sees."""
    folder, samples = tiny_folder(), make_samples(5)
    contexts = {"e0": (3, 4), "e2": (5,)}
    model = load_reference(
        read_config(folder, {}), folder, pinned_hash="", device=torch.device("cpu")
    ).model
    wanted = teacher_columns(
        model,
        TrainBatch.of(samples),
        contexts,
        top_k=top_k,
        vocab_size=VOCAB,
        max_tokens=64,
        on_microbatch=lambda: None,
    )
    server = ServerProcess(folder, max_context_tokens=128)
    try:
        endpoint = ask(server.url, top_k=top_k, max_concurrent_requests=3)
        endpoint.check(settings_of(server.url, path=folder))
        found = columns_of(endpoint, samples, **contexts)
    finally:
        server.kill()
    assert found.keys() == wanted.keys()
    mask = TrainBatch.of(samples).loss_mask
    for name, column in found.items():
        assert column.shape == wanted[name].shape
        assert column[mask] == pytest.approx(wanted[name][mask], abs=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("refuses", "does not score the policy's ids up to 399"),
        ("short", "scored 2 ids"),
        ("other", "or other ids than those"),
        ("nothing", "gave no top logprobs of its input"),
        ("foreign", "named id 401 as probable; the policy has vocab_size=400"),
        ("busy", "does not answer"),
    ],
)
def test_a_server_that_cannot_be_a_teacher_is_refused_before_the_start(
    behaviour: str,
    sentence: str,
    serve: Callable[..., ScoringServer],
    ask: Callable[..., TeacherEndpoint],
) -> None:
    """Each of several is asked; the sentence names it and what is wrong."""
    good, bad = serve("uniform"), serve(behaviour)
    endpoint = ask(good.url, bad.url, top_k=2)
    with pytest.raises(SettingsError) as caught:
        endpoint.check(settings_of(good.url, bad.url))
    assert sentence in str(caught.value)
    assert bad.url in str(caught.value)
    assert good.num_requests == 1


@pytest.mark.medium
def test_a_server_of_another_tokenizer_is_refused(
    serve: Callable[..., ScoringServer], ask: Callable[..., TeacherEndpoint], tmp_path: Path
) -> None:
    """Where the server says which folder its tokenizer is from."""
    for name, word in (("own", "a"), ("its", "b")):
        (tmp_path / name).mkdir()
        content = f'{{"model": {{"vocab": {{"{word}": 0}}}}, "added_tokens": []}}'
        (tmp_path / name / "tokenizer.json").write_text(content)
    server = serve("uniform", tokenizer_path=str(tmp_path / "its"))
    with pytest.raises(SettingsError, match="has another vocabulary.*token 'a' is None there"):
        ask(server.url).check(settings_of(server.url, path=tmp_path / "own"))


def test_nobody_listens(ask: Callable[..., TeacherEndpoint]) -> None:
    """At the start, in a sentence."""
    endpoint = ask("http://127.0.0.1:9", timeout_s=2.0)
    with pytest.raises(SettingsError, match="http://127.0.0.1:9 does not answer.*Start it first"):
        endpoint.check(settings_of("http://127.0.0.1:9"))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("busy", "did not score the take within trainer.teacher.timeout_s=4"),
        ("short", "or other ids than those"),
        ("nan", "not finite"),
    ],
)
def test_a_step_without_scores_is_refused_whole(
    behaviour: str,
    sentence: str,
    setup: MakeRun,
    serve: Callable[..., ScoringServer],
    ask: Callable[..., TeacherEndpoint],
) -> None:
    """No weight is touched, nothing is acknowledged; the run goes on where it was."""
    server = serve("uniform")
    teacher = {"urls": [server.url], "timeout_s": 4.0}
    chosen: dict[str, Any] = {
        "trainer": FAST | {"recipe": "distill", "num_steps": 3, "teacher": teacher},
        "buffer": {"group_size": 4},
    }
    run = setup(reward_of=lambda token: 0.0, **chosen)
    endpoint = ask(server.url, timeout_s=4.0)
    after: list[dict[str, torch.Tensor]] = []

    def break_down() -> None:
        if run.buffer.num_takes == 2:
            server.behaviour = behaviour
            after.append({n: p.detach().clone() for n, p in run.policy.model.named_parameters()})

    run.buffer.on_take = break_down
    with pytest.raises(UpdateRefused) as caught:
        run.train(teacher=endpoint)
    assert sentence in str(caught.value)
    kept = dict(run.policy.model.named_parameters())
    assert all(torch.equal(kept[name], before) for name, before in after[0].items())
    assert not run.buffer.marks
    server.behaviour = "uniform"
    again = setup(reward_of=lambda token: 0.0, **chosen)
    rows = again.train(teacher=endpoint)
    assert [row["step"] for row in rows][-3:] == [1, 2, 3]
    assert all(np.isfinite(row["train/teacher_kl"]) for row in rows)


@pytest.mark.medium
def test_a_server_that_comes_back_within_the_deadline_is_waited_for(
    serve: Callable[..., ScoringServer],
    ask: Callable[..., TeacherEndpoint],
    make_samples: MakeSamples,
) -> None:
    """And what is awaited is said."""
    server = serve("busy")
    sentences: list[str] = []
    back = threading.Event()

    def on_wait(sentence: str) -> None:
        sentences.append(sentence)
        if server.num_requests >= 2:
            server.behaviour = "uniform"
            back.set()

    endpoint = ask(server.url, max_concurrent_requests=2)
    found = endpoint.columns(TrainBatch.of(make_samples(3)), {}, on_wait=on_wait)
    assert back.is_set()
    assert sentences[0] == "the teacher's scores (0 of 3 rows)"
    mask = TrainBatch.of(make_samples(3)).loss_mask
    assert found["teacher_logprobs"][mask] == pytest.approx(-np.log(VOCAB))


@pytest.mark.medium
def test_tokens_of_another_temperature_are_refused(
    serve: Callable[..., ScoringServer],
    ask: Callable[..., TeacherEndpoint],
    make_samples: MakeSamples,
) -> None:
    """An agent's own temperature may be recorded; a server's scores are not of it."""
    with pytest.raises(UpdateRefused, match="score at temperature 1"):
        columns_of(ask(serve("uniform").url), make_samples(2, temperature=0.5))
