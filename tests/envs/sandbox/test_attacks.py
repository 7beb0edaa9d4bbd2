"""What a hostile policy may try in a sandbox, and that none of it works.

Each attack runs where cgroups bound a session and where only resource limits and the supervisor do.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from outloop.envs.sandbox.api import Limits, RunResult
from outloop.envs.sandbox.bubblewrap import BubblewrapSandbox
from outloop.envs.sandbox.session import SupervisedSession

pytestmark = pytest.mark.asyncio(loop_scope="module")
MB = 2**20
LIMITS = Limits(
    wall_s=20, cpu_s=5, memory_bytes=128 * MB, max_processes=12, disk_bytes=4 * MB, max_files=64
)
BRIEF = Limits(
    wall_s=1, cpu_s=5, memory_bytes=128 * MB, max_processes=12, disk_bytes=4 * MB, max_files=64
)

TOGETHER = (
    "import os\n"
    "first = os.getpid()\n"
    "for _ in range(6): os.fork() if os.getpid() == first else None\n"
    "x = bytearray(os.urandom(1024)) * (60 * 1024)\n"
    "import time; time.sleep(15)"
)
"""Seven processes, none of which takes too much by itself."""


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["cgroups", "rlimits"])
async def session(request: pytest.FixtureRequest) -> AsyncIterator[SupervisedSession]:
    """One session for all attacks: what one leaves behind would meet the next."""
    sandbox = BubblewrapSandbox(LIMITS, uses_cgroups=request.param == "cgroups")
    async with sandbox.session() as opened:
        yield opened
    await sandbox.close()


async def attack(
    session: SupervisedSession, code: str, limits: Limits = LIMITS, *, keep_files: bool = False
) -> RunResult:
    """Run the code, and see that the very same session still works."""
    pid = session.pid
    result = await session.run({"a.py": code}, ("python", "a.py"), limits, keep_files=keep_files)
    after = await session.run({"b.py": "print('alive')"}, ("python", "b.py"))
    assert after.stdout == b"alive\n"
    assert session.pid == pid
    return result


@pytest.mark.medium
async def test_a_fork_bomb_goes_off_inside(session: SupervisedSession) -> None:
    """It runs into the number of processes, is ended, and leaves none."""
    code = (
        "import os\n"
        "for _ in range(200):\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            while True: os.fork()\n"
        "    except OSError: print('no more', flush=True); break\n"
        "while True: pass\n"
    )
    result = await attack(session, code, BRIEF)
    assert result.ended == "wall_time"
    assert b"no more" in result.stdout
    assert result.wall_s < 15


async def test_threads_count_as_processes(session: SupervisedSession) -> None:
    """A thousand threads cannot be started."""
    code = (
        "import threading\n"
        "wait = threading.Event()\n"
        "n = 0\n"
        "try:\n"
        "    while n < 1000:\n"
        "        threading.Thread(target=wait.wait, daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\n"
        "print(n)\n"
    )
    assert int((await attack(session, code)).stdout) < 64


@pytest.mark.medium
@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(400 * 2**20)",
        TOGETHER,
        "x = []\nwhile True: x.append(' ' * 2**20)",
    ],
)
async def test_memory_is_bounded(session: SupervisedSession, code: str) -> None:
    """One process or several together: what takes too much is ended, all of it, or refused."""
    result = await attack(session, code)
    assert result.ended == "memory" or b"MemoryError" in result.stderr
    assert result.wall_s < 14


async def test_memory_outside_of_processes_is_bounded(session: SupervisedSession) -> None:
    """Shared memory segments, memory files and /dev/shm are refused or count as disk."""
    code = (
        "import os, ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.shmget(0, 2**20, 0o1600), libc.msgget(0, 0o1600))\n"
        "try: print(os.memfd_create('x'))\n"
        "except OSError as error: print(error.errno)\n"
        "try:\n"
        "    for i in range(64): open(f'/dev/shm/{i}', 'wb').write(bytes(2**20))\n"
        "except OSError as error: print(error.errno)\n"
    )
    assert (await attack(session, code)).stdout.split() == [b"-1", b"-1", b"1", b"28"]


async def test_disk_and_number_of_files_are_bounded(session: SupervisedSession) -> None:
    """Writing ends with "no space left"; kept files do not eat up another call's room."""
    big = "open('big', 'wb').write(bytes(64 * 2**20))"
    assert b"OSError" in (await attack(session, big, keep_files=True)).stderr
    parts = (
        "import os\n"
        "try:\n"
        "    for i in range(64):\n"
        "        with open(f'/tmp/part{i}', 'wb') as file: file.write(bytes(2**20))\n"
        "except OSError as error: print(error.errno, i)\n"
    )
    full = (await attack(session, parts)).stdout.split()
    assert full[0] in (b"28", b"27")
    assert int(full[1]) <= 4
    many = (
        "n = 0\n"
        "try:\n"
        "    while True: open(f'f{n}', 'w').close(); n += 1\n"
        "except OSError as error: print(error.errno, n)\n"
    )
    result = (await attack(session, many)).stdout.split()
    assert result[0] == b"28"
    assert int(result[1]) <= LIMITS.max_files + 8
    assert (await session.run({"c.py": "1"}, ("true",), keep_files=True)).ended == "refused"
    assert (await session.run({}, ("rm", "big"), keep_files=True)).is_ok


@pytest.mark.medium
async def test_nothing_outside_can_be_written(session: SupervisedSession) -> None:
    """Only the workspace, /tmp and shared memory, which are one small disk (/box), take a file."""
    code = (
        "import os\n"
        "done = []\n"
        "for root, folders, names in os.walk('/'):\n"
        "    if root in ('/proc', '/work', '/tmp', '/box') or len(root) > 30: folders.clear()\n"
        "    try: open(os.path.join(root, '.x'), 'w').close(); done.append(root)\n"
        "    except OSError: pass\n"
        "print(sorted(done))\n"
        "for path in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/outloop/passwd',\n"
        "             '/usr/bin/python3', '/proc/1/mem', '/proc/sys/user/max_user_namespaces'):\n"
        "    try: open(path, 'r+b').write(b'x'); print(path)\n"
        "    except OSError: pass\n"
        "for device in (os.makedev(8, 0), os.makedev(1, 1)):\n"
        "    try: os.mknod('disk', 0o600 | 0o060000, device); print('device')\n"
        "    except OSError: pass\n"
    )
    assert (await attack(session, code)).stdout == b"['/box', '/dev/shm', '/tmp', '/work']\n"


async def test_the_host_cannot_be_read(session: SupervisedSession) -> None:
    """Not its files, its processes, its environment or the runner's code."""
    here = Path(__file__).resolve()
    code = (
        "import os\n"
        "print(sorted(os.listdir('/')))\n"
        f"for path in ('/etc/shadow', '/root', '/home', '/var', '/sys', '/run', {str(here)!r}):\n"
        "    print(os.path.exists(path), end=' ')\n"
        "print(sorted(p for p in os.listdir('/proc') if p.isdigit()))\n"
        "print(sorted(os.environ))\n"
        "print([name for name in os.listdir('/dev') if name[:2] in ('sd', 'vd', 'me', 'km')])\n"
    )
    lines = (await attack(session, code)).stdout.decode().splitlines()
    roots = set(eval(lines[0]))
    own = {"bin", "box", "dev", "etc", "lib", "lib32", "lib64", "outloop", "proc", "sbin", "tmp"}
    assert roots <= own | {"usr", "work"}
    assert lines[1] == "False " * 7 + "['1', '2']"
    assert set(eval(lines[2])) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "TMPDIR"}
    assert lines[3] == "[]"


async def test_nobody_outside_can_be_killed_or_traced(session: SupervisedSession) -> None:
    """Signals to every number, and reading the init's memory, reach nobody."""
    code = (
        "import os, signal, ctypes\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for pid in [-1, 1, os.getppid(), *range(3, 40000)]:\n"
        "    try: os.kill(pid, signal.SIGTERM if pid == -1 else signal.SIGKILL)\n"
        "    except OSError: pass\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.ptrace(16, 1, 0, 0), libc.process_vm_readv(1, 0, 0, 0, 0, 0))\n"
        "for name in ('mem', 'environ', 'fd', 'maps'):\n"
        "    try: (os.listdir if name == 'fd' else open)(f'/proc/1/{name}'); print(name)\n"
        "    except OSError: pass\n"
        "print('done')\n"
    )
    result = await attack(session, code)
    assert result.stdout == b"-1 -1\ndone\n"
    assert os.getpid()


async def test_no_rights_can_be_gained(session: SupervisedSession) -> None:
    """No namespaces, mounts, users, capabilities, higher limits or set-user-id programs."""
    code = (
        "import os, ctypes, resource\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "got = []\n"
        "for flags in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x10000000 | 0x20000):\n"
        "    if libc.unshare(flags) == 0: got.append(flags)\n"
        "    pid = libc.syscall(56, flags | 17, 0, 0, 0, 0)\n"
        "    if pid == 0: os._exit(0)\n"
        "    if pid > 0: got.append(('clone', flags))\n"
        "if libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None) == 0: got.append('mount')\n"
        "if libc.umount2(b'/work', 2) == 0: got.append('umount')\n"
        "if libc.chroot(b'/work') == 0: got.append('chroot')\n"
        "for call in (lambda: os.setuid(0), lambda: os.setresuid(65534, 65534, 65534),\n"
        "             lambda: os.setgroups([0]), lambda: os.nice(-5),\n"
        "             lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)),\n"
        "             lambda: os.write(os.open('/proc/self/oom_score_adj', 1), b'-500'),\n"
        "             lambda: os.write(os.open('/proc/self/uid_map', 1), b'0 0 1')):\n"
        "    try: call(); got.append(call.__code__.co_consts)\n"
        "    except (OSError, ValueError): pass\n"
        "status = open('/proc/self/status').read()\n"
        "print(got, status.split('CapEff:')[1][:17].strip(), 'NoNewPrivs:\\t1' in status)\n"
    )
    assert (await attack(session, code)).stdout == b"[] 0000000000000000 True\n"


async def test_there_is_no_network(session: SupervisedSession) -> None:
    """A server on this machine cannot be reached, nor any other address or abstract socket."""
    server = socket.create_server(("127.0.0.1", 0))
    hidden = socket.socket(socket.AF_UNIX)
    hidden.bind("\0outloop-attack")
    hidden.listen()
    code = (
        "import socket\n"
        f"for address in (('127.0.0.1', {server.getsockname()[1]}), ('1.1.1.1', 53)):\n"
        "    try: socket.create_connection(address, 1); print('reached', address)\n"
        "    except OSError: pass\n"
        "try: socket.socket(socket.AF_UNIX).connect('\\0outloop-attack'); print('reached')\n"
        "except OSError: pass\n"
        "print([line.split(':')[0].strip() for line in open('/proc/net/dev')][2:])\n"
    )
    result = await attack(session, code)
    server.close()
    hidden.close()
    assert result.stdout == b"['lo']\n"


async def test_only_common_sockets_can_be_made(session: SupervisedSession) -> None:
    """Three families of sockets; the rest reach kernel code or neighbours not needed here."""
    code = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "pair = (ctypes.c_int * 2)()\n"
        "made, refused = [], set()\n"
        "for family in range(1, 64):\n"
        "    for kind in (1, 2, 3, 5):\n"
        "        for call in (lambda: libc.socket(family, kind, 0),\n"
        "                     lambda: libc.socketpair(family, kind, 0, pair)):\n"
        "            if call() >= 0: made.append(family)\n"
        "            elif family not in (1, 2, 10): refused.add(ctypes.get_errno())\n"
        "high = libc.socket(ctypes.c_long(2**32 + 40), ctypes.c_long(1), ctypes.c_long(0))\n"
        "print(sorted(set(made)), refused == {errno.EAFNOSUPPORT}, high)\n"
    )
    assert (await attack(session, code)).stdout == b"[1, 2, 10] True -1\n"


async def test_calls_without_a_use_are_refused(session: SupervisedSession) -> None:
    """Watching files, moving others' memory, namespaces; what newer kernels add is not there."""
    numbers = {
        "x86_64": {"fanotify_init": 300, "move_pages": 279, "migrate_pages": 256, "mbind": 237},
        "aarch64": {"fanotify_init": 262, "move_pages": 239, "migrate_pages": 238, "mbind": 235},
    }[os.uname().machine]
    code = (
        "import ctypes, errno, os, subprocess, threading\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def error_of(number):\n"
        "    answer = libc.syscall(number, 0, 0, 0, 0, 0, 0)\n"
        "    return errno.errorcode[ctypes.get_errno()] if answer < 0 else 'done'\n"
        f"print({{error_of(number) for number in {list(numbers.values())!r}}})\n"
        "print({error_of(number) for number in (435, *range(449, 600))})\n"
        "print(subprocess.run(['true']).returncode, os.system('true'))\n"
        "one = threading.Thread(target=print, args=('thread',)); one.start(); one.join()\n"
    )
    lines = (await attack(session, code)).stdout.decode().splitlines()
    assert lines == ["{'EPERM'}", "{'ENOSYS'}", "0 0", "thread"]


async def test_earlier_calls_leave_nothing_in_memory(session: SupervisedSession) -> None:
    """What a program was given, printed, wrote or left to collect is in no later one's memory."""
    secret = "k3y" + "w0rd"
    tell = (
        "import sys\nx = open('x').read()\nprint(x); print(x, file=sys.stderr)\n"
        "open('y', 'w').write(x)"
    )
    look = (
        "found = 0\n"
        "for line in open('/proc/self/maps'):\n"
        "    low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "    if ' rw' in line:\n"
        "        with open('/proc/self/mem', 'rb') as file:\n"
        "            file.seek(low)\n"
        "            try: found += file.read(high - low).count(bytes((107, 51, 121)) + b'w0rd')\n"
        "            except OSError: pass\n"
        "print(found)\n"
    )
    for _ in range(3):
        reported = await session.run(
            {"a.py": tell, "x": secret}, ("python", "a.py"), collect=("y",)
        )
        assert reported.files == {"y": secret.encode()}
    assert (await attack(session, look)).stdout == b"0\n"


async def test_links_lead_nowhere(session: SupervisedSession) -> None:
    """Collected files are regular ones of the workspace; planted links are not written through."""
    code = (
        "import os\n"
        "os.symlink('/outloop/passwd', 'link')\n"
        "os.symlink('/', 'root')\n"
        "os.mkfifo('fifo')\n"
        "os.mkdir('folder')\n"
        "os.symlink('/tmp', 'sub')\n"
        "open('sparse', 'wb').truncate(2**22)\n"
        "os.link('a.py', 'hard')\n"
        "open('good', 'w').write('x')\n"
    )
    collect = ("link", "root/outloop/passwd", "fifo", "folder", "sub/x", "good", "none")
    async with asyncio.timeout(15):
        result = await session.run(
            {"a.py": code, "x": "1"},
            ("python", "a.py"),
            collect=collect,
            keep_files=True,
        )
    assert result.files == {"good": b"x"}
    look = "import os; print(os.path.islink('sub'), os.listdir('sub'), os.path.islink('link'))"
    result = await session.run(
        {"b.py": look, "sub/inner": "2", "link": "3"}, ("python", "b.py"), keep_files=True
    )
    assert result.stdout == b"False ['inner'] False\n"


async def test_nothing_is_left_running(session: SupervisedSession) -> None:
    """Daemons of an ended call are gone, with the descriptors that they held open."""
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "        open('late', 'w').write('x')\n"
        "    os._exit(0)\n"
        "print('left')\n"
    )
    started = time.monotonic()
    result = await attack(session, code, keep_files=True)
    assert result.stdout == b"left\n"
    assert result.ended == "exited"
    assert time.monotonic() - started < 30
    look = (
        "import os; print([p for p in os.listdir('/proc') if p.isdigit()], os.listdir('/dev/shm'))"
    )
    assert (await attack(session, look)).stdout == b"['1', '2'] []\n"


async def test_a_flood_of_output_is_cut(session: SupervisedSession) -> None:
    """The first bytes are kept, some are dropped, and a flood ends the program."""
    some = await attack(
        session, "print('x' * 200_000); import sys; print('y' * 10, file=sys.stderr)"
    )
    assert len(some.stdout) == LIMITS.output_bytes
    assert some.is_output_cut
    assert some.is_ok
    assert some.stderr == b"y" * 10 + b"\n"
    flood = await attack(session, "import os\nwhile True: os.write(1, b'x' * 65536)")
    assert flood.ended == "output"
    assert len(flood.stdout) == LIMITS.output_bytes


@pytest.mark.medium
@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("import time; time.sleep(60)", "wall_time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "wall_time"),
        (
            "import signal, time\n"
            "for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
            "time.sleep(60)",
            "wall_time",
        ),
        ("import os; os.kill(os.getpid(), 9)", "signaled"),
        ("import os; os.abort()", "signaled"),
        ("import os; os.close(0); os.close(1); os.close(2); os._exit(5)", "exited"),
        ("import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'x' * 99)\n"
         "    except OSError: pass", "exited"),
        ("import ctypes; ctypes.string_at(0)", "signaled"),
    ],
)  # fmt: skip
async def test_however_it_ends_the_end_is_reported(
    session: SupervisedSession, code: str, ended: str
) -> None:
    """Sleepers, stopped ones and those that ignore signals are ended; the rest end as they did."""
    result = await attack(session, code, BRIEF if ended == "wall_time" else LIMITS)
    assert result.ended == ended


@pytest.mark.medium
async def test_spinning_ends_with_the_cpu_time(session: SupervisedSession) -> None:
    """A process that computes for too long is ended though wall time is left."""
    limits = Limits(wall_s=20, cpu_s=1, memory_bytes=128 * MB, max_processes=12,
                    disk_bytes=4 * MB, max_files=64)  # fmt: skip
    assert (await attack(session, "while True: pass", limits)).ended == "cpu_time"


async def test_deep_folders_are_no_burden(session: SupervisedSession) -> None:
    """A tree deeper than any path may be long is gone with its call."""
    code = (
        "import os\n"
        "try:\n"
        "    while True:\n"
        "        os.mkdir('d' * 200); os.chdir('d' * 200)\n"
        "except OSError as error: print(error.errno)\n"
    )
    for keep_files in (False, True):
        result = await attack(session, code, keep_files=keep_files)
        assert result.stdout.strip() in (b"28", b"36")


async def test_a_big_input_is_refused_or_read(session: SupervisedSession) -> None:
    """Files larger than the disk are the caller's failure, told as such; long input is read."""
    result = await session.run({"a.py": "pass", "big": bytes(8 * MB)}, ("python", "a.py"))
    assert result.ended == "refused"
    assert b"space" in result.stderr
    count = "import sys; print(len(sys.stdin.read()))"
    result = await session.run({"a.py": count}, ("python", "a.py"), stdin=b"x" * MB)
    assert result.stdout == b"%d\n" % MB
