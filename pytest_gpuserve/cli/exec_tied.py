"""Become a command that is told by SIGTERM when its parent dies: ``exec_tied.py PARENT FD CMD…``.

Run by path, with the standard library alone. It writes ``+`` to FD, and why the command cannot be run, as errno. No
``preexec_fn``, which is not safe beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, told, *argv = sys.argv[1:]
    os.set_inheritable(int(told), False)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        os._exit(1)
    os.write(int(told), b"+")
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(int(told), str(error.errno).encode())


if __name__ == "__main__":
    main()
