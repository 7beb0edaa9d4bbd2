"""The frozen model that KL terms pull towards.

Its weights are those of the folder that the run began with, byte for byte, or the run does not
start. Its vocabulary is the policy's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from outloop.buffer.errors import SettingsError
from outloop.buffer.routed_experts import replayed_shape
from outloop.buffer.settings import Settings
from outloop.engine.train.megatron.import_weights import load_huggingface
from outloop.engine.train.megatron.model_and_optimizer import PolicyConfig, PolicyModel
from outloop.engine.train.megatron.model_config import read_config_beside

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


def read_reference_config(settings: Settings, policy: PolicyConfig) -> PolicyConfig:
    """The configuration of the reference, split over the ranks as the policy is.

    Raises:
        SettingsError: its vocabulary, or with routing replay its experts, are others than the
            policy's, or its folder is refused.
    """
    trainer = settings.trainer
    if trainer.reference_path is None:
        return policy
    config = read_config_beside(policy, trainer.reference_path, settings, "trainer.reference_path")
    if replayed_shape(settings) and config.routing not in (None, policy.routing):
        raise SettingsError(
            f"trainer.reference_path={str(trainer.reference_path)!r} has {config.routing}, "
            f"model.path={str(settings.model.path)!r} has {policy.routing}: where servers sent "
            "tokens cannot be replayed in it. Set trainer.routing_replay = false, or give a "
            "reference with the policy's experts"
        )
    return config


def move_reference(reference: PolicyModel, policy: PolicyModel, *, decay: float) -> None:
    """reference = decay * reference + (1 - decay) * policy, parameter by parameter; 0: a copy.

    An average is the anchor of WARP, arXiv:2406.16768, section 3.1 (EMA); copies after some
    steps are those of ProRL, arXiv:2505.24864, section 3.3, without its reset of the optimizer.
    """
    mine, theirs = dict(reference.named_parameters()), dict(policy.named_parameters())
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.lerp_(theirs[name].to(parameter.dtype), 1.0 - decay)


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
            f"folder {str(folder)!r} has content hash {found[:12]}, but this run is pinned to the "
            f"reference model {pinned_hash[:12]}; put the original files back, or start a new "
            "run.name"
        )
    with torch.random.fork_rng(devices=[]):
        model = PolicyModel(config)
    load_huggingface(model, folder)
    model.requires_grad_(False)
    return Reference(model=model.to(device).eval(), content_hash=found)
