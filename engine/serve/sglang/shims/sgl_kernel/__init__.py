"""Stands for SGLang's compiled kernels where there is no build of them: every call raises."""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but no CPU build of sgl_kernel is installed; "
            "this model or option needs a GPU"
        )

    return missing
