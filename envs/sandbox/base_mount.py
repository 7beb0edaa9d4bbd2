"""Shows a folder as one session user's own, and starts a command as that user; run as a script.

    python base_mount.py FOLDER OWNER USER COMMAND...

OverlayFS gives a changed file the owner that it had. So the session's user has to own what the
session begins with, and the folder is shared by many. An id-mapped mount (Linux 5.12) translates
OWNER into USER, in a mount namespace that only the command sees. Where the kernel refuses, the
command runs as OWNER.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_IDMAP = 0x1, 0x100000
_MOVE_MOUNT_F_EMPTY_PATH = 4
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
"""The same for every machine."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def main(folder: str, owner: int, user: int, *command: str) -> None:
    """Run the command; never returns."""
    try:
        _map(folder, owner, user)
    except OSError:
        user = owner
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.execv(command[0], command)


def _map(folder: str, owner: int, user: int) -> None:
    users = _namespace(owner, user)
    _checked(_libc.unshare(_CLONE_NEWNS))
    _checked(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    path = os.fsencode(folder)
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
    tree = _checked(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path, flags))
    mapped = _Attributes(_MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, 0, 0, users)
    size = ctypes.sizeof(mapped)
    _checked(
        _libc.syscall(_SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(mapped), size)
    )
    _checked(_libc.syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, path, _MOVE_MOUNT_F_EMPTY_PATH))
    os.close(users)


def _namespace(owner: int, user: int) -> int:
    """A descriptor of a user namespace that maps `owner` to `user`, by a process that ends."""
    told, tell = os.pipe()
    asked, ask = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"-" if _libc.unshare(_CLONE_NEWUSER) else b"+")
        os.close(ask)
        os.read(asked, 1)
        os._exit(0)
    try:
        if os.read(told, 1) != b"+":
            raise OSError("no user namespaces")
        for kind in ("uid", "gid"):
            with open(f"/proc/{pid}/{kind}_map", "w") as file:
                file.write(f"{owner} {user} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (told, tell, asked, ask):
            os.close(fd)
        os.waitpid(pid, 0)


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
