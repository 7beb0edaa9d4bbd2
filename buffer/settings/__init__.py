"""The one settings object of a run, and the only reader of TOML and of the OUTLOOP_* environment.

Settings are frozen. An unknown key is refused with the nearest known one; rules across sections
refuse, and never rewrite. Options in the raw tables (`server.sglang`, `trainer.megatron`) are
checked by the part that passes them on.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import Field, ValidationError, model_validator

from outloop.buffer.errors import SettingsError
from outloop.buffer.records import Sampling
from outloop.buffer.sampling_support import MAX_COUNT
from outloop.buffer.settings.buffer import BufferSettings
from outloop.buffer.settings.deploy import DeploySettings
from outloop.buffer.settings.env import EnvSettings, EvalSettings, check_evaluations
from outloop.buffer.settings.recipes import (
    DEFAULT_MAX_NEW_TOKENS,
    DERIVED,
    USES_PARTS,
    trainer_defaults,
    with_recipe,
)
from outloop.buffer.settings.section import Section
from outloop.buffer.settings.server import ServerSettings, refuse_half_of_tls
from outloop.buffer.settings.telemetry import AlarmSettings, TelemetrySettings
from outloop.buffer.settings.trainer import TrainerSettings
from outloop.buffer.settings.trajectories import TrajectorySettings


class RunSettings(Section):
    """Where a run lives and how it is named."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")
    """Folder under `dir` and key prefix in Redis: letters, digits, `.`, `_` and `-`, the last two
    not in front."""
    dir: Path = Path("runs")
    """Folder in which each run has a folder of its own."""
    seed: int = 0
    """Task order, weight initialisation and sampling seeds derive from it."""
    keys_file: Path | None = None
    """Runner, admin and episode keys, made if not there. None: secrets.json in the run folder."""
    tls_ca_file: Path | None = None
    """Certificates of the authorities by which the run's parts and its agents trust router and
    servers: parts set SSL_CERT_FILE to it, where the file is. None: those of the system."""
    network_interface: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$")
    """Such as eth0: by which servers and trainer ranks reach each other, where a machine has
    several. They set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to it, unless the environment has
    them. None: NCCL and gloo choose."""


class ModelSettings(Section):
    """The policy: a Hugging Face folder, or a repository of their hub."""

    path: Path
    """Folder with config.json, model.safetensors and tokenizer.json; or a repository such as
    "Qwen/Qwen3-8B", which is downloaded at the start into huggingface_hub's cache (HF_HOME)."""
    revision: str | None = None
    """Branch, tag or commit of a repository; None: its main branch when the run begins. A run's
    settings.json has the commit."""
    repository: str | None = None
    """Written by the launcher into a run's settings.json: the repository that `path` came from."""
    renderer: str = "auto"
    """Name of a `renderers` family; "default" for the chat template in the folder; or auto: by the
    model and its tokenizer."""
    renderer_options: dict[str, Any] = {}
    """Passed to the renderer, for example { enable_thinking = false }."""
    name: str = "policy"
    """What agents send as `model`."""
    max_context_tokens: int = Field(2048, gt=0)
    """Prompt and answer together, at most the model's max_position_embeddings; longer prompts are
    answered 400."""


Governance = Literal["enforce", "record", "reject"]
_GOVERNED = (
    *("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "seed", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("response_format", "tool_choice"),
)
"""Parameters of clients that the run governs, by their names here."""


class SamplingSettings(Section):
    """What trained traffic is sampled with, and what happens to a client's own values."""

    temperature: float = Field(1.0, gt=0)
    """At which trained traffic is sampled; greedy decoding cannot be trained."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the most probable ids that hold this much of the probability; 1: all."""
    top_k: int = Field(-1, ge=-1)
    """Sample among so many of the most probable ids; -1: all. SGLang tells which ids were left only
    where this is set, from 2 to its sampling_mask_max_tokens."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample among ids at least this much as probable as the most probable one; 0: all."""
    max_support_ids: int = Field(1024, ge=0, le=MAX_COUNT)
    """Where top_p, top_k, min_p or a grammar left at most so many ids, they are recorded with the
    token, and it is trained by its distribution over them; other such tokens are not trained."""
    max_new_tokens: int = Field(DEFAULT_MAX_NEW_TOKENS, gt=0)
    """Of one answer, unless the client sets a smaller number."""
    governance: Governance = "enforce"
    """enforce: the run's value wins. record: the client's wins and is recorded. reject: 400."""
    governance_by_parameter: dict[str, Governance] = {}
    """Governance of single parameters, by name. `response_format` is "record" unless it is given
    here: the agent needs an answer under its grammar."""

    def governance_of(self, parameter: str) -> Governance:
        """What happens when a client sets `parameter`."""
        own = {"response_format": "record", **self.governance_by_parameter}
        found: Any = own.get(parameter, self.governance)
        return found

    @property
    def cuts(self) -> bool:
        """True if the run itself samples from a part of the vocabulary."""
        return self.top_p != 1.0 or self.top_k > 0 or self.min_p != 0.0

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> SamplingSettings:
        if self.top_k in (0, 1):
            raise ValueError(
                f"sampling.top_k={self.top_k}: one id has no alternative, and nothing is learned "
                "from it; -1 or at least 2 is allowed"
            )
        for name in self.governance_by_parameter:
            if name not in _GOVERNED:
                near = difflib.get_close_matches(name, _GOVERNED, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"sampling.governance_by_parameter.{name}: no parameter has that name; {hint}"
                    f"{', '.join(_GOVERNED)} are allowed"
                )
        if self.cuts and max(self.top_k, 1) > self.max_support_ids:
            raise ValueError(
                f"sampling.top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p} with "
                f"sampling.max_support_ids={self.max_support_ids}: tokens sampled among more ids "
                "would not be trained; raise max_support_ids, or leave the vocabulary whole"
            )
        return self


class UpstreamSettings(Section):
    """Another model, a judge for example: proxied, never recorded or trained."""

    base_url: str = Field(pattern=r"^https?://")
    """URL of its OpenAI-compatible API."""
    model: str | None = None
    """Its name at that URL; None: the same as here."""
    api_key_env: str | None = None
    """Environment variable that holds its key."""
    max_requests_per_episode: int = Field(256, gt=0)
    """Further requests are refused. Each router process counts requests and tokens by itself."""
    max_tokens_per_episode: int = Field(1_000_000, gt=0)
    """By the usage in its answers; without one, a token is counted for every four bytes."""
    max_answer_mb: float = Field(16.0, gt=0)
    """A larger answer is refused, or cut off if it is streamed."""


class RouterSettings(Section):
    """The OpenAI-compatible front."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for other machines."""
    port: int = Field(0, ge=0, le=65535)
    """0: any free port."""
    num_processes: int = Field(1, gt=0)
    """Router processes that the launcher starts behind one port; `max_queued_turns` is divided
    among them."""
    tls_cert_file: Path | None = None
    """Speak HTTPS with this certificate (PEM, its chain behind it), made for the address at which
    runners and agents reach the router."""
    tls_key_file: Path | None = None
    """Its key, without a passphrase."""
    public_url: str | None = Field(None, pattern=r"^https?://[^/?#\s]+(/[^?#\s]*[^/?#\s])?$")
    """Where agents reach the router if not where the runner does, for example `https://rl.example.org`
    of a proxy with TLS: no slash at its end. Episodes are given addresses under it."""
    shares_port: bool = False
    """Router processes that you start by hand may listen on the same `port`, as those of
    `num_processes` do; the kernel spreads connections over them."""
    unkeyed: Literal["refuse", "serve"] = "refuse"
    """Traffic without an episode key: 401, or served without being recorded for training."""
    max_requests_per_s: float | None = Field(None, gt=0)
    """Of each key, in each router process: more are told to come again later (503). None: no
    limit. A runner's key opens, scores and closes its episodes; an episode's makes its turns."""
    audit_log: bool = False
    """Log who did what: rewards, closes, tasks, trajectories, pauses, by the name of the key."""
    cors_origins: tuple[str, ...] = ()
    """Origins, such as `https://example.org`, whose pages may use the router from a browser; `*`:
    all."""
    turn_timeout_s: float = Field(120.0, gt=0)
    """From a request to its whole answer, waiting for a server included."""
    buffer_timeout_s: float = Field(30.0, ge=0)
    """How long a turn waits while Redis is unreachable, before it starts and before it is recorded;
    then 503."""
    drain_timeout_s: float = Field(20.0, ge=0)
    """How long a router that is stopped finishes its in-flight turns."""
    max_turns_per_episode: int = Field(64, gt=0)
    """Further model calls of the episode are answered 404, `turn_budget_spent`."""
    max_tokens_per_episode: int | None = Field(None, gt=0)
    """Ids of all its turns: prompts after their parents', and outputs; None: no limit."""
    max_concurrent_turns_per_episode: int = Field(64, gt=0)
    """Turns that an episode's key may have in flight at once in each router process."""
    max_queued_turns: int = Field(4096, gt=0)
    """Turns that wait for a free server; further ones are answered 503."""
    max_body_mb: float = Field(8.0, gt=0)
    """Largest request of an agent, also after decompression; a larger one is refused with 413."""
    log_turns: bool = False
    """True: each recorded turn is logged at level info; False: at debug."""
    upstreams: dict[str, UpstreamSettings] = {}
    """By the model name that agents send."""

    @model_validator(mode="after")
    def _refuse_half(self) -> RouterSettings:
        refuse_half_of_tls("router", self.tls_cert_file, self.tls_key_file)
        return self


class PublishSettings(Section):
    """How weights reach the servers."""

    transport: Literal["shared_memory", "cuda_ipc", "collective", "disk"] = "shared_memory"
    """shared_memory, cuda_ipc: servers on this machine, or GPU, read the trainer's staging.
    collective: servers anywhere join a group with the trainer. disk: they share a file system."""
    host: str = "127.0.0.1"
    """collective: the trainer's address, as servers reach it."""
    fallback: Literal["disk", "none"] = "disk"
    """How weights reach servers that were quarantined, and all servers if the transport fails on
    all of them."""
    mode: Literal["in_place", "retract", "abort"] | None = None
    """What happens to in-flight turns during a publish; None: in_place on the torch server, retract
    on SGLang and where servers share the trainer's devices, abort with a probe."""
    bucket_mb: float = Field(128.0, gt=0)
    """Size of the buckets in which weights are sent; two are held at a time."""
    phase_timeout_s: float = Field(60.0, gt=0)
    """Limit of each phase of a publish; a server that takes longer is quarantined. The first byte
    over a new group (collective) has a third of it."""
    verify: Literal["checksum", "probe", "none"] | None = None
    """checksum: compare every tensor's bytes on every server. probe: compare the logprobs of a
    fixed prompt. None: probe for SGLang with experts spread over ranks, else checksum."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Mean difference of logprobs, nats; none: 0.03 in float32, 0.25 in bfloat16."""
    overlaps_training: bool = True
    """true: where buffer.max_staleness allows it, the trainer copies its weights into memory (in
    server.dtype, each rank its share) and trains on while they are published. false: it waits."""


class Settings(Section):
    """Every setting of a run; see `load_settings` for where values come from."""

    run: RunSettings = RunSettings()  # type: ignore[call-arg]
    model: ModelSettings
    env: EnvSettings = EnvSettings()  # type: ignore[call-arg]
    buffer: BufferSettings = BufferSettings()  # type: ignore[call-arg]
    sampling: SamplingSettings = SamplingSettings()  # type: ignore[call-arg]
    router: RouterSettings = RouterSettings()  # type: ignore[call-arg]
    server: ServerSettings = ServerSettings()  # type: ignore[call-arg]
    trainer: TrainerSettings = TrainerSettings()  # type: ignore[call-arg]
    publish: PublishSettings = PublishSettings()  # type: ignore[call-arg]
    eval: EvalSettings = EvalSettings()  # type: ignore[call-arg]
    telemetry: TelemetrySettings = TelemetrySettings()  # type: ignore[call-arg]
    alarms: AlarmSettings = AlarmSettings()  # type: ignore[call-arg]
    trajectories: TrajectorySettings = TrajectorySettings()  # type: ignore[call-arg]
    deploy: DeploySettings = DeploySettings()  # type: ignore[call-arg]

    @model_validator(mode="before")
    @classmethod
    def _apply_recipe(cls, tree: Any) -> Any:
        """`trainer.recipe` sets defaults in [trainer] and [buffer]."""
        return with_recipe(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _refuse_unused_authorities(self) -> Settings:
        urls = (self.router.public_url or "", *self.server.urls)
        has_tls = self.router.tls_cert_file is not None or self.server.tls_cert_file is not None
        if (
            self.run.tls_ca_file is not None
            and not has_tls
            and not any(url.startswith("https://") for url in urls)
        ):
            raise ValueError(
                f"run.tls_ca_file={str(self.run.tls_ca_file)!r} has no effect: neither router nor "
                "servers speak HTTPS; set router.tls_cert_file, server.tls_cert_file or an "
                "https:// address, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Settings:
        own = self.trainer.advantage_path is not None
        has_take_baseline = self.trainer.advantage in ("reinforce_pp", "gae", "none") and not own
        if self.trainer.mode == "rl" and self.buffer.group_size < 2 and not has_take_baseline:
            raise ValueError(
                f"buffer.group_size={self.buffer.group_size} with "
                f'trainer.advantage="{self.trainer.advantage}" makes every advantage zero; '
                'set buffer.group_size to 2 or more, or trainer.advantage = "reinforce_pp"'
            )
        is_compared = self.trainer.advantage != "none" or own
        num_episodes = self.buffer.group_size * self.trainer.groups_per_step
        if self.trainer.mode == "rl" and is_compared and num_episodes < 2:
            raise ValueError(
                "buffer.group_size=1 with trainer.groups_per_step=1 leaves an episode nothing to "
                "be compared with; set trainer.groups_per_step to 2 or more"
            )
        self._refuse_idle_scores()
        self._refuse_wrong_teacher()
        self._refuse_unknown_support()
        self._refuse_unknown_sources()
        pass_k = self.trainer.pass_k
        if pass_k is not None and pass_k >= self.buffer.group_size:
            raise ValueError(
                f"trainer.pass_k={pass_k} with buffer.group_size={self.buffer.group_size}: the "
                "best of all attempts says nothing of one; less than group_size is allowed"
            )
        check_evaluations(self.env, self.eval)
        self.refuse_cut(self.env.episode_deadline_s, "env.episode_deadline_s")
        if self.server.num_servers == 0 and not self.server.urls and self.trainer.mode == "rl":
            raise ValueError(
                "server.num_servers=0 needs server.urls=[...]; "
                "name the servers to attach to, or set server.num_servers to 1 or more"
            )
        if self.publish.transport == "cuda_ipc" and not self.server.device.startswith("cuda"):
            raise ValueError(
                f'publish.transport="cuda_ipc" with server.device={self.server.device!r}: a server '
                'without a GPU cannot map its memory; set publish.transport="shared_memory"'
            )
        is_shared = self.trainer.is_colocated
        if (
            self.publish.transport == "cuda_ipc"
            and self.server.tensor_parallel_size > 1
            and not is_shared
        ):
            raise ValueError(
                f'publish.transport="cuda_ipc" with server.tensor_parallel_size='
                f"{self.server.tensor_parallel_size}: no trainer rank is beside every rank of a "
                'server; set trainer.is_colocated = true, or publish.transport="collective"'
            )
        self._refuse_server_contradictions()
        if self.trainer.is_colocated and self.trainer.mode == "rl":
            self._refuse_colocation_contradictions()
        return self

    def _refuse_colocation_contradictions(self) -> None:
        if self.publish.mode == "in_place":
            raise ValueError(
                'publish.mode="in_place" with trainer.is_colocated=true: turns that are held in '
                'place need the memory that the trainer takes; "retract" and "abort" are allowed'
            )
        if self.joins_by_nccl:
            raise ValueError(
                'publish.transport="collective" with trainer.is_colocated=true: NCCL refuses two '
                'processes on one GPU; set publish.transport="cuda_ipc"'
            )
        saver = {k.replace("-", "_"): v for k, v in self.server.sglang.items()}
        if saver.get("enable_memory_saver") is False:
            raise ValueError(
                "server.sglang.enable_memory_saver=false with trainer.is_colocated=true: the "
                "servers would keep the memory that the trainer needs; leave it out"
            )

    def _refuse_idle_scores(self) -> None:
        trainer = self.trainer
        names = {trainer.advantage, *(one.advantage for one in trainer.sources.values())}
        is_used = not names.isdisjoint(USES_PARTS) or trainer.advantage_path is not None
        if trainer.mode == "rl" and self.env.turn_scores == "train" and not is_used:
            raise ValueError(
                f'env.turn_scores="train" with trainer.advantage="{trainer.advantage}", which '
                "looks at the score of an episode alone; set trainer.advantage to one of "
                f'{", ".join(USES_PARTS)}, or env.turn_scores = "record"'
            )

    def _refuse_wrong_teacher(self) -> None:
        trainer, teacher = self.trainer, self.trainer.teacher
        if teacher is None:
            return
        is_alone = trainer.advantage == "none" and trainer.advantage_path is None
        if is_alone and self.buffer.drop_zero_signal:
            raise ValueError(
                'buffer.drop_zero_signal=true with trainer.advantage="none" drops every group; set '
                "it to false, so that the teacher trains all of them"
            )
        if teacher.path == self.model.path and teacher.context_key is None:
            raise ValueError(
                f"trainer.teacher.path={str(teacher.path)!r} is model.path: the policy would be "
                "pulled to what it is and learn nothing; name another model, or set "
                "trainer.teacher.context_key"
            )
        if teacher.urls and self.sampling.temperature != 1.0:
            raise ValueError(
                f"sampling.temperature={self.sampling.temperature} with trainer.teacher.urls: "
                "servers score at temperature 1, another distribution than the policy's; set "
                "sampling.temperature = 1.0, or give the teacher's folder in trainer.teacher.path"
            )
        longest = self.model.max_context_tokens + teacher.max_context_tokens
        if teacher.context_key is not None and longest > trainer.max_microbatch_tokens:
            raise ValueError(
                f"model.max_context_tokens={self.model.max_context_tokens} and "
                f"trainer.teacher.max_context_tokens={teacher.max_context_tokens} together exceed "
                f"trainer.max_microbatch_tokens={trainer.max_microbatch_tokens}: what the teacher "
                "sees is scored as one row; raise the last or lower one of the others"
            )

    def _refuse_unknown_support(self) -> None:
        sampling = self.sampling
        if not sampling.cuts or self.trainer.mode == "sft":
            return
        asked = f"sampling.top_p={sampling.top_p}, top_k={sampling.top_k}, min_p={sampling.min_p}"
        if self.trainer.teacher is not None:
            raise ValueError(
                f"{asked} with trainer.teacher: a teacher scores the whole vocabulary, another "
                "distribution than the policy's; leave one of them out"
            )
        limit = self.server.max_support_ids
        if limit is not None and not 1 < sampling.top_k <= limit:
            raise ValueError(
                f'{asked} with server.kind="sglang", which tells what was left of the vocabulary '
                f"only with a top_k from 2 to {limit} "
                "(server.sglang.sampling_mask_max_tokens); set sampling.top_k, for example to 256"
            )

    def records_support(self, sampling: Sampling) -> bool:
        """True if a server can tell among which ids tokens of trained turns were sampled with
        `sampling`, and the trainer has use for it."""
        limit = self.server.max_support_ids
        return (
            sampling.has_support
            and self.sampling.max_support_ids > 0
            and self.trainer.teacher is None
            and (limit is None or 1 < sampling.top_k <= limit)
        )

    def _refuse_unknown_sources(self) -> None:
        tasks = self.env.tasks
        known = sorted(tasks) if isinstance(tasks, dict) else []
        for name in self.trainer.sources:
            if name not in known:
                has = ", ".join(known) or "no lists by name"
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(
                    f"trainer.sources.{name}: {hint}env.tasks has {has}; what differs by source "
                    "needs env.tasks.NAME"
                )
        if self.trainer.curriculum.every and len(known) < 2:
            raise ValueError(
                f"trainer.curriculum.every={self.trainer.curriculum.every} with "
                f"{len(known)} lists of tasks: there is nothing to weigh; give env.tasks two or "
                "more by name, or leave it out"
            )

    @property
    def verification(self) -> Literal["checksum", "probe", "none"]:
        """`publish.verify`, or what fits the servers."""
        return self.publish.verify or ("checksum" if self.server.has_checksums else "probe")

    @property
    def joins_by_nccl(self) -> bool:
        """Whether weights go over a group of NCCL, which servers of its release only can join."""
        return self.publish.transport == "collective" and self.server.device.startswith("cuda")

    @property
    def pause_mode(self) -> Literal["in_place", "retract", "abort"]:
        """`publish.mode`, or what fits the verification and shared devices."""
        if self.publish.mode is None and self.verification != "probe":
            # SGLang does not say that a turn was prefilled by the version before.
            is_exact = self.server.kind == "torch" and not self.trainer.is_colocated
            return "in_place" if is_exact else "retract"
        return self.publish.mode or "abort"

    def _refuse_server_contradictions(self) -> None:
        server = self.server
        if server.num_servers and server.urls:
            raise ValueError(
                f"server.urls={list(server.urls)} with server.num_servers={server.num_servers}; "
                "set server.num_servers to 0 to attach, or leave urls out to start servers"
            )
        if server.num_frozen and (self.trainer.is_colocated or self.trainer.mode != "rl"):
            raise ValueError(
                f"server.num_frozen={server.num_frozen} with trainer.is_colocated="
                f"{self.trainer.is_colocated} and trainer.mode={self.trainer.mode!r}: earlier "
                "versions are kept by a trainer with devices of its own that trains by RL; leave "
                "server.num_frozen out"
            )
        if self.verification == "probe" and self.publish.mode not in (None, "abort"):
            raise ValueError(
                f"publish.mode={self.publish.mode!r} with verification by a probe, which a server "
                'answers only while turns would go on too: "abort" is allowed, or publish.verify='
                '"checksum"'
            )
        if server.num_expert_ranks > 1 and self.publish.verify == "checksum":
            raise ValueError(
                f'publish.verify="checksum" with server.sglang.ep_size={server.num_expert_ranks}: '
                "checksums of experts that are spread over ranks are not known; "
                '"probe" and "none" are allowed'
            )

    def refuse_cut(self, deadline_s: float, name: str) -> None:
        """Refuse an episode's deadline that is later than that of its group.

        Raises:
            ValueError: it is, and buffer.cuts_slow_episodes does not allow it.
        """
        limit = self.buffer.group_deadline_s
        if limit is None or deadline_s <= limit or self.buffer.cuts_slow_episodes:
            return
        raise ValueError(
            f"{name}={deadline_s:g} is longer than buffer.group_deadline_s={limit:g}, which would "
            "cut slow episodes off and train on the fast ones; leave group_deadline_s out, set it "
            f"to {deadline_s:g} or more, or set buffer.cuts_slow_episodes = true"
        )

    def digest(self) -> str:
        """SHA-256 of the resolved settings: processes with another digest refuse to join."""
        return digest_of(self.model_dump(mode="json"))


def load_settings(path: Path, overrides: tuple[str, ...] = ()) -> Settings:
    """The settings of a TOML file, then OUTLOOP_SECTION__KEY, then `section.key=value` overrides.

    A file may name others that it changes, `extends = "base.toml"` or a list of them, relative to
    its own folder. Override values are read as TOML and, failing that, as plain strings.

    Raises:
        SettingsError: missing file, bad TOML, unknown key (the nearest is named), wrong type.
    """
    tree: dict[str, Any] = {}
    for _, one in read_layers(path):
        _merge(tree, one)
    return settings_of(tree, overrides, folder=path.parent, source=str(path))


def read_layers(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file, what it says) of a settings file and of those that it extends; later ones win.

    Raises:
        SettingsError: a file is missing, is no TOML, or extends itself.
    """
    return _read_layers(path, ())


def _read_layers(path: Path, above: tuple[Path, ...]) -> list[tuple[str, dict[str, Any]]]:
    if not path.is_file():
        hint = f"; {str(above[-1])!r} extends it" if above else ""
        raise SettingsError(
            f"settings file path={str(path)!r} does not exist{hint}; give the path of a TOML file, "
            "for example examples/calculator/run.toml"
        )
    if path.resolve() in [one.resolve() for one in above]:
        chain = " -> ".join(str(one) for one in (*above, path))
        raise SettingsError(f"settings files extend each other in a circle: {chain}; break it")
    tree = read_toml(path)
    bases = tree.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise SettingsError(
            f'{path}: extends={bases!r} is no path; extends = "base.toml" or a list of such is '
            "allowed, at the top of the file"
        )
    layers = [layer for base in bases for layer in _read_layers(path.parent / base, (*above, path))]
    return [*layers, (str(path), tree)]


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file in UTF-8, with or without a byte order mark.

    Raises:
        SettingsError: it cannot be read, or is not TOML in UTF-8.
    """
    try:
        content = path.read_bytes()
        if b"\0" in content:
            raise SettingsError(
                f"settings file path={str(path)!r} is not UTF-8 text, perhaps UTF-16; save it as "
                "UTF-8"
            )
        return tomllib.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise SettingsError(
            f"settings file path={str(path)!r} cannot be read ({error}); make it readable"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"settings file path={str(path)!r} is not UTF-8 text ({error}); save it as UTF-8"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"settings file path={str(path)!r} is not TOML: {error}") from error


def trace_settings(
    path: Path, overrides: tuple[str, ...] = ()
) -> tuple[Settings, dict[str, tuple[Any, str]]]:
    """The settings of `load_settings`, and for each one (value, where it came from).

    Raises:
        SettingsError: as load_settings.
    """
    settings = load_settings(path, overrides)
    layers = [
        *read_layers(path),
        ("environment", _read_environment()),
        *((f"--set {override}", _parse_override(override)) for override in overrides),
    ]
    origins: dict[str, str] = {}
    merged: dict[str, Any] = {}
    for source, tree in layers:
        _merge(merged, copy.deepcopy(tree))
        origins |= dict.fromkeys(_leaves(tree), source)
    recipe = with_recipe(merged)
    for name in _leaves(recipe):
        origins.setdefault(name, f"recipe {recipe.get('trainer', {}).get('recipe')}")
    origins.setdefault("env.import_dir", "folder of the file")
    found = _leaves(settings.model_dump(mode="json"))
    return settings, {name: (value, _origin(name, origins)) for name, value in found.items()}


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Where a value came from: an empty table or list may have been given as a whole."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (found := origins.get(".".join(parts[:length]))) is not None:
            return found
    return "default"


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key -> value, of every table."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def settings_of(
    tree: Mapping[str, Any], overrides: tuple[str, ...], *, folder: Path, source: str
) -> Settings:
    """The settings of `tree`, then OUTLOOP_SECTION__KEY, then overrides; raises as load_settings.

    Args:
        folder: env.import_dir, where `tree` names none.
        source: where `tree` came from, for errors.
    """
    merged = copy.deepcopy(dict(tree))
    _merge(merged, _read_environment())
    for override in overrides:
        _merge(merged, _parse_override(override), empties=True)
    if isinstance(env := merged.setdefault("env", {}), dict):
        env.setdefault("import_dir", folder.resolve())
    return build_settings(merged, source=source)


def with_overrides(settings: Settings, overrides: tuple[str, ...]) -> Settings:
    """`settings` with `section.key=value` overrides; raises as load_settings.

    Recipe and loss are resolved anew: a value that they, or the field's default, gave makes room
    for what an override brings. One that was set to the same value explicitly does too.
    """
    tree = _without_derived(settings.model_dump(mode="json"))
    for override in overrides:
        _merge(tree, _parse_override(override), empties=True)
    return build_settings(tree, source="overrides")


def _without_derived(tree: dict[str, Any]) -> dict[str, Any]:
    """A complete tree without the values that recipe, loss or defaults would bring back."""
    sections: dict[str, type[Section]] = {"trainer": TrainerSettings, "buffer": BufferSettings}
    tree = tree | {name: dict(tree[name]) for name in sections}

    def resolved() -> list[Any]:
        found = with_recipe(tree)
        found["trainer"] = trainer_defaults(found["trainer"])
        return [
            found[name].get(key, model.model_fields[key].default)
            for name, model in sections.items()
            for key in DERIVED
            if key in model.model_fields
        ]

    wanted = resolved()
    for key in DERIVED:
        section = tree["trainer" if key in TrainerSettings.model_fields else "buffer"]
        value = section.pop(key)
        if resolved() != wanted:
            section[key] = value
    return tree


def build_settings(tree: dict[str, Any], *, source: str) -> Settings:
    """Check a tree of values and freeze it; `source` names where it came from in errors."""
    try:
        return Settings(**tree)
    except ValidationError as error:
        raise SettingsError(_sentence(error, source)) from error


def digest_of(tree: Mapping[str, Any]) -> str:
    """SHA-256 of the settings in `tree`, which is that of `Settings.model_dump(mode="json")`."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise SettingsError(
            f"--set {override!r} is not section.key=value; for example --set trainer.num_steps=10"
        )
    return _tree_of(parts, text.strip(), origin=f"--set {override}")


_PREFIX = "OUTLOOP_"


def _read_environment() -> dict[str, Any]:
    """The settings in the variables OUTLOOP_SECTION__KEY, all in capitals.

    Raises:
        SettingsError: a variable names no setting, or has small letters.
    """
    tree: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        name = variable.upper()
        if not name.startswith(_PREFIX) or "__" not in name.removeprefix(_PREFIX):
            continue
        if variable != name:
            raise SettingsError(
                f"environment variable {variable}: settings are read from variables in capitals "
                f"alone; rename it to {name}, or unset it"
            )
        parts = name.removeprefix(_PREFIX).lower().split("__")
        _merge(tree, _tree_of(parts, text, origin=f"environment variable {variable}"))
    return tree


def _tree_of(parts: list[str], text: str, *, origin: str) -> dict[str, Any]:
    """A tree with one setting, whose value is read as TOML or JSON where its type is not text.

    Raises:
        SettingsError: there is no such setting; `origin` says where it was given.
    """
    for number, part in enumerate(parts):
        known = _known_keys(tuple(parts[:number]))
        if known and part not in known:
            raise SettingsError(f"{origin}: {_unknown(parts[: number + 1], known)}")
    value: Any = _value_of(text, _annotation_at(parts))
    for part in reversed(parts):
        value = {part: value}
    tree: dict[str, Any] = value
    return tree


def _value_of(text: str, annotation: Any) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        try:
            value = json.loads(text)
        except ValueError:
            return text
    types = _types_in(annotation)
    is_text = not types.isdisjoint((str, Path)) and types.isdisjoint((int, float, bool, Any))
    return value if isinstance(value, str | list | dict) or not is_text else text


def _types_in(annotation: Any) -> set[Any]:
    """The types that a single value may have; that of a Literal is its values'."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (dict, tuple) or not get_args(annotation):
        return {get_origin(annotation) or annotation}
    return set[Any]().union(*map(_types_in, get_args(annotation)))


def _merge(into: dict[str, Any], over: dict[str, Any], *, empties: bool = False) -> None:
    """Put the values of `over` into a tree; with `empties` an empty table empties what it names."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict) and (value or not empties):
            _merge(into[key], value, empties=empties)
        else:
            into[key] = value


def _annotation_at(location: Sequence[int | str]) -> Any:
    """The type of a setting; Any where there is no such setting."""
    annotation: Any = Settings
    for part in location:
        annotation = _members(annotation).get(str(part), _of_any_key(annotation))
    return annotation


def _members(annotation: Any) -> dict[str, Any]:
    """The type of each key of a table; empty for what is none, or has any keys."""
    if get_origin(annotation) is dict:
        return {}
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, Section):
            return {name: field.annotation for name, field in one.model_fields.items()}
    return {}


def _of_any_key(annotation: Any) -> Any:
    """The type of the values of a table with any keys."""
    for one in (annotation, *get_args(annotation)):
        if get_origin(one) is dict:
            return get_args(one)[1]
    return Any


def _known_keys(location: Sequence[int | str]) -> list[str]:
    return list(_members(_annotation_at(location)))


_MAX_LISTED = 20
"""Names of a section that a sentence may list."""


def _unknown(location: Sequence[int | str], known: Sequence[str]) -> str:
    """What to say of a key that does not exist: the nearest, or all where these are few."""
    by_small = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(location[-1]).lower(), by_small, n=3)
    sentence = f"unknown setting {'.'.join(map(str, location))}"
    if near:
        return f"{sentence}; did you mean {' or '.join(repr(by_small[name]) for name in near)}?"
    if len(known) <= _MAX_LISTED:
        return f"{sentence}; allowed here: {', '.join(sorted(known))}"
    return f"{sentence}; `outloop settings CONFIG` prints all of them"


def _sentence(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(_unknown(item["loc"], _known_keys(item["loc"][:-1])))
        elif item["type"] == "missing":
            lines.append(f"setting {name} is missing; add it to {source}")
        elif item["type"] == "value_error":
            lines.append(str(item["msg"]).removeprefix("Value error, "))
        else:
            lines.append(f"{name}={item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return f"{source}: " + "; ".join(lines)
