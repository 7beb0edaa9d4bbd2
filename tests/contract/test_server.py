"""What the loop needs of a server, whichever kind it is (SGLang 0.5.23's HTTP contract)."""

import asyncio
import json
import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from outloop.engine.serve.logprob_convention import check_logprobs

PROMPT = [5, 17, 300, 8, 9, 44, 120, 7, 61, 2]


@pytest.fixture(scope="session")
def reference(started: tuple[str, str, Any]) -> Any:
    """The same weights in transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(started[2], dtype=torch.float32)
    return model.eval()


def _logprobs(reference: Any, ids: list[int], num_prompt: int, temperature: float) -> list[float]:
    """Logprobs of ids[num_prompt:] from one full forward."""
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0] / temperature
    table = torch.log_softmax(logits, -1)
    return [float(table[at - 1, ids[at]]) for at in range(num_prompt, len(ids))]


def _check(answer: dict[str, Any], num_prompt: int) -> None:
    """What holds for every answer."""
    ids, meta = answer["output_ids"], answer["meta_info"]
    logprobs = meta["output_token_logprobs"]
    assert [entry[1] for entry in logprobs] == ids
    assert all(len(entry) == 3 and entry[2] is None for entry in logprobs)
    assert meta["prompt_tokens"] == num_prompt
    assert meta["completion_tokens"] == len(ids)
    position = 0
    for span in meta["weight_versions"]:
        assert span["start"] == position
        position = span["end"]
    assert position == len(ids)


async def test_greedy_generation_equals_transformers(server: Any, reference: Any) -> None:
    """Temperature 0 gives the ids of transformers' greedy generate."""
    answer = await server.generate(PROMPT, temperature=0, max_new_tokens=24, ignore_eos=True)
    ids = torch.tensor([PROMPT])
    expected = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert answer["output_ids"] == expected[0, len(PROMPT) :].tolist()
    _check(answer, len(PROMPT))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_logprobs_are_those_of_a_full_forward(
    server: Any, reference: Any, temperature: float
) -> None:
    """logprob = log_softmax(logits / T) of the sampled id, recomputed independently."""
    answer = await server.generate(
        PROMPT, temperature=temperature, max_new_tokens=20, ignore_eos=True
    )
    _check(answer, len(PROMPT))
    expected = _logprobs(reference, PROMPT + answer["output_ids"], len(PROMPT), temperature)
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.medium
async def test_concurrent_requests_do_not_affect_each_other(server: Any, reference: Any) -> None:
    """40 requests of mixed lengths and temperatures at once: each as if it were alone."""
    generator = torch.Generator().manual_seed(0)

    async def one(index: int) -> None:
        num = 4 + 5 * (index % 9)
        ids = torch.randint(2, 400, (num,), generator=generator).tolist()
        temperature = (0, 0.5, 1.0, 1.3)[index % 4]
        fields = {
            "temperature": temperature,
            "max_new_tokens": 3 + index % 11,
            "ignore_eos": True,
            "sampling_seed": index,
        }
        together = await server.generate(ids, **fields)
        _check(together, num)
        expected = _logprobs(reference, ids + together["output_ids"], num, temperature or 1.0)
        got = [entry[0] for entry in together["meta_info"]["output_token_logprobs"]]
        assert got == pytest.approx(expected, abs=1e-4)
        if not server.has_defect("seed"):
            alone = await server.generate(ids, **fields)
            assert alone["output_ids"] == together["output_ids"]

    await asyncio.gather(*(one(index) for index in range(40)))


async def test_an_extended_prompt_is_answered_as_if_it_were_new(
    server: Any, reference: Any
) -> None:
    """A second turn that extends the first gives the logprobs of a fresh forward."""
    first = await server.generate(PROMPT, max_new_tokens=8, ignore_eos=True, extra_key="a")
    ids = PROMPT + first["output_ids"] + [77, 78, 79]
    second = await server.generate(ids, max_new_tokens=8, ignore_eos=True, extra_key="a")
    expected = _logprobs(reference, ids + second["output_ids"], len(ids), 1.0)
    got = [entry[0] for entry in second["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(expected, abs=1e-4)


async def test_a_seed_repeats_and_its_absence_varies(server: Any) -> None:
    """sampling_seed reproduces the sample; without it, requests differ."""
    fields = {"max_new_tokens": 12, "ignore_eos": True}
    seeded = [await server.generate(PROMPT, **fields, sampling_seed=7) for _ in range(2)]
    is_repeated = seeded[0]["output_ids"] == seeded[1]["output_ids"]
    assert is_repeated != server.has_defect("seed")
    free = [await server.generate(PROMPT, **fields) for _ in range(2)]
    assert free[0]["output_ids"] != free[1]["output_ids"]


async def test_a_stop_id_ends_the_answer_and_is_part_of_it(server: Any) -> None:
    """The id that stops is in output_ids with its logprob; the end-of-text id stops unless told."""
    plain = await server.generate(PROMPT, temperature=0, max_new_tokens=12, ignore_eos=True)
    stop = plain["output_ids"][3]
    answer = await server.generate(PROMPT, temperature=0, max_new_tokens=12, stop_token_ids=[stop])
    _check(answer, len(PROMPT))
    end = plain["output_ids"].index(stop) + 1
    assert answer["output_ids"] == plain["output_ids"][:end]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    limit = await server.generate(PROMPT, temperature=0, max_new_tokens=2, ignore_eos=True)
    assert limit["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


async def test_a_stop_string_ends_the_answer(server: Any) -> None:
    """The id that completes a stop string is the last."""
    tokenizer = Tokenizer.from_file(str(server.folder / "tokenizer.json"))
    fields = {"temperature": 0, "max_new_tokens": 40}
    plain = await server.generate([40, 41, 42], ignore_eos=True, **fields)
    text = tokenizer.decode(plain["output_ids"], skip_special_tokens=False)
    stop = next(c for c in text[1:] if c.isascii() and c.isprintable() and c not in text[:1])
    answer = await server.generate([40, 41, 42], ignore_eos=True, stop=[stop], **fields)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    ids = answer["output_ids"]
    assert ids == plain["output_ids"][: len(ids)]
    assert stop in tokenizer.decode(ids, skip_special_tokens=False)
    assert stop not in tokenizer.decode(ids[:-1], skip_special_tokens=False)


async def test_streaming_gives_what_plain_gives(server: Any) -> None:
    """Events bring new ids with their logprobs, all of them or the new ones; the last says why."""
    fields = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    plain = await server.generate(PROMPT, **fields)
    seen: list[int] = []
    logprobs: list[Any] = []
    events = [event async for event in server.stream(PROMPT, **fields)]
    for event in events:
        meta, ids = event["meta_info"], event["output_ids"]
        is_whole = len(ids) == meta["completion_tokens"]
        seen = ids if is_whole else seen + ids
        have = meta["output_token_logprobs"]
        logprobs = have if len(have) == len(seen) else logprobs + have
        assert len(seen) == len(logprobs) == meta["completion_tokens"]
        assert (meta["finish_reason"] is not None) == (event is events[-1])
    assert len(events) > 1
    assert seen == plain["output_ids"]
    assert [entry[1] for entry in logprobs] == seen
    got = [entry[0] for entry in logprobs]
    expected = [entry[0] for entry in plain["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(expected, abs=1e-4)
    spans = events[-1]["meta_info"]["weight_versions"]
    assert spans == [{"version": "default", "start": 0, "end": 20}]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"input_ids": []}, "input_ids"),
        ({}, "input_ids"),
        ({"input_ids": [1] * 600}, "512"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 512}}, "512"),
        ({"input_ids": [1], "sampling_params": {"foo": 1}}, "foo"),
        ({"input_ids": [1], "sampling_params": {"top_p": 2.0}}, "top_p"),
    ],
)
async def test_bad_requests_get_400_and_a_reason(
    server: Any, body: dict[str, Any], sentence: str
) -> None:
    """Refused with a sentence that names the field, and the server lives on."""
    status, answer = await server.post("/generate", **body)
    assert status == 400
    assert sentence in json.dumps(answer["error"])
    await server.generate(PROMPT, max_new_tokens=1)


@pytest.mark.medium
async def test_abort_returns_what_was_generated(server: Any) -> None:
    """An aborted request answers 200 with its partial ids and finish_reason abort."""
    task = asyncio.create_task(
        server.generate(PROMPT, max_new_tokens=480, ignore_eos=True, rid="mine")
    )
    other = asyncio.create_task(server.generate(PROMPT, max_new_tokens=480, ignore_eos=True))
    await server.wait_until_running(2)
    status, _ = await server.post("/abort_request", rid="mine")
    assert status == 200
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) < 480
    _check(answer, len(PROMPT))
    assert len((await other)["output_ids"]) == 480
    assert (await server.post("/abort_request", rid="nobody"))[0] == 200


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_clients_that_leave_free_their_slots(server: Any, is_streamed: bool) -> None:
    """Requests whose connections close end long before they are complete."""
    num, wanted = 16, 480
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": wanted, "ignore_eos": True},
        "stream": is_streamed,
    }
    tasks = [
        asyncio.create_task(server.session.post(server.url + "/generate", json=body))
        for _ in range(num)
    ]
    await server.wait_until_running(num)
    if is_streamed:
        for task in tasks:
            (await task).close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    most = 0

    def note(load: dict[str, Any]) -> None:
        nonlocal most
        most = max(most, load["num_used_tokens"])

    await server.wait_until_idle(note)
    assert most < num * (len(PROMPT) + wanted) * 0.75


@pytest.mark.medium
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_pause_with_requests_in_flight(server: Any, reference: Any, mode: str) -> None:
    """Held turns go on after a version change with both versions; new ones wait for it."""
    task = asyncio.create_task(server.generate(PROMPT, max_new_tokens=400, ignore_eos=True))
    await server.wait_until_running(1)
    assert (await server.post("/pause_generation", mode=mode))[0] == 200
    assert (await server.get("/health"))[0] == 200
    late = asyncio.create_task(server.generate(PROMPT, max_new_tokens=3, ignore_eos=True))
    await server.post("/update_weight_version", new_version="1", abort_all_requests=False)
    await asyncio.wait({task}, timeout=60 if mode == "abort" else 0.05)
    assert not late.done()
    assert task.done() == (mode == "abort")
    assert (await server.post("/continue_generation"))[0] == 200
    answer, fresh = await task, await late
    _check(answer, len(PROMPT))
    assert [s["version"] for s in fresh["meta_info"]["weight_versions"]] == ["1"]
    versions = [span["version"] for span in answer["meta_info"]["weight_versions"]]
    if mode == "abort":
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert versions == ["default"]
        return
    assert versions == ["default", "1"]
    assert answer["meta_info"]["weight_version"] == "1"
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    expected = _logprobs(reference, PROMPT + answer["output_ids"], len(PROMPT), 1.0)
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx(expected, abs=1e-4)


async def test_weights_from_disk(server: Any, make_model: Any) -> None:
    """New weights are served after the call; a bad path is refused and the old ones stay."""
    fields = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True, "extra_key": "k"}
    before = await server.generate(PROMPT, **fields)
    status, answer = await server.post("/update_weights_from_disk", model_path="/nowhere")
    assert (status, answer["success"]) == (400, False)
    assert (await server.generate(PROMPT, **fields))["output_ids"] == before["output_ids"]
    folder = str(make_model(seed=1))
    status, answer = await server.post("/update_weights_from_disk", model_path=folder)
    assert (status, answer["success"]) == (200, True)
    after = await server.generate(PROMPT, **fields)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["cached_tokens"] == 0


async def test_update_sessions_are_enforced(server: Any) -> None:
    """Tensors need a session; begin twice and end without begin are refused."""
    body = {"serialized_named_tensors": ["x"], "load_format": "flattened_bucket"}
    assert (await server.post("/update_weights_from_tensor", **body))[0] == 400
    assert (await server.post("/end_weight_update"))[0] == 400
    assert (await server.post("/begin_weight_update", selector="all"))[0] == 200
    assert (await server.post("/begin_weight_update", selector="all"))[0] == 400
    assert (await server.post("/end_weight_update"))[0] == 200


async def test_version_and_info(server: Any) -> None:
    """The version is the string that was set; info, load and checksums answer."""
    status, answer = await server.post("/update_weight_version", new_version="12")
    assert (status, answer["new_version"], answer["success"]) == (200, "12", True)
    assert (await server.get("/model_info"))[1]["weight_version"] == "12"
    assert (await server.get("/server_info"))[0] == 200
    load = (await server.get("/v1/loads"))[1]["loads"][0]
    assert load["num_running_reqs"] == 0
    sums = (await server.post("/weights_checker", action="checksum"))[1]["ranks"][0]["checksums"]
    assert len(set(sums.values())) == len(sums) > 10


async def test_its_logprobs_are_of_what_it_samples(server: Any) -> None:
    """It passes the question that is asked when it joins, also when somebody left it paused."""
    await server.post("/pause_generation", mode="retract")
    await asyncio.to_thread(check_logprobs, "server-0", server.url, dtype="float32", timeout_s=60)


async def test_a_server_tells_among_which_ids_it_sampled(server: Any) -> None:
    """Plain and streamed: as many as top_k allows, the sampled one with them, and its logprob is
    that of the whole vocabulary over the probability of all of them."""
    parameters = {"top_p": 0.7, "top_k": 12, "temperature": 0.8, "max_new_tokens": 16}
    body = {
        "input_ids": list(range(5, 15)),
        "sampling_params": {**parameters, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 20,
        "return_sampling_mask": True,
    }
    status, answer = await server.post("/generate", **body)
    assert status == 200, answer
    meta = answer["meta_info"]
    assert meta["output_token_sampling_mask_length"] == 16
    num_left = set()
    for token, left, logprob, (whole, _, _), top in zip(
        answer["output_ids"],
        meta["output_token_sampling_mask"],
        meta["output_token_sampling_logprobs"],
        meta["output_token_logprobs"],
        meta["output_top_logprobs"],
        strict=True,
    ):
        by_id = {entry[1]: entry[0] for entry in top}
        assert token in left
        assert sorted(left) == sorted(list(by_id)[: len(left)])
        mass = sum(math.exp(by_id[one]) for one in left)
        assert logprob == pytest.approx(whole - math.log(mass), abs=1e-4)
        num_left.add(len(left))
    assert max(num_left) == 12, "the tiny model is nearly uniform, so top_k cuts first"
    async with server.session.post(server.url + "/generate", json=body | {"stream": True}) as sent:
        lines = [line async for line in sent.content if line.startswith(b"data: {")]
    pieces = [json.loads(line[6:])["meta_info"]["output_token_sampling_mask"] for line in lines]
    masks = pieces[-1] if len(pieces[-1]) == 16 else [mask for piece in pieces for mask in piece]
    assert len(masks) == 16
    assert all(1 <= len(mask) <= 12 for mask in masks)
