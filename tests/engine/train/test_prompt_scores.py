"""What the trainer says of a probe's prompts."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from outloop.buffer.run import create_run
from outloop.buffer.settings import Settings
from outloop.engine.publish.verification.logprob_probe import probe_prompts
from outloop.engine.train.ranks.controller import RankController


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_prompts_are_scored_by_the_weights_that_are_published(
    kind: str,
    tmp_path: Path,
    tiny_folder: Callable[..., Path],
    make_ranks: Callable[..., RankController],
) -> None:
    """An id's logprob by one full forward of transformers, for every id but the first."""
    folder = tiny_folder(kind)
    run = create_run(Settings(model={"path": folder}), tmp_path / "run", "unix:///nowhere")
    ranks = make_ranks(run, num_updates=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = probe_prompts(400)
    assert sorted({token * len(prompts) // 400 for ids in prompts for token in ids}) == [0, 1, 2, 3]
    for ids, got in zip(prompts, ranks.score_prompts(prompts), strict=True):
        with torch.inference_mode():
            table = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        expected = table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()
        assert np.allclose(got, expected, atol=1e-4)
