"""System calls without a function in Python, by ctypes. A call that fails raises OSError."""

from __future__ import annotations

import ctypes
import os

SIGKILL, SIGCHLD, SIGPIPE, SIGXFSZ = 9, 17, 13, 25
"""Not imported: the module `signal` takes as long to import as the first call of a session."""
CLONE_FILES = 0x00000400
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_MOVE_MOUNT_F_EMPTY_PATH = 4
_AT_FDCWD = -100
_MNT_DETACH = 2
_SYS_MOVE_MOUNT, _SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 429, 430, 431, 432
"""The same for every machine."""
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}

# PyDLL keeps the GIL: a clone must come back with the interpreter as it was.
_libc = ctypes.PyDLL(None, use_errno=True)


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def clone(flags: int) -> int:
    """Fork into new namespaces; returns 0 in the child, which is pid 1 with CLONE_NEWPID."""
    machine = os.uname().machine
    if machine not in _SYS_CLONE:
        raise OSError(f"machine={machine!r}; the supervisor knows {', '.join(_SYS_CLONE)}")
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _libc.syscall(_SYS_CLONE[machine], flags | SIGCHLD, None, None, None, None)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _checked(pid, "clone")


def own_mounts() -> None:
    """Give this process a mount namespace that its user namespace owns, so that it may mount."""
    _checked(_libc.unshare(CLONE_NEWNS), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    answer = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode(),
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _checked(answer, f"mount {target}")


def unmount(target: str) -> None:
    """Take a mount away; what is still open there is not disturbed."""
    _checked(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def new_file_system(kind: str, options: dict[str, str]) -> int:
    """Make a file system that is mounted nowhere yet; returns its descriptor."""
    context = _checked(_libc.syscall(_SYS_FSOPEN, kind.encode(), 0), f"fsopen {kind}")
    for key, value in options.items():
        words = (key.encode(), value.encode())
        answer = _libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, *words, 0)
        _checked(answer, f"fsconfig {key}")
    answer = _libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
    _checked(answer, f"fsconfig {kind}")
    made = _checked(_libc.syscall(_SYS_FSMOUNT, context, 0, 0), f"fsmount {kind}")
    os.close(context)
    return made


def move_mount(made: int, target: str) -> None:
    """Mount what `new_file_system` made."""
    path = target.encode()
    answer = _libc.syscall(_SYS_MOVE_MOUNT, made, b"", _AT_FDCWD, path, _MOVE_MOUNT_F_EMPTY_PATH)
    _checked(answer, f"mount {target}")


def _prctl(option: int, value: int, other: int = 0) -> None:
    arguments = [ctypes.c_ulong(number) for number in (value, other, 0, 0)]
    _checked(_libc.prctl(option, *arguments), f"prctl {option}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, SIGKILL)


def set_traceable(is_traceable: bool) -> None:
    """Set whether processes of the same user may read this one's memory and descriptors."""
    _prctl(_PR_SET_DUMPABLE, int(is_traceable))


def forbid_new_privileges() -> None:
    """Keep programs started from here from gaining rights by set-user-id or file capabilities."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_default_action(number: int) -> None:
    """Restore the kernel's action for a signal that Python ignores."""
    _libc.signal(number, None)


def drop_capabilities() -> None:
    """Give up every capability for good."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
