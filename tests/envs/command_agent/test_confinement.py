"""What an agent program reaches: a table of attempts, each of which must come back with nothing."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from outloop.buffer.errors import SettingsError
from outloop.buffer.settings import Settings
from outloop.envs.command_agent.agent import CommandAgent
from outloop.envs.command_agent.confinement import hidden_paths
from outloop.envs.runner.runner import run

CHECKS = """
import hidden_helper

KEY = "verifier-secret"


def verify(task, result):
    return 1.0


def tasks():
    return [{"question": "1", "answer": "task-secret"}]
"""

ATTEMPTS = {
    # The machine's root, and its settings.
    "user": "os.getuid() == 0 or os.geteuid() == 0 or 0 in os.getgroups()",
    "capabilities": "int(status()['CapEff'], 16) | int(status()['CapPrm'], 16)",
    "new privileges": "status()['NoNewPrivs'] != '1'",
    "system calls": "status()['Seccomp'] != '2'",
    "becoming root": "os.setuid(0) or True",
    "core pattern": "write_back('/proc/sys/kernel/core_pattern')",
    "host name": "write_back('/proc/sys/kernel/hostname')",
    "overcommit": "write_back('/proc/sys/vm/overcommit_memory')",
    "pid limit": "write_back('/proc/sys/kernel/pid_max')",
    "binary formats": "write('/proc/sys/fs/binfmt_misc/register', '')",
    "magic keys": "open('/proc/sysrq-trigger', 'w')",
    "interrupts": "write_back('/proc/irq/default_smp_affinity')",
    "power": "open('/sys/power/state', 'w')",
    "control groups": "os.listdir('/sys/fs/cgroup')",
    "kernel memory": "open('/proc/kcore', 'rb').read(1)",
    "devices": "os.mknod('disk', 0o60600, os.makedev(8, 0)) or True",
    "set-user-id": "subprocess.run(['su', '-c', 'true'], capture_output=True).returncode == 0",
    # Files of the machine and of users.
    "passwords": "read('/etc/shadow')",
    "host keys": "glob.glob('/etc/ssh/*')",
    "homes": "[name for name in os.listdir('/home')]",
    "root's home": "glob.glob('/root/.*rc') + glob.glob('/root/.ssh') + glob.glob('/root/.config')",
    "credentials beside programs": "read(CARGO + '/credentials.toml')",
    "a private file on PATH's parent": "os.listdir(CARGO) != ['bin']",
    "sockets": "glob.glob('/run/*') + glob.glob('/var/run/*')",
    "shared memory": "os.listdir('/dev/shm')",
    "disks": "[one for one in os.listdir('/dev') if one.startswith(('sd', 'vd', 'nvme', 'loop'))]",
    "mounted disks": "glob.glob('/mnt/*') + glob.glob('/media/*') + glob.glob('/data/*')",
    # The project, the run, and other runs.
    "verifier": "read(PROJECT + '/checks.py')",
    "its modules": "read(PROJECT + '/hidden_helper.py')",
    "compiled": "glob.glob(PROJECT + '/__pycache__/*')",
    "tasks": "read(PROJECT + '/more.jsonl')",
    "history": "os.listdir(PROJECT + '/.git')",
    "environment file": "read(PROJECT + '/.env')",
    "settings": "read(PROJECT + '/run.toml')",
    "keys": "read(PROJECT + '/runs/run/secrets.json')",
    "keys of another run": "read(OTHER + '/secrets.json')",
    "in a named folder": "read(PROJECT + '/named/old-run/secrets.json')",
    "other files of the project": "{*os.listdir(PROJECT)} - {*OWN}",
    "names of what is hidden": "'secrets' in read('/proc/1/cmdline') + read('/proc/1/mountinfo')",
    "by a parent's root": "{*os.listdir('/proc/1/root/')} != {*os.listdir('/')}",
    "by a parent's folder": "os.listdir('/proc/1/cwd') != os.listdir('.')",
    "the parent's variables": "'private-variable' in read('/proc/1/environ')",
    # Other processes.
    "processes": "len([name for name in os.listdir('/proc') if name.isdigit()]) > 4",
    "signals": "os.kill(os.getppid(), 9) or os.getppid() == 0",
    "descriptors": "[n for n in os.listdir('/proc/self/fd') if int(n) > 2 and live(n)]",
    "memory of another": "libc.ptrace(16, os.getppid(), 0, 0) == 0",
    # Kernel code that programs do not need.
    "namespaces": "libc.unshare(0x10000000) == 0 or libc.unshare(0x00020000) == 0",
    "mounts": "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "new root": "os.chroot('/tmp') or True",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "alg": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "packets": "socket.socket(17, socket.SOCK_RAW)",
    "io_uring": "libc.syscall(425, 1, ctypes.create_string_buffer(512)) >= 0",
    "userfaultfd": "libc.syscall(323, 0) >= 0",
    "perf": "libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0) >= 0",
    "bpf": "libc.syscall(321, 0, ctypes.create_string_buffer(128), 128) >= 0",
    "key rings": "libc.syscall(250, 0, -3, 1) >= 0",
    "memory files": "os.memfd_create('x') >= 0",
    "shared segments": "libc.shmget(0, 4096, 0o1600) >= 0",
    # Writing.
    "system": "write('/usr/x', '') or True",
    "root folder": "write('/x', '') or os.mkdir('/y') or True",
    "device folder": "write('/dev/x', '') or True",
    "project": "write(PROJECT + '/x', '') or True",
    "own program": "open(PROJECT + '/agent.py', 'a')",
    "folders of others": "write(os.path.dirname(os.getcwd()) + '/x', '') or not os.getcwd()",
    "interpreter": "write(os.path.dirname(os.__file__) + '/x.py', '') or True",
    "modes": "os.chmod(PROJECT + '/agent.py', 0o777) or True",
}

AGENT = """
import ctypes, glob, json, os, socket, subprocess, sys
import helper

libc = ctypes.CDLL(None)
PROJECT = os.environ["OUTLOOP_PROJECT_DIR"]
OWN = ("agent.py", "helper.py", "named", "tools")


def read(path):
    with open(path, errors="replace") as file:
        return file.read()


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def write_back(path):
    text = read(path)
    write(path, text)
    return True


def status():
    lines = [line.split(":", 1) for line in read("/proc/self/status").splitlines()]
    return {name: value.strip() for name, value in lines}


def live(number):
    try:
        return "/proc/" not in os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return False


reached = {}
for name, attempt in ATTEMPTS.items():
    try:
        found = eval(attempt)
    except (OSError, AttributeError, ProcessLookupError):
        continue
    if found:
        reached[name] = str(found)[:200]
for directory in (os.getcwd(), "/tmp", "/dev/shm"):
    write(directory + "/own", "x")
print(json.dumps({
    "reached": reached,
    "own": helper.WORDS + read(PROJECT + "/named/prompt.txt"),
    "name": socket.getaddrinfo("localhost", 80)[0][4][0],
}))
"""


@pytest.fixture
def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with much that is private, and a PATH with credentials beside its programs."""
    cargo = folder / "tools/.cargo"
    (cargo / "bin").mkdir(parents=True)
    (cargo / "credentials.toml").write_text("token")
    monkeypatch.setenv("PATH", f"{cargo / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SOME_KEY", "private-variable")
    other = folder / "elsewhere/run"
    for path, text in {
        folder / ".git/objects/x": "verifier",
        folder / ".env": "KEY=1",
        folder / "run.toml": "[env]",
        folder / "runs/run/secrets.json": "key",
        folder / "more.jsonl": '{"answer": "x"}\n',
        folder / "__pycache__/checks.cpython-311.pyc": "x",
        folder / "hidden_helper.py": "KEY = 1\n",
        folder / "checks.py": CHECKS,
        folder / "helper.py": "WORDS = 'own '\n",
        folder / "named/prompt.txt": "named",
        folder / "named/old-run/secrets.json": "key",
        other / "secrets.json": "key",
        folder / "agent.py": f"CARGO, OTHER = {str(cargo)!r}, {str(other)!r}\n"
        f"ATTEMPTS = {ATTEMPTS!r}\n{AGENT}",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def play(make_settings: Callable[..., Settings], fake_module: ModuleType) -> Callable[..., Any]:
    """Play one episode of the project's agent."""

    async def play(router: Any, **env: Any) -> None:
        settings = make_settings(
            **{
                "rollout_function_path": None,
                "tasks": "checks:tasks",
                "agent_command": f"{sys.executable} -S agent.py {{task_file}}",
                "verifier": "checks:verify",
            }
            | env
        )
        router.num_episodes = 1
        stop = fake_module.asyncio.Event()
        await run(settings, router_url=router.url, runner_key=fake_module.RUNNER_KEY, stop=stop)

    return play


@pytest.mark.medium
async def test_a_hostile_program_reaches_nothing(router: Any, project: Path, play: Any) -> None:
    """Not the machine, its users, the project, other runs, other processes or rare system calls."""
    await play(router, hidden_task_fields=["answer"], agent_read_only=["named"])
    assert router.closed("outcome") == ["completed"], router.closed("error")
    report = json.loads(router.closed("output")[0])
    assert report == {"reached": {}, "own": "own named", "name": report["name"]}


@pytest.mark.slow
@pytest.mark.skipif("OUTLOOP_NESTED" in os.environ, reason="is what the test starts")
def test_a_hostile_program_of_a_user_reaches_nothing() -> None:
    """The same attempts, where the runner is not root: a namespace in which it is user 1000."""
    test = f"{__file__}::test_a_hostile_program_reaches_nothing"
    # Not below /tmp, of which a program has its own.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        answer = subprocess.run(
            [
                *("bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000"),
                *("--dev-bind", "/", "/", sys.executable, "-m", "pytest", "-q"),
                *("-p", "no:cacheprovider", f"--basetemp={temporary}/nested", test),
            ],
            env={**os.environ, "OUTLOOP_NESTED": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("name", [".git", ".env", "runs", "named/old-run", "checks.py"])
def test_a_name_that_stays_hidden_is_refused(
    project: Path, make_settings: Callable[..., Settings], name: str
) -> None:
    """A name in the settings that shows nothing does not pass without a word."""
    settings = make_settings(
        rollout_function_path=None,
        tasks="checks:tasks",
        agent_command=f"{sys.executable} -S agent.py {{task_file}}",
        verifier="checks:verify",
        agent_read_only=["named", name],
    )
    hidden = [*hidden_paths(settings), project / "runs"]
    with pytest.raises(SettingsError, match="stays hidden"):
        CommandAgent(settings.env, hidden).check_tasks(())


WAITING = """
import os, socket, subprocess, sys, time

def fill(path):
    with open(path, "wb") as file:
        file.write(b"x" * 20 * 2**20)

"""
HOGS = {
    "its folder": ("[fill(f'{n}') for n in range(4)]", "env.agent_disk_mb=60"),
    "temporary files": ("[fill(f'/tmp/{n}') for n in range(4)]", "env.agent_disk_mb=60"),
    "shared memory": ("[fill(f'/dev/shm/{n}') for n in range(4)]", "env.agent_disk_mb=60"),
    "many empty files": (
        "[open(f'/tmp/{n}', 'w').close() for n in range(15_500)]",
        "env.agent_disk_mb=60",
    ),
    "a deep place": (
        "[(os.mkdir('d'), os.chdir('d')) for _ in range(1100)]; [fill(str(n)) for n in range(4)]",
        "env.agent_disk_mb=60",
    ),
    "files without names": (
        "kept = [open(f'/tmp/{n}', 'wb') for n in range(4)]; [os.unlink(one.name) for one in kept];"
        "[one.write(b'x' * 20 * 2**20) for one in kept]",
        "env.agent_disk_mb=60",
    ),
    "terminals": ("kept = [os.openpty() for _ in range(400)]", "too many pseudo-terminals"),
    "one large file": ("open('/tmp/x', 'wb').truncate(2**30)", "File too large"),
    "memory of many": (
        "[subprocess.Popen([sys.executable, '-S', '-c', "
        "'data = b\"x\" * (80 * 2**20); import time; time.sleep(600)']) for _ in range(4)]",
        "env.agent_memory_mb=200",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOGS)
async def test_what_a_program_hoards_is_limited(
    name: str, router: Any, project: Path, play: Any
) -> None:
    """Wherever it may write, however its files are named; the sentence names the setting."""
    attempt, words = HOGS[name]
    router.deadline_s = 60.0
    (project / "agent.py").write_text(f"{WAITING}{attempt}\ntime.sleep(600)\n")
    await play(router, agent_disk_mb=60, agent_memory_mb=200)
    assert words in router.closed("error")[0]
    assert router.closed("failure_kind") == ["agent"]


LEFT = {
    "a link to the tasks": "os.symlink(PROJECT + '/more.jsonl', 'answer.txt')",
    "a link through a folder": "os.symlink(PROJECT, 'sub')",
    "a link by two steps": "os.symlink('b', 'answer.txt'); os.symlink(PROJECT + '/run.toml', 'b')",
    "a link upwards": "os.symlink('../../../../../../../../etc/passwd', 'answer.txt')",
    "a link to nothing yet": "os.symlink('/tmp/later', 'answer.txt')",
    "links in a circle": "os.symlink('answer.txt', 'answer.txt')",
    "a FIFO": "os.mkfifo('answer.txt')",
    "a socket": "socket.socket(1).bind('answer.txt')",
    "a folder": "os.mkdir('answer.txt')",
    "a file without rights": "open('answer.txt', 'w').close(); os.chmod('answer.txt', 0)",
    "a huge file": "open('answer.txt', 'wb').truncate(2**25)",
    "a deep folder": "[(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]",
    "a folder without rights": "os.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0)",
    "its own folder without rights": "os.chmod('.', 0)",
    "names that are no text": "[open(bytes(n), 'w').close() for n in ([255], [97, 10], [27, 91])]",
    "many links": "[os.symlink('/etc/passwd', f'l{n}') for n in range(20_000)]",
}
JUDGE = """
import os


def verify(task, result):
    read = result.read("answer.txt")
    assert read in (None, b"")
    assert result.read("sub/more.jsonl") is None
    assert result.read("../../x") is None
    assert result.read("a" + chr(0)) is None
    for name in os.listdir(result.folder):
        path = result.folder / name
        assert os.path.realpath(path).startswith(os.path.realpath(result.folder)), name
        assert path.is_file() or path.is_dir(), name
        os.listdir(path) if path.is_dir() else path.open().close()
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
async def test_what_a_program_leaves_changes_no_verdict(
    name: str, router: Any, project: Path, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier finds only regular files and folders of the episode's; all is removed after it."""
    kept = project / "temporary"
    kept.mkdir()
    monkeypatch.setenv("TMPDIR", str(kept))
    (project / "judging.py").write_text(JUDGE)
    code = "import os, socket\nPROJECT = os.environ['OUTLOOP_PROJECT_DIR']\n"
    (project / "agent.py").write_text(f"{code}{LEFT[name]}\nprint(42)\n")
    router.deadline_s = 120.0
    await play(router, verifier="judging:verify", num_workers=1)
    assert router.closed("outcome") == ["completed"], router.closed("error")
    assert router.closed("reward") == [{"value": 1.0, "components": {}}]
    assert [*kept.iterdir()] == []
