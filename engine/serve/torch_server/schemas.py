"""Request bodies of the torch server's control routes, as SGLang 0.5.23 has them.

A default is SGLang's own; unknown fields are ignored, as there.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel

from outloop.engine.publish.verification.checksum import Algorithm


class AbortBody(BaseModel):
    """/abort_request"""

    rid: str


class PauseBody(BaseModel):
    """/pause_generation"""

    mode: Literal["abort", "in_place", "retract"] = "abort"


MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)


class MemoryBody(BaseModel):
    """/release_memory_occupation, /resume_memory_occupation"""

    tags: list[MemoryTag] | None = None


class FromTensorBody(BaseModel):
    """/update_weights_from_tensor"""

    serialized_named_tensors: list[str]
    load_format: str | None = None


class FromDiskBody(BaseModel):
    """/update_weights_from_disk"""

    model_path: str


class VersionBody(BaseModel):
    """/update_weight_version"""

    new_version: str


class CheckBody(BaseModel):
    """/weights_checker"""

    action: str
    algorithm: Algorithm = "sha256"
    """SGLang knows only its own."""


class FromGroupBody(BaseModel):
    """/update_weights_from_distributed"""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None


class JoinGroupBody(BaseModel):
    """/init_weights_update_group"""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveGroupBody(BaseModel):
    """/destroy_weights_update_group"""

    group_name: str = "weight_update_group"
