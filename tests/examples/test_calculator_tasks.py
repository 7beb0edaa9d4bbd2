"""The calculator's problems, its scripted players and its initial policy."""

from pathlib import Path

import pytest
from agent import evaluate
from tasks import (
    NUM_CONVERSATIONS,
    conversation,
    conversations,
    eval_tasks,
    oracle_player,
    problems,
    reward_of,
    scripted_player,
    train_tasks,
)
from tokenizers import Tokenizer

from outloop.buffer.settings import load_settings
from outloop.engine.models.random_init import renderer_of, train_tokenizer
from outloop.envs.runner.preflight import check_rollout

CALCULATOR = Path(__file__).resolve().parents[2] / "examples/calculator"


@pytest.mark.medium
def test_held_out_problems_are_seen_by_nobody_else() -> None:
    """Warm start, RL and evaluation: the first two share no problem with the third."""
    trained = {task["question"] for task in train_tasks()}
    warm = {row["messages"][1]["content"] for row in conversations()}
    held_out = {task["question"] for task in eval_tasks()}
    every = sum(len(problems(split)) for split in ("train", "validation", "test"))
    assert not (trained | warm) & held_out
    assert not (trained | warm) & set(problems("validation"))
    assert len(warm) == NUM_CONVERSATIONS
    assert every == 24300
    assert 0.18 < 1 - len(trained) / every < 0.22


@pytest.mark.medium
def test_the_warm_start_is_mediocre_and_the_oracle_is_not() -> None:
    """The scripted player's expected reward; no model takes part."""
    assert 0.28 < reward_of(scripted_player) < 0.38
    assert reward_of(oracle_player) == 1.0


@pytest.mark.medium
def test_conversations_hold_guesses_calls_and_slips() -> None:
    """The SFT data are the scripted player's: mostly wrong, never chosen by their reward."""
    rows = conversations()
    called = [row for row in rows if len(row["messages"]) > 3]
    slipped = [
        row
        for row in called
        if row["messages"][1]["content"]
        not in row["messages"][2]["tool_calls"][0]["function"]["arguments"]
    ]
    right = [
        row
        for row in rows
        if row["messages"][-1]["content"] == str(evaluate(row["messages"][1]["content"]))
    ]
    assert 0.3 < len(called) / len(rows) < 0.5
    assert 0.03 < len(slipped) / len(called) < 0.2
    assert 0.28 < len(right) / len(rows) < 0.40


@pytest.mark.medium
@pytest.mark.parametrize("name", ["warm_start.toml", "run.toml"])
def test_the_settings_files_pass_the_check(name: str) -> None:
    """Both files load, and what they name can be imported from their own folder."""
    check_rollout(load_settings(CALCULATOR / name))


@pytest.mark.medium
def test_transformers_loads_the_policy(policy_folder: Path) -> None:
    """Model and tokenizer load as any Hugging Face folder, with the configured parameter count."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 100_000 < sum(weight.numel() for weight in model.parameters()) < 200_000
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.medium
def test_the_template_says_what_the_renderer_says(policy_folder: Path) -> None:
    """The folder's chat template gives the renderer's text, tools and generation prompt too."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    own = Tokenizer.from_file(str(policy_folder / "tokenizer.json"))
    renderer = renderer_of(own)
    rows = [*conversations()[:40], conversation("12*70", [])]
    for row in rows:
        for ends_in_prompt in (False, True):
            text = tokenizer.apply_chat_template(
                row["messages"],
                tools=row["tools"],
                tokenize=False,
                add_generation_prompt=ends_in_prompt,
            )
            ids = renderer.render_ids(
                row["messages"], tools=row["tools"], add_generation_prompt=ends_in_prompt
            )
            assert own.decode(ids, skip_special_tokens=False) == text


@pytest.mark.medium
def test_episodes_are_short(policy_folder: Path) -> None:
    """Trained episodes average under 90 ids, tool preamble and both turns included."""
    renderer = renderer_of(Tokenizer.from_file(str(policy_folder / "tokenizer.json")))
    lengths = [
        len(renderer.render_ids(row["messages"], tools=row["tools"]))
        for row in (conversation(q, oracle_player(q, None)) for q in problems("test")[:200])
    ]
    assert sum(lengths) / len(lengths) < 90


@pytest.mark.medium
def test_digits_stay_single() -> None:
    """No token holds a digit beside anything else, so copying is digit by digit."""
    tokenizer = train_tokenizer(conversations()[:200], 640)
    mixed = [
        token
        for token in tokenizer.get_vocab()
        if len(token) > 1 and any(character.isdigit() for character in token)
    ]
    assert mixed == []
