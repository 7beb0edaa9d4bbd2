"""The settings `[deploy]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from outloop.buffer.settings.section import Section, refuse_two_spellings

Part = Literal["redis", "router", "server", "trainer", "runner", "archiver", "monitor"]
_SLURM_OWNED = {
    "job-name": "run.name",
    "requeue": "outloop submit slurm",
    "signal": "deploy.notice_s",
    "output": "outloop submit slurm",
    "open-mode": "outloop submit slurm",
    "ntasks": "server.num_servers, deploy.trainer_nodes or env.num_runners",
    "nodes": "deploy.trainer_nodes",
    "ntasks-per-node": "deploy.trainer_nodes",
    "cpus-per-task": "deploy.parts",
    "mem": "deploy.parts",
    "mem-per-cpu": "deploy.parts",
    "gpus-per-task": "server.tensor_parallel_size or trainer.num_ranks",
}
"""sbatch's options that outloop sets itself -> the setting, or what sets it."""


class PartResources(Section):
    """What one process of a part is given by a cluster."""

    cpus: int = Field(1, gt=0)
    """CPU cores."""
    memory_mb: int = Field(2048, gt=0)
    """Main memory, not that of GPUs."""


_DEFAULTS: dict[Part, PartResources] = {
    "redis": PartResources(cpus=1, memory_mb=4096),
    "router": PartResources(cpus=1, memory_mb=2048),
    "server": PartResources(cpus=8, memory_mb=65536),
    "trainer": PartResources(cpus=8, memory_mb=131072),
    "runner": PartResources(cpus=4, memory_mb=8192),
    "archiver": PartResources(cpus=1, memory_mb=2048),
    "monitor": PartResources(cpus=1, memory_mb=1024),
}


class DeploySettings(Section):
    """What `outloop submit` and `outloop manifests` ask of a cluster; without effect elsewhere."""

    image: str | None = None
    """Kubernetes, SkyPilot: image with outloop and, in /project, the folder of your settings."""
    trainer_nodes: int = Field(1, gt=0)
    """Machines over which trainer.num_ranks are spread evenly."""
    max_runners: int | None = Field(None, gt=0)
    """Kubernetes: up to so many runners are started as they use their CPUs; left out: four times
    env.num_runners."""
    spot: tuple[Literal["router", "server", "runner"], ...] = ("server", "runner")
    """Parts that may be placed on machines which the cloud takes back at short notice."""
    notice_s: int = Field(120, gt=0)
    """How long before its end the trainer is asked to stop, so that it can write a checkpoint."""
    gpu_type: str | None = None
    """Slurm, SkyPilot: the kind of GPU as the engine names it, for example H100; SkyPilot needs
    it."""
    storage_class: str | None = None
    """Kubernetes: of the run's folder, which many machines write; left out: the cluster's own."""
    storage_gb: int = Field(100, gt=0)
    """Size of the volume with the run's folder."""
    parts: dict[Part, PartResources] = {}
    """By part; a trainer's are of one machine. Archiver and monitor: Kubernetes, SkyPilot."""
    slurm: dict[str, Any] = {}
    """Raw sbatch options under their upstream names, for example { partition = "gpu" }; true: an
    option without a value."""

    def resources(self, part: Part) -> PartResources:
        """Those of `parts`, or the defaults of the part."""
        return self.parts.get(part, _DEFAULTS[part])

    @field_validator("slurm")
    @classmethod
    def _refuse_owned(cls, table: dict[str, Any]) -> dict[str, Any]:
        refuse_two_spellings("deploy.slurm", table)
        for name in table:
            owner = _SLURM_OWNED.get(name.replace("_", "-"))
            if owner is not None:
                raise ValueError(f"deploy.slurm.{name} is set by {owner}; leave it out")
        return table
