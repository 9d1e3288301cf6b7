"""A server that misbehaves as told: ``serve.py PORT TAG [what...]``. All its processes show TAG in their argv."""

import ctypes
import http.server
import json
import mmap
import multiprocessing
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/silent":
            time.sleep(600)
        if self.path == "/drip":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"begin")
            self.wfile.flush()
            time.sleep(600)
        if self.path == "/last-words":
            threading.Timer(0.3, os._exit, (7,)).start()
            self.answer(500, b"{}")
            return
        if self.path.startswith("/status/"):
            self.answer(int(self.path.rpartition("/")[2]), b"{}")
            return
        if self.path == "/flood":
            print_for_ever()
            self.answer(200, b"{}")
            return
        if self.path == "/die":
            os._exit(7)
        if self.path == "/reset":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        body = {
            "/health": b"ok",
            "/metrics": b'# HELP x y\nreqs_total{a="1"} 2\nreqs_total{a="2,\\"}"} 3.5 1700\nbroken line here\nup 1\n',
            "/env": json.dumps(dict(os.environ)).encode(),
        }.get(self.path)
        self.answer(200 if body else 404, body or b"no")

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(int(self.path.rpartition("/")[2]) if self.path.startswith("/status/") else 200, b"{}")

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


def sleeper(name, code="", env=None, **options):
    """A process of ours that sleeps; ``code`` runs first."""
    argv = [sys.executable, "-c", f"import os,signal,time\n{code}\ntime.sleep(300)", tag, name]
    return subprocess.Popen(argv, env=env, **options)


IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def escape(env=None):
    """A grandchild that nothing leads to: double fork, sessions of its own, descriptors closed, SIGTERM ignored."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # inherited, so that there is no moment without it
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 64)
            code = "import time\ntime.sleep(300)"
            os.execve(sys.executable, [sys.executable, "-c", code, tag, "escaped"], os.environ if env is None else env)
        os._exit(0)
    os.wait()


def hop(path):
    """A process that is never where one looks: it forks and exits for ever, a new session each time. A look at the
    process table hardly ever shows it; the byte it appends at each hop does."""
    if os.fork() == 0:
        end, file = time.monotonic() + 40, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(file, b".")
        os._exit(0)


def breed():
    """Children that breed children, all in one process group, at most 150 at a time for 40 s."""
    if os.fork() == 0:
        end, count = time.monotonic() + 40, 0
        while time.monotonic() < end:
            if count < 150 and os.fork() == 0:
                time.sleep(0.05)
                if os.fork():
                    os._exit(0)
                time.sleep(300)
            count += 1
            time.sleep(0.001)
        os._exit(0)


def many(count):
    for _ in range(count):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
            os._exit(0)


def bomb(group):
    """Forks without end, in ever new sessions, as many as a cgroup allows."""
    if os.fork() == 0:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write("0")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if os.fork() == 0:
                    os.setsid()
            except OSError:
                time.sleep(0.001)
        os._exit(0)


def half_dead():
    """A process whose first thread has exited: the kernel calls it a zombie, but it runs."""
    thread = "threading.Thread(target=time.sleep, args=(300,)).start(); ctypes.CDLL(None).syscall(60, 0)"
    subprocess.Popen([sys.executable, "-c", f"import ctypes,threading,time\n{thread}", tag, "half_dead"])


def print_for_ever():
    threading.Thread(target=lambda: [os.write(1, b"noise\n" * 100) for _ in iter(int, 1)], daemon=True).start()


def make_shm(name):
    """A file in /dev/shm, mapped and kept by name as engines do, that nobody will unlink."""
    fd = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)


def named_semaphore(name):
    """A POSIX semaphore that nobody unlinks: /dev/shm/sem.NAME, which its user maps under another, deleted name."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sem_open.restype = ctypes.c_void_p
    if not libc.sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1):
        raise OSError(ctypes.get_errno(), "sem_open")


def tracked_shm(name):
    """Shared memory of multiprocessing, which its resource tracker unlinks when we are gone."""
    kept.append(shared_memory.SharedMemory(name=name, create=True, size=4096))


def child_with_shm(name):
    tracked_shm(name)
    time.sleep(300)


kept = []
servers = []

if __name__ == "__main__":
    port, tag, *what = sys.argv[1:]
    for word in what:
        name, _, value = word.partition("=")
        if name == "say":
            print(value, flush=True)
        elif name == "remove-log":
            Path("/proc/self/fd/1").readlink().unlink()
        elif name == "exit":
            sys.exit(int(value))
        elif name == "exit-after-said":
            sys.stderr.write("\x1b[31mred\x1b[0m \x07bell\nlast words\n")
            sys.exit(int(value))
        elif name == "kill-self":
            os.kill(os.getpid(), int(value))
        elif name == "sleep":
            time.sleep(float(value))
        elif name == "ignore-term":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif name == "deaf-to-term":
            signal.signal(signal.SIGTERM, lambda *_: servers[0].socket.close())
        elif name == "escape":
            escape()
        elif name == "escape-clear":
            escape({})
        elif name == "uid":
            import encodings.idna  # noqa: F401  (where the interpreter lives, the other user may not read)

            os.setgroups([])
            os.setgid(int(value))
            os.setuid(int(value))
        elif name == "child":
            sleeper("child", IGNORE)
        elif name == "stopped-child":
            sleeper("stopped", "os.kill(os.getpid(), signal.SIGSTOP)")
        elif name == "titled":
            sleeper("titled", f"import setproctitle; setproctitle.setproctitle('x ' + {tag!r})")
        elif name in ("daemon-called", "child-called"):
            code = f"open('/proc/self/comm', 'w').write({value!r})"
            sleeper("called", code, start_new_session=name == "daemon-called")
        elif name == "half-dead":
            half_dead()
        elif name == "hop":
            hop(value)
        elif name == "many":
            many(int(value))
        elif name == "bomb":
            bomb(value)
        elif name == "breed":
            breed()
        elif name == "shm":
            make_shm(value)
        elif name == "semaphore":
            named_semaphore(value)
        elif name == "tracked-shm":
            tracked_shm(value)
        elif name == "spawn-shm":
            multiprocessing.get_context("spawn").Process(target=child_with_shm, args=(value,), daemon=True).start()
        elif name == "daemonize":
            if os.fork():
                os._exit(0)
            os.setsid()
        elif name == "long-line":
            os.write(1, b"x" * (int(value) << 20))
        elif name == "binary":
            os.write(1, os.urandom(200_000) + b"\n")
        elif name == "endless":
            print_for_ever()
        elif name == "hang":
            time.sleep(600)
        elif name == "deaf":
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            deaf.bind(("127.0.0.1", int(port)))
            deaf.listen()
            time.sleep(600)
        elif name == "gil":
            ctypes.PyDLL(None).sleep(600)
        else:
            sys.exit(f"unknown: {word}")
    servers.append(Server(("127.0.0.1", int(port)), Handler))
    servers[0].serve_forever()
