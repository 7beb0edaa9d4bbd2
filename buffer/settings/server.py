"""The settings `[server]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from outloop.buffer.settings.section import Section, refuse_two_spellings

_SGLANG_OWNED = {
    "model_path": "model.path",
    "model": "model.path",
    "host": "server.host",
    "port": "server.port",
    "device": "server.device",
    "dtype": "server.dtype",
    "tp_size": "server.tensor_parallel_size",
    "tp": "server.tensor_parallel_size",
    "tensor_parallel_size": "server.tensor_parallel_size",
    "max_running_requests": "server.max_running_requests",
    "weight_version": "the publisher",
    "api_key": "the run's keys",
    "admin_api_key": "the run's keys",
}
"""SGLang's arguments that outloop sets itself -> the setting, or what sets it."""
_SGLANG_EXPERT_RANKS = ("ep_size", "expert_parallel_size", "ep")


_SGLANG_SUPPORT_IDS = 4096
"""SGLang's default of sampling_mask_max_tokens."""


def refuse_half_of_tls(section: str, cert_file: Path | None, key_file: Path | None) -> None:
    """Refuse a key without a certificate, or the other way round.

    Raises:
        ValueError: one of them is missing.
    """
    if (cert_file is None) != (key_file is None):
        raise ValueError(
            f"{section}.tls_cert_file and {section}.tls_key_file belong together; give both or "
            "neither"
        )


class ServerSettings(Section):
    """The inference servers."""

    kind: Literal["torch", "sglang"] = "torch"
    """torch: the small server of this repository, for laptops. sglang: SGLang."""
    num_servers: int = Field(1, ge=0)
    """0: attach to `urls`."""
    num_frozen: int = Field(0, ge=0)
    """Servers beside these that hold earlier versions of the policy, one each: what
    `policy@VERSION` and `policy@frozen` ask for, and what evaluations of such a version are
    sampled by. What they generate is not trained."""
    frozen_every: int = Field(0, ge=0)
    """Every so many policy versions one is kept for them; each of them holds the newest of its
    own. 0: the first alone."""
    urls: tuple[str, ...] = ()
    """Servers that the run does not start; they are trusted with weights."""
    api_key_file: Path | None = None
    """The key that the servers at `urls` want as a bearer token, if they want one. Servers of
    `num_servers` have a key of the run."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(0, ge=0, le=65535)
    """Of the first server, the next ones count up; 0: any free port."""
    tensor_parallel_size: int = Field(1, gt=0)
    """Processes, and devices, of one SGLang server."""
    max_running_requests: int = Field(128, gt=0)
    """Turns that one server generates at once."""
    num_threads: int = Field(1, gt=0)
    """CPU threads of a torch server."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Limit of a server's start; SGLang alone imports for half a minute on an idle machine."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """cpu, cuda, or cuda:N for a torch server on the Nth device that it sees."""
    gpus: tuple[int, ...] = ()
    """CUDA devices of this machine for the servers, tensor_parallel_size each, in their order;
    empty: the first that are free."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the served weights."""
    tls_cert_file: Path | None = None
    """Servers speak HTTPS with this certificate (PEM, its chain behind it), made for the
    address at which router and trainer reach it."""
    tls_key_file: Path | None = None
    """Its key, without a passphrase."""
    sglang_python: Path | None = None
    """Python of the environment with SGLang; None: that of `make venv-sglang`, for the CPU."""
    sglang: dict[str, Any] = {}
    """Raw SGLang server arguments under their upstream names."""

    def keeps(self, policy_version: int) -> bool:
        """Whether a version is kept for servers that hold earlier ones."""
        if not self.num_frozen:
            return False
        every = self.frozen_every
        return policy_version % every == 0 if every else policy_version == 0

    def holder_of(self, policy_version: int) -> int:
        """Which of `num_frozen` servers holds a version that is kept: they take turns."""
        return policy_version // (self.frozen_every or 1) % self.num_frozen

    @property
    def num_expert_ranks(self) -> int:
        """Over how many ranks a server spreads its experts, according to `sglang`."""
        table = {key.replace("-", "_"): value for key, value in self.sglang.items()}
        sizes = (table[key] for key in _SGLANG_EXPERT_RANKS if key in table)
        return max((size for size in sizes if isinstance(size, int)), default=1)

    @property
    def max_support_ids(self) -> int | None:
        """SGLang: the largest top_k with which it tells what ids were left to sample among; None:
        these servers need no top_k for that."""
        table = {key.replace("-", "_"): value for key, value in self.sglang.items()}
        limit: int = table.get("sampling_mask_max_tokens", _SGLANG_SUPPORT_IDS)
        return limit if self.kind == "sglang" else None

    @property
    def has_checksums(self) -> bool:
        """True if checksums can show whether these servers hold the weights that were sent."""
        return self.kind == "torch" or self.num_expert_ranks == 1

    def _refuse_tls(self) -> None:
        refuse_half_of_tls("server", self.tls_cert_file, self.tls_key_file)
        if self.tls_cert_file is not None and not self.num_servers:
            raise ValueError(
                f"server.tls_cert_file={str(self.tls_cert_file)!r} is for servers that the run "
                "starts; leave it out, and give https:// addresses of servers that have one of "
                "their own as server.urls"
            )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> ServerSettings:
        if self.kind == "torch" and (self.sglang or self.tensor_parallel_size != 1):
            raise ValueError(
                "server.sglang and server.tensor_parallel_size are SGLang's; "
                'set server.kind to "sglang", or leave them out'
            )
        self._refuse_frozen()
        self._refuse_tls()
        if self.api_key_file is not None and self.num_servers:
            raise ValueError(
                f"server.api_key_file={str(self.api_key_file)!r} with server.num_servers="
                f"{self.num_servers}: these servers have a key of the run; leave the file out, or "
                "attach to server.urls with server.num_servers = 0"
            )
        refuse_two_spellings("server.sglang", self.sglang)
        keys = {key.replace("-", "_") for key in self.sglang}
        is_on_gpu = self.kind == "sglang" and self.device.startswith("cuda")
        if is_on_gpu and self.dtype == "float32" and "attention_backend" not in keys:
            raise ValueError(
                'server.dtype="float32" with server.kind="sglang" on CUDA: the attention kernels '
                'that SGLang chooses there take 16 bit only; set server.dtype = "bfloat16", or '
                "name a server.sglang.attention_backend that takes float32"
            )
        if self.sglang.get("tokenizer_worker_num", 1) != 1:
            raise ValueError(
                "server.sglang.tokenizer_worker_num: SGLang takes no key with several tokenizer "
                "workers, and servers of a run have one; leave it out"
            )
        taken = sorted(keys & _SGLANG_OWNED.keys())
        if taken:
            key = taken[0]
            raise ValueError(
                f"server.sglang.{key} is set by {_SGLANG_OWNED[key]}; leave it out of the table"
            )
        return self

    def _refuse_frozen(self) -> None:
        if self.frozen_every and not self.num_frozen:
            raise ValueError(
                f"server.frozen_every={self.frozen_every} without server.num_frozen keeps versions "
                "that no server holds; set server.num_frozen = 1, or leave both out"
            )
        if self.num_frozen > 1 and not self.frozen_every:
            raise ValueError(
                f"server.num_frozen={self.num_frozen} without server.frozen_every: the first "
                "version alone is kept, and one server holds it; set server.frozen_every"
            )
        is_known = self.kind == "torch" and self.device == "cpu" and self.num_servers > 0
        if self.num_frozen and not is_known:
            raise ValueError(
                f"server.num_frozen={self.num_frozen} with server.kind={self.kind!r}, server.device"
                f"={self.device!r} and server.num_servers={self.num_servers}: servers of earlier "
                "versions are torch servers that are started on a CPU beside others of the run. "
                "Elsewhere serve a checkpoint beside the run, and name it in router.upstreams"
            )
