"""Our restatement of SGLang's GPU hash."""

import itertools
import json
import subprocess
from pathlib import Path

import pytest
import torch

from outloop.engine.publish.verification.sglang_gpu_hash import GpuHash
from outloop.engine.serve.sglang.cpu_environment import find_python

KNOWN = {
    1: "d7f1f4357db32352",
    3: "191bdeb735cb4f3f",
    4: "d8097d9413bc9b31",
    5: "0476f43feca13847",
    100: "8f5c0ded9e572284",
    32768: "636b2d513320d9ec",
    32769: "39bc791dae4809a4",
    40000: "26807acc4d85ab90",
    100001: "689783f9c4be911a",
}
"""Of bytes that a generator seeded with the length gives, made by SGLang 0.5.23's own kernels."""


def _content(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


def _hash(*pieces: torch.Tensor) -> str:
    made = GpuHash()
    for piece in pieces:
        made.update(piece)
    return made.hexdigest()


def test_it_gives_what_sglangs_kernels_gave() -> None:
    """Less than a word, less than a tile, whole tiles, and more than some."""
    assert {length: _hash(_content(length)) for length in KNOWN} == KNOWN


@pytest.mark.sglang
def test_it_gives_what_the_installed_sglangs_kernels_give() -> None:
    """Triton's interpreter runs them without a GPU."""
    program = Path(__file__).with_name("sglang_gpu_hash.py")
    answer = subprocess.run(
        [str(find_python(None)), str(program), json.dumps(list(KNOWN))],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert {int(length): value for length, value in json.loads(answer.stdout).items()} == KNOWN


def test_pieces_make_no_difference() -> None:
    """However the bytes are divided, words and tiles cut in two included."""
    content = _content(100001)
    whole = _hash(content)
    for cuts in ((1,), (32768,), (7, 40001), (32767, 32769, 65536)):
        edges = [0, *cuts, len(content)]
        assert _hash(*(content[a:b] for a, b in itertools.pairwise(edges))) == whole


def test_a_changed_bit_a_swap_and_a_longer_tail_change_it() -> None:
    """What a checksum is for."""
    content = _content(40000)
    flipped, swapped = content.clone(), content.roll(4)
    flipped[39999] ^= 1
    longer = torch.cat([content, content.new_zeros(4)])
    assert len({_hash(each) for each in (content, flipped, swapped, longer)}) == 4
