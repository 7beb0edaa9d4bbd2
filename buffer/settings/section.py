"""The base of every table of settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A frozen table of settings: its keys are known, and its numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_for_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1, so that `num_steps = true` would train a single step."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if _holds_truth(value) and not _allows_truth(annotation):
            raise PydanticCustomError("truth", "true and false are not allowed here")
        return value


def _holds_truth(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_truth, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_truth, value))
    return isinstance(value, bool)


def _allows_truth(annotation: Any) -> bool:
    """Whether a value of this type may hold a truth value; a table of settings asks its own."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return True
    if annotation in (bool, Any):
        return True
    return any(map(_allows_truth, get_args(annotation)))


def refuse_two_spellings(name: str, table: Mapping[str, Any]) -> None:
    """Refuse a table of another program's options in which one is given twice, with hyphens and
    with underscores.

    Raises:
        ValueError: names both.
    """
    spelt: dict[str, str] = {}
    for key in table:
        other = spelt.setdefault(key.replace("-", "_"), key)
        if other != key:
            raise ValueError(f"{name} has both {other} and {key}; leave one of them out")
