"""A filter by which the kernel refuses system calls that a program in a sandbox does not need.

A refused call fails with an error code, as on a kernel without that call.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in the data that the kernel gives the filter; the lower half of an argument is first."""
_X32 = 0x40000000
"""x86-64's second table of system calls begins here: the same calls under other numbers."""
_NUMBER_OF_CLONE3 = 435
_FIRST_UNKNOWN = 449
"""Calls that kernels after 5.15 added, here and below the same for every machine."""
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces."""
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
"""Others reach kernel code that programs do not need (AF_ALG, AF_NETLINK, AF_PACKET), or the world
outside of the network namespace (AF_VSOCK)."""

_REFUSED: tuple[tuple[str, int | None, int | None], ...] = (
    # Reading or steering other processes.
    ("ptrace", 101, 117),
    ("process_vm_readv", 310, 270),
    ("process_vm_writev", 311, 271),
    ("kcmp", 312, 272),
    ("pidfd_getfd", 438, 438),
    ("process_madvise", 440, 440),
    ("process_mrelease", 448, 448),
    ("move_pages", 279, 239),
    ("migrate_pages", 256, 238),
    # Namespaces, mounts, and handles that name files without a path.
    ("unshare", 272, 97),
    ("setns", 308, 268),
    ("mount", 165, 40),
    ("umount2", 166, 39),
    ("pivot_root", 155, 41),
    ("open_tree", 428, 428),
    ("move_mount", 429, 429),
    ("fsopen", 430, 430),
    ("fsconfig", 431, 431),
    ("fsmount", 432, 432),
    ("fspick", 433, 433),
    ("mount_setattr", 442, 442),
    ("name_to_handle_at", 303, 264),
    ("open_by_handle_at", 304, 265),
    ("fanotify_init", 300, 262),
    ("fanotify_mark", 301, 263),
    # The machine itself.
    ("reboot", 169, 142),
    ("swapon", 167, 224),
    ("swapoff", 168, 225),
    ("sethostname", 170, 161),
    ("setdomainname", 171, 162),
    ("acct", 163, 89),
    ("quotactl", 179, 60),
    ("quotactl_fd", 443, 443),
    ("syslog", 103, 116),
    ("vhangup", 153, 58),
    ("uselib", 134, None),
    ("_sysctl", 156, None),
    ("iopl", 172, None),
    ("ioperm", 173, None),
    ("modify_ldt", 154, None),
    # Kernel code, tracing and key rings.
    ("create_module", 174, None),
    ("init_module", 175, 105),
    ("finit_module", 313, 273),
    ("delete_module", 176, 106),
    ("kexec_load", 246, 104),
    ("kexec_file_load", 320, 294),
    ("bpf", 321, 280),
    ("perf_event_open", 298, 241),
    ("lookup_dcookie", 212, 18),
    ("userfaultfd", 323, 282),
    ("add_key", 248, 217),
    ("request_key", 249, 218),
    ("keyctl", 250, 219),
    ("io_uring_setup", 425, 425),
    ("io_uring_enter", 426, 426),
    ("io_uring_register", 427, 427),
    # Memory that no limit on processes or files counts, and where it lies.
    ("shmget", 29, 194),
    ("shmat", 30, 196),
    ("shmctl", 31, 195),
    ("semget", 64, 190),
    ("semop", 65, 193),
    ("semctl", 66, 191),
    ("semtimedop", 220, 192),
    ("msgget", 68, 186),
    ("msgsnd", 69, 189),
    ("msgrcv", 70, 188),
    ("msgctl", 71, 187),
    ("mq_open", 240, 180),
    ("mq_unlink", 241, 181),
    ("memfd_create", 319, 279),
    ("memfd_secret", 447, 447),
    # What the kernel counts once for the whole machine, and programs do by threads.
    ("io_setup", 206, 0),
    ("mbind", 237, 235),
    ("set_mempolicy", 238, 237),
)
"""With the numbers of x86-64 and of aarch64; None: not there."""
_MACHINES = {
    # The kernel's own name; clone, prlimit64; socket, socketpair.
    "x86_64": (0xC000003E, 56, 302, (41, 53)),
    "aarch64": (0xC00000B7, 220, 261, (198, 199)),
}


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.POINTER(_Instruction)))


def build() -> ctypes.Structure | None:
    """Build the filter for this machine; None if its call numbers are unknown."""
    name = os.uname().machine
    if name not in _MACHINES:
        return None
    machine, clone, prlimit, sockets = _MACHINES[name]
    refused = [numbers[list(_MACHINES).index(name)] for _, *numbers in _REFUSED]
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        # The error of an older kernel, so that programs use older calls. The flags of clone3 are in
        # memory, which a filter cannot read.
        (_AT_LEAST, 1, 0, _FIRST_UNKNOWN),
        (_EQUAL, 0, 1, _NUMBER_OF_CLONE3),
        (_RETURN, 0, 0, _ERROR | _ENOSYS),
    ]
    for number in refused:
        if number is not None:
            steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _EPERM)]
    steps += [
        (_EQUAL, 0, 4, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        # Limits of another process: code under test would set those of the tests.
        (_EQUAL, 0, 4, prlimit),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERROR | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        *((_EQUAL, len(sockets) - position, 0, call) for position, call in enumerate(sockets)),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *(
            (_EQUAL, len(_FAMILIES) - position, 0, family)
            for position, family in enumerate(_FAMILIES.values())
        ),
        (_RETURN, 0, 0, _ERROR | _EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    array = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    return _Program(len(steps), array)


def encode(program: ctypes.Structure) -> bytes:
    """The filter's instructions, as the kernel and bubblewrap read them."""
    assert isinstance(program, _Program)
    return ctypes.string_at(program.steps, program.length * ctypes.sizeof(_Instruction))


def load(program: ctypes.Structure) -> None:
    """Apply the filter to this process and all that it starts; needs no_new_privs.

    Raises:
        OSError: the kernel has no seccomp.
    """
    libc = ctypes.PyDLL(None, use_errno=True)
    answer = libc.prctl(
        ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program)
    )
    if answer:
        raise OSError(ctypes.get_errno(), "seccomp: the filter could not be loaded")
