"""Runs at the start of every Python process of a server whose PYTHONPATH begins with this directory.

With GPUSERVE_MARKERS (a directory) set it makes the process dumpable without ptrace: ``SIGRTMAX-3`` writes the stacks
of all threads to ``$GPUSERVE_MARKERS/fh.<pid>.<starttime>.txt``, even while C code holds the GIL; and under Yama it
lets any process of this user attach. Then, always, it runs the sitecustomize that it shadows, under its own name.

Standard library only; written for any Python that may sit on the path, hence type comments; nothing here may ever
break the program it is a guest of.
"""
# pathlib, contextlib and enum are dear at start-up; f-strings and annotations are syntax errors to some hosts.
# ruff: noqa: PTH100, PTH118, PTH120, SIM105, UP031

import os
import sys


def _start_time():  # type: () -> int
    """Field 22 of /proc/self/stat; a raw read, because open() would import codecs."""
    handle = os.open("/proc/self/stat", os.O_RDONLY)
    try:
        return int(os.read(handle, 4096).rpartition(b")")[2].split()[19])
    finally:
        os.close(handle)


def _allow_tracers(scope="/proc/sys/kernel/yama/ptrace_scope"):  # type: (str) -> None
    """Under Yama scope 1 only ancestors may attach, and a dumper is none; a child does not inherit the permission."""
    try:
        handle = os.open(scope, os.O_RDONLY)
    except OSError:
        return  # no Yama: ordinary rules, nothing to ask for (and no ctypes to import: 2-4 ms)
    try:
        restricted = os.read(handle, 16).strip() == b"1"
    finally:
        os.close(handle)
    if restricted:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
        pr_set_ptracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
        prctl(ctypes.c_int(pr_set_ptracer), anyone, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


# What the handler writes to: descriptor, (device, inode).
_marker = None  # type: tuple[int, tuple[int, int]] | None


def _identity(handle):  # type: (int) -> tuple[int, int]
    found = os.fstat(handle)
    return found.st_dev, found.st_ino


def _register(directory):  # type: (str) -> None
    """Open this process's marker and point the handler at it; in a fork child, in place of the parent's."""
    global _marker
    import faulthandler

    try:
        from _signal import SIGRTMAX  # type: ignore[import-not-found,unused-ignore]  # signal costs an import of enum
    except ImportError:
        from signal import SIGRTMAX

    path = os.path.join(directory, "fh.%d.%d.txt" % (os.getpid(), _start_time()))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o600)
    faulthandler.register(int(SIGRTMAX) - 3, file=handle, all_threads=True, chain=False)
    parents, _marker = _marker, (handle, _identity(handle))
    if parents is not None and _identity(parents[0]) == parents[1]:  # else the program uses the number for its own
        os.close(parents[0])


def _quietly(*steps):  # type: (object) -> None
    """Call each step; a guest's trouble is never its host's."""
    for step in steps:
        try:
            step()  # type: ignore[operator]
        except Exception:
            pass


def _install():  # type: () -> None
    directory = os.environ.get("GPUSERVE_MARKERS")
    if not directory:
        return

    def again():  # type: () -> None
        _quietly(lambda: _register(directory), _allow_tracers)

    again()
    _quietly(lambda: os.register_at_fork(after_in_child=again))


def _chain():  # type: () -> None
    """Import the sitecustomize further down the path, under its own name, with its own errors, as if we were not here.

    Our directory leaves sys.path for good (children get it from PYTHONPATH); importlib.util would cost 2-8 ms.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    ourselves = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if getattr(error, "name", "sitecustomize") != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ourselves  # there is no other


if __name__ == "sitecustomize":  # imported under any other name, say by a test, it only defines
    _quietly(_install)
    _chain()
