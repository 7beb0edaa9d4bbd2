"""What one session takes of the machine's small stores, and that another still has its own."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outloop.envs.sandbox.api import Limits, Sandbox
from outloop.envs.sandbox.host_users import base_owner, new_user

LIMITS = Limits(wall_s=20, cpu_s=10, memory_bytes=256 * 2**20, max_processes=64)
LIBC = "import ctypes, os, fcntl, socket, array\nlibc = ctypes.CDLL(None, use_errno=True)\n"
STORES = {
    "terminals": "take = os.openpty",
    "inotify instances": ("def take():\n    if libc.inotify_init() < 0: raise OSError('inotify')"),
    "inotify watches": (
        "watch, names = libc.inotify_init(), iter(range(10**6))\n"
        "def take():\n"
        "    name = f'/tmp/{next(names)}'; os.mkdir(name)\n"
        "    if libc.inotify_add_watch(watch, name.encode(), 1) < 0: raise OSError('watch')"
    ),
    "pipe pages": (
        "def take():\n"
        "    pipe = os.pipe()\n"
        "    if fcntl.fcntl(pipe[1], 1031, 2**20) < 2**20: raise OSError('pipe')"
    ),
    "descriptors in flight": (
        "pairs = []\n"
        "def take():\n"
        "    pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))\n"
        "    fds = array.array('i', [0] * 40)\n"
        "    pairs[-1][0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])"
    ),
    "timers": (
        "one = ctypes.c_void_p()\n"
        "def take():\n"
        "    if libc.timer_create(1, None, ctypes.byref(one)) < 0: raise OSError('timer')"
    ),
    "threads": (
        "import threading\n"
        "def take(): threading.Thread(target=threading.Event().wait, daemon=True).start()"
    ),
}
"""A function for each, which takes one more and raises when there is none."""
TAKE_ALL = "\nnum = 0\ntry:\n    while num < 100_000: take(); num += 1\nexcept Exception: pass\n"
TAKE_SOME = "\nfor _ in range(3): take()\nprint('served')"
CALLS_REFUSED = (
    "context = ctypes.c_ulong()\n"
    "numbers = {'x86_64': (206, 240, 248), 'aarch64': (0, 180, 217)}[os.uname().machine]\n"
    "answers = [libc.syscall(number, 65536, ctypes.byref(context)) for number in numbers]\n"
    "print(answers)"
)


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that sessions can begin with."""
    with tempfile.TemporaryDirectory(prefix="outloop-base-") as name:
        owner = base_owner()
        if owner is not None:
            os.chown(name, owner, owner)
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.medium
@pytest.mark.parametrize("has_base", [False, True], ids=["empty", "over a folder"])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.skipif(new_user() is None, reason="sessions of an ordinary user are all of that user")
async def test_a_session_that_takes_all_leaves_its_neighbour_its_own(
    sandbox: Sandbox, base: Path, store: str, has_base: bool
) -> None:
    """Each session is a user of its own to the kernel, with few of what is the machine's."""
    folder = base if has_base else None
    async with (
        sandbox.session(LIMITS, base=folder) as greedy,
        sandbox.session(LIMITS, base=folder) as other,
        greedy.interpreter("python") as python,
    ):
        taken = await python.run(LIBC + STORES[store] + TAKE_ALL)
        assert taken.is_ok, taken
        assert not taken.lost_state
        code = LIBC + STORES[store] + TAKE_SOME
        served = await other.run({"a.py": code}, ("python", "a.py"))
        assert served.stdout == b"served\n", served


async def test_what_the_machine_has_once_is_refused(sandbox: Sandbox) -> None:
    """Asynchronous disk contexts, message queues and keys."""
    async with sandbox.session(LIMITS) as session:
        ran = await session.run({"a.py": LIBC + CALLS_REFUSED}, ("python", "a.py"))
    assert ran.stdout == b"[-1, -1, -1]\n"
