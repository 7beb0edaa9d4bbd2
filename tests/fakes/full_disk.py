"""A disk without room, as this process sees it."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from structlog.testing import capture_logs


@contextmanager
def longest_file(num_bytes: int) -> Iterator[Callable[[], None]]:
    """No file of this process grows beyond it, until the end or what is yielded is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    # What is logged meanwhile would go to a file that pytest has open.
    with capture_logs():
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield lift
        finally:
            lift()
