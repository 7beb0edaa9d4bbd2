"""Which errors say that the system gives this process no more memory.

Such a process is like one that the system killed for want of memory: nothing is wrong with the
run, and it may go on once the process is started again.
"""

from __future__ import annotations

import errno

_SENTENCES = (
    # CPython's, when the system refuses a thread its stack.
    "can't start new thread",
    # Those of torch's allocator for the CPU, and of a thread that C++ cannot start.
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "Resource temporarily unavailable",
)


def is_memory_shortage(error: BaseException) -> bool:
    """Whether the system refused memory, or the memory of a thread or a process.

    Memory of a GPU is not meant: what does not fit there once does not fit the next time.
    """
    if isinstance(error, OSError):
        # fork says EAGAIN where a limit on processes is reached; so does a socket that would wait.
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _SENTENCES)
    )
