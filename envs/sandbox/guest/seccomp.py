"""System calls that a program in a jail has no use for, refused by the kernel.

Owns: which calls, and the filter program. Does not own: when it is loaded (program). Invariant: a
filter can only take away; what it refuses fails with EPERM, so that a program can go on without it.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
_X32 = 0x40000000
"""x86-64's second table of system calls begins here: the same calls under other numbers."""

# Reading or steering other processes; namespaces, mounts and handles that name files without a
# path; kernel code, tracing and key rings; memory that no limit on processes or files counts.
_X86_64 = (
    *(101, 310, 311, 312, 438, 440, 448),
    *(
        155,
        165,
        166,
        167,
        168,
        169,
        170,
        171,
        272,
        303,
        304,
        308,
        428,
        429,
        430,
        431,
        432,
        433,
        442,
    ),
    *(
        103,
        134,
        156,
        163,
        172,
        173,
        174,
        175,
        176,
        179,
        212,
        246,
        248,
        249,
        250,
        298,
        313,
        320,
        321,
    ),
    *(323, 425, 426, 427, 29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240, 241, 319, 447),
)
_AARCH64 = (
    *(117, 270, 271, 272, 438, 440, 448),
    *(41, 39, 40, 97, 264, 265, 268, 428, 429, 430, 431, 432, 433, 442, 224, 225, 161, 162, 142),
    *(89, 116, 104, 105, 106, 217, 218, 219, 241, 273, 280, 282, 294, 60),
    *(425, 426, 427, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196, 180, 181, 279, 447),
)
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}


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
    """The filter for this machine; None if its call numbers are not known here."""
    known = _MACHINES.get(os.uname().machine)
    if known is None:
        return None
    machine, refused = known
    steps = [
        (_LOAD, 0, 0, 4),  # the table of calls in use
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the call's number
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _EPERM),
    ]
    for position, number in enumerate(refused):
        steps.append((_EQUAL, len(refused) - position, 0, number))
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    array = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    return _Program(len(steps), array)


def load(program: ctypes.Structure) -> None:
    """Bind this process and all that it starts to the filter; needs no_new_privs.

    Raises:
        OSError: the kernel has no seccomp.
    """
    libc = ctypes.PyDLL(None, use_errno=True)
    answer = libc.prctl(
        ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_MODE_FILTER), ctypes.byref(program)
    )
    if answer:
        raise OSError(ctypes.get_errno(), "seccomp: the filter could not be loaded")
