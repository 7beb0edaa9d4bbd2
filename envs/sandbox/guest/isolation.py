"""Separates the programs of a session: by namespaces, by user ids, or not at all.

After `end` no process of the program is alive, except with NoIsolation, which ends only the
processes in its process group.
"""

from __future__ import annotations

import os
import resource

from outloop.envs.sandbox.guest import seccomp, syscalls, workspace

TYPE_CHECKING = False
if TYPE_CHECKING:  # which imports this module
    from outloop.envs.sandbox.guest import program

_BOX = "/box"
_GIVEN, _KEPT = "/outloop/given", "/outloop/kept"
"""Empty folders beside the supervisor's code, over which the init mounts."""
_FIRST_UID, _NUM_UIDS = 20_000, 40_000
"""User ids in containers: below 65,536, which engines map; each container has its own."""

_OF_A_USER = {
    "max_user_namespaces": 0,
    "max_inotify_instances": 16,
    "max_inotify_watches": 8192,
}
"""What the programs of a session may have at once of what the kernel counts by user."""
_MAX_TERMINALS = 16
_MAX_SIGNALS = 1024
"""Queued signals and timers; the kernel counts them by user too."""


class NamespaceIsolation:
    """Gives each program pid, mount and ipc namespaces of its own, by CAP_SYS_ADMIN."""

    temporary = "/tmp"
    is_counted_by_user = True

    def __init__(self, disk_bytes: int, max_files: int, base: str) -> None:
        self._filter = seccomp.build()
        self._disk = (disk_bytes, max_files)
        self._base = base
        self._is_kept_open = False
        # In a mount namespace that this process owns, so that it may mount.
        syscalls.own_mounts()
        _mount_terminals()
        for name, number in _OF_A_USER.items():
            path = f"/proc/sys/user/{name}"
            if os.path.exists(path):
                with open(path, "w") as file:
                    file.write(str(number))
        if base:
            # A base that does not fit the disk ends the session here, before any program runs.
            self.open_kept()

    def open_kept(self) -> None:
        """In the supervisor: mount the folder that calls with kept files share."""
        if not self._is_kept_open:
            self._is_kept_open = True
            _mount_box(*self._disk, self._base)

    def fork(self) -> int:
        """Start the program's init, pid 1 of its own namespace."""
        return syscalls.clone(syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC)

    def enter(self, index: int, asked: program.Order) -> str:
        """In the init: mount what the program can see; returns the path of the workspace."""
        disk = (asked.disk_bytes, asked.max_files)
        if asked.is_kept_copied:
            _mount_copy_of_kept(*disk, self._base)
        elif not asked.is_kept:
            _mount_box(*disk, self._base)
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        syscalls.mount("proc", "/proc", "proc", flags)
        return "/work"

    def give(self, files: list[tuple[str, int, bytes]]) -> None:
        """In the init: show files that the program cannot change."""
        if not files:
            return
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
        syscalls.mount("tmpfs", _GIVEN, "tmpfs", flags, "mode=0755")
        for path, mode, data in files:
            workspace.write_file(_GIVEN, path, data, mode)
        read_only = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY
        syscalls.mount("none", _GIVEN, "", flags | read_only)

    def confine(self, index: int) -> None:
        """In the program: give up every right over the session."""
        syscalls.drop_capabilities()
        syscalls.forbid_new_privileges()
        if self._filter is not None:
            seccomp.load(self._filter)

    def end(self, index: int, pid: int) -> None:
        """In the init: kill every process that the program left."""
        try:
            os.kill(-1, syscalls.SIGKILL)
        except ProcessLookupError:
            pass

    def clean(self, index: int) -> None:
        """In the supervisor, after the init ended: nothing, its mounts ended with it."""


class UserIsolation:
    """Gives each program a user id of its own; the supervisor is root in a container."""

    temporary = ""
    is_counted_by_user = True

    def __init__(self, disk_bytes: int, max_files: int, base: str) -> None:
        self._base = base
        os.chmod(_BOX, 0o711)
        # Other containers' users are the same to the kernel, which counts processes by user.
        self._uid = _FIRST_UID + int.from_bytes(os.urandom(4), "big") % _NUM_UIDS

    def open_kept(self) -> None:
        """Do nothing: calls make their own folders."""

    def fork(self) -> int:
        """Start the program's init, which stays root."""
        return os.fork()

    def enter(self, index: int, asked: program.Order) -> str:
        """Make the workspace of this program's user; returns its path."""
        kept = f"{_BOX}/{index}-kept"
        root = kept if asked.is_kept else f"{_BOX}/{index}-fresh"
        if not os.path.isdir(root):
            os.mkdir(root, 0o700)
            os.chown(root, self._uid + index, self._uid + index)
            is_copied = asked.is_kept_copied and os.path.isdir(kept)
            if is_copied or self._base:
                self._copy(index, kept if is_copied else self._base, root)
        return root

    def give(self, files: list[tuple[str, int, bytes]]) -> None:
        """Refuse: it takes a mount."""
        _refuse_given(files)

    def _copy(self, index: int, source: str, root: str) -> None:
        # As the program's own user, whose the copies then are.
        pid = os.fork()
        if pid == 0:
            try:
                self.confine(index)
                _copy(source, root)
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            raise OSError(f"{source} could not be copied into {root}")

    def confine(self, index: int) -> None:
        """Become the program's user."""
        os.setgroups([])
        os.setresgid(*[self._uid + index] * 3)
        os.setresuid(*[self._uid + index] * 3)
        syscalls.forbid_new_privileges()

    def end(self, index: int, pid: int) -> None:
        """Kill every process of the program's user."""
        killer = os.fork()
        if killer == 0:
            try:
                self.confine(index)
                os.kill(-1, syscalls.SIGKILL)
            except OSError:
                pass
            os._exit(0)
        os.waitpid(killer, 0)

    def clean(self, index: int) -> None:
        """Kill what outlived its init, and remove its files and shared memory."""
        self.end(index, 0)
        _remove(f"{_BOX}/{index}-fresh")
        for name in os.listdir("/dev/shm"):
            path = f"/dev/shm/{name}"
            if os.lstat(path).st_uid == self._uid + index:
                _remove(path)


class NoIsolation:
    """No isolation: a folder, a process group and resource limits."""

    temporary = ""
    is_counted_by_user = False

    def __init__(self, disk_bytes: int, max_files: int, base: str) -> None:
        import tempfile

        self._base = base
        self._root = tempfile.mkdtemp(prefix="outloop-plain-")

    def open_kept(self) -> None:
        """Do nothing: calls make their own folders."""

    def fork(self) -> int:
        """Start the program's init."""
        return os.fork()

    def enter(self, index: int, asked: program.Order) -> str:
        """Make the workspace; returns its path."""
        kept = f"{self._root}/{index}-kept"
        root = kept if asked.is_kept else f"{self._root}/{index}-fresh"
        if not os.path.isdir(root):
            os.makedirs(root)
            if asked.is_kept_copied and os.path.isdir(kept):
                _copy(kept, root)
            elif self._base:
                _copy(self._base, root)
        return root

    def give(self, files: list[tuple[str, int, bytes]]) -> None:
        """Refuse: it takes a mount."""
        _refuse_given(files)

    def confine(self, index: int) -> None:
        """Give up nothing but set-user-id rights."""
        syscalls.forbid_new_privileges()

    def end(self, index: int, pid: int) -> None:
        """Kill the program's process group."""
        if pid:
            try:
                os.killpg(pid, syscalls.SIGKILL)
            except OSError:
                pass

    def clean(self, index: int) -> None:
        """Remove the program's files."""
        _remove(f"{self._root}/{index}-fresh")

    def close(self) -> None:
        """Remove what was kept."""
        _remove(self._root)


Isolation = NamespaceIsolation | UserIsolation | NoIsolation
ISOLATIONS: dict[str, type[Isolation]] = {
    "namespaces": NamespaceIsolation,
    "users": UserIsolation,
    "plain": NoIsolation,
}


def set_limits(
    *, cpu_s: int, memory_bytes: int, disk_bytes: int, num_processes: int, is_counted: bool
) -> None:
    """Set resource limits of this process and its children; 0 bytes of memory: no limit."""
    limits = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_FSIZE: (disk_bytes, disk_bytes),
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (_MAX_SIGNALS, _MAX_SIGNALS),
    }
    if memory_bytes:
        limits[resource.RLIMIT_AS] = (memory_bytes, memory_bytes)
    if is_counted:
        limits[resource.RLIMIT_NPROC] = (num_processes, num_processes)
    for name, (soft, hard) in limits.items():
        ceiling = resource.getrlimit(name)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(name, (soft, hard))


def _mount_terminals() -> None:
    """Mount pseudo-terminals of the session's own, few of the machine's (kernel.pty.max).

    The kernel makes their device for the user 0 of a user namespace alone. So a process of a
    namespace of its own, which maps 0, makes the file system and leaves its descriptor here.
    """
    flags = syscalls.CLONE_FILES | syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS
    uid, gid = os.getuid(), os.getgid()
    told, tell = os.pipe()
    pid = syscalls.clone(flags)
    if pid == 0:
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"),
                               ("gid_map", f"0 {gid} 1")):  # fmt: skip
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
            options = {"ptmxmode": "0666", "mode": "0620", "max": str(_MAX_TERMINALS)}
            made = syscalls.new_file_system("devpts", options)
            os.write(tell, b"%d" % made)
        except OSError:
            os._exit(1)
        os._exit(0)
    is_made = os.waitpid(pid, 0)[1] == 0
    if is_made:
        made = int(os.read(told, 20))
        syscalls.move_mount(made, "/dev/pts")
        os.close(made)
    os.close(told)
    os.close(tell)
    if not is_made:
        # Kernels before 5.2: programs have none.
        syscalls.mount("none", "/dev/pts", "tmpfs", syscalls.MS_NOSUID, "size=4k,mode=0555")


def _mount_box(disk_bytes: int, max_files: int, base: str) -> None:
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    options = f"size={disk_bytes},nr_inodes={max_files + 12},mode=0755"
    syscalls.mount("tmpfs", _BOX, "tmpfs", flags, options)
    for name, target in (("work", "/work"), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"{_BOX}/{name}", 0o755)
        syscalls.mount(f"{_BOX}/{name}", target, "", syscalls.MS_BIND)
    if base and not _mount_layer(base):
        _copy(base, "/work")


def _mount_copy_of_kept(disk_bytes: int, max_files: int, base: str) -> None:
    """Mount a disk that begins with what is on the kept one, and changes nothing there."""
    syscalls.mount(_BOX, _KEPT, "", syscalls.MS_BIND)
    _mount_box(disk_bytes, max_files, "")
    changes, work = f"{_KEPT}/layer/changes", f"{_KEPT}/work"
    is_layer = os.path.isdir(changes)
    if not _mount_layer(*((changes, base) if is_layer else (work,))):
        if is_layer:
            raise OSError("the kept layer cannot be mounted a second time")
        _copy(work, "/work")
    if os.listdir(f"{_KEPT}/tmp"):
        _copy(f"{_KEPT}/tmp", "/tmp")
    syscalls.unmount(_KEPT)


def _mount_layer(*lower: str) -> bool:
    """Mount folders, the upper ones first, with a layer of changes over /work; False where they
    have to be copied."""
    if any(os.stat(folder).st_uid != os.getuid() for folder in lower):
        return False  # OverlayFS gives a changed file its owner, whom this namespace does not know.
    os.mkdir(f"{_BOX}/layer", 0o755)
    os.mkdir(f"{_BOX}/layer/changes", 0o755)
    os.mkdir(f"{_BOX}/layer/scratch", 0o755)
    changes, scratch = f"{_BOX}/layer/changes", f"{_BOX}/layer/scratch"
    options = f"lowerdir={':'.join(lower)},upperdir={changes},workdir={scratch},userxattr"
    try:
        syscalls.mount(
            "overlay", "/work", "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, options
        )
    except OSError:  # Kernels before 5.11, and file systems that OverlayFS does not take.
        return False
    return True


def _copy(base: str, root: str) -> None:
    """Copy a tree with its modes, times and links; the copies are this user's.

    Raises:
        OSError: it does not fit the disk, or cannot be read.
    """
    words = ["cp", "-R", "-P", "--preserve=mode,timestamps,links", "--", f"{base}/.", root]
    if os.spawnv(os.P_WAIT, "/bin/cp", words):
        raise OSError(f"{base} could not be copied into {root}")


def _refuse_given(files: list[tuple[str, int, bytes]]) -> None:
    if files:
        raise OSError("files that a program cannot change need the sandbox bubblewrap")


def _remove(path: str) -> None:
    """Remove a tree of any depth: rm walks it with open folders, so no path is too long."""
    if os.path.lexists(path):
        os.spawnv(os.P_WAIT, "/bin/rm", ["rm", "-rf", "--", path])
