"""The frozen model that KL terms pull towards.

Owns: loading it and knowing that it is the same model after a resume. Does not own: the KL
formulas, scoring. Invariant: its weights are those of the model folder that the run began with,
byte for byte, or the run does not start.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from outloop.buffer.errors import SettingsError
from outloop.engine.train.mcore import PolicyConfig, PolicyModel
from outloop.engine.train.weights import load_huggingface

_BLOCK = 2**22


@dataclass(frozen=True, slots=True)
class Reference:
    """A frozen model and the content hash of its folder."""

    model: PolicyModel
    content_hash: str


def content_hash(folder: Path) -> str:
    """SHA-256 over config.json and every safetensors file, names included."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def load_reference(
    config: PolicyConfig, folder: Path, *, pinned_hash: str, device: torch.device
) -> Reference:
    """The model of `folder`, without gradients; random states are left as they were.

    Args:
        pinned_hash: of the reference that the run began with; empty: it begins now.

    Raises:
        SettingsError: the folder's content is not what it was when the run began.
    """
    found = content_hash(folder)
    if pinned_hash and found != pinned_hash:
        raise SettingsError(
            f"model.path={str(folder)!r} has content hash {found[:12]}, but this run is pinned to "
            f"the reference model {pinned_hash[:12]}; put the original files back, or start a new "
            "run.name"
        )
    with torch.random.fork_rng(devices=[]):
        model = PolicyModel(config)
    load_huggingface(model, folder)
    model.requires_grad_(False)
    return Reference(model=model.to(device).eval(), content_hash=found)
