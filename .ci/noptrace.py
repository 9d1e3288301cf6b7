"""Run a command without ptrace and process_vm_readv, as in a container without SYS_PTRACE: ``noptrace.py CMD...``."""

import ctypes
import os
import platform
import struct
import sys

REFUSED = {"x86_64": (101, 310), "aarch64": (117, 270)}[platform.machine()]
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def refuse(numbers: tuple[int, ...]) -> None:
    """Install the filter in this process; whatever it runs inherits it."""
    lines = [(LOAD_NUMBER, 0, 0, 0)]
    lines += [(JUMP_IF_EQUAL, len(numbers) - n, 0, number) for n, number in enumerate(numbers)]
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = Filter(len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        sys.exit(f"no seccomp here: {os.strerror(ctypes.get_errno())}")
    if libc.ptrace(16, os.getppid(), None, None) == 0 or ctypes.get_errno() != 1:  # PTRACE_ATTACH
        sys.exit("ptrace is still allowed")


if __name__ == "__main__":
    refuse(REFUSED)
    os.execvp(sys.argv[1], sys.argv[1:])
