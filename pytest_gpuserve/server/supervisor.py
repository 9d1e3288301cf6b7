"""Starts one server and owns its death: ``python -S -E supervisor.py CONFIG.json`` (protocol: docs/architecture.md).

Standard library only, nothing of the package: it runs when pytest is wedged, dying or dead. One thread, one poll loop,
no call that can block; to end the server's processes it asks tree.py, a process that may get stuck and be replaced.
Configuration: directory, cookie, owners [[pid, start]], grace, argv, env (None removes), cwd, log, alarms; log_limit in
bytes (0: none) and log_alarm, which goes off when the log reaches it.
"""

# ruff: noqa: PTH109
from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from . import cgroup, loop
    from .loop import PR_SET_CHILD_SUBREAPER, RESET, Journal, Listener, Loop, Tree, prctl, spawn, stat, watch_folder
    from .tree import SHARED
else:  # as a script: its own directory comes first
    import cgroup
    import loop
    from loop import PR_SET_CHILD_SUBREAPER, RESET, Journal, Listener, Loop, Tree, prctl, spawn, stat, watch_folder
    from tree import SHARED

COOKIE, MARK, SHM = "GPUSERVE_COOKIE", "GPUSERVE_ALARM", "/dev/shm"
PIDFD_SIGNAL_PROCESS_GROUP = 4
STRIKE = 1.0  # seconds after the deadline: resource trackers have had theirs
LAST_RESORT = 60.0  # seconds after the deadline: whatever is wrong, the supervisor does not stay for ever
ALL_GONE, SOME_LEFT, TROUBLE = 0, 3, 4  # exit codes


class Alarm(NamedTuple):
    name: str
    deadline: float
    argv: list[str]
    limit: float
    spare: list[int]
    kill: bool

    @classmethod
    def parse(cls, request: Mapping[str, Any], deadline: float) -> Alarm:
        argv = request.get("argv", [])
        if not isinstance(argv, list) or not all(isinstance(word, str) and "\0" not in word for word in argv):
            raise ValueError("argv must be a list of texts")
        spare, kill = [int(code) for code in request.get("spare", [75])], bool(request.get("kill", True))
        return cls(str(request["name"]), deadline, argv, seconds(request.get("limit", 30)), spare, kill)


class Dump(NamedTuple):
    """An alarm's argv while it runs; killed at ``until``, which moves while it waits for a CPU, to ``most`` at most."""

    alarm: Alarm
    pid: int
    begun: float
    until: float
    most: float


def seconds(value: Any) -> float:
    if not 0 <= float(value) < 1e12:  # nor NaN
        raise ValueError(f"{value!r} is no time in seconds")
    return float(value)


def own_shm() -> dict[int, str]:
    """Inode and name of this user's files in /dev/shm."""
    with suppress(OSError), os.scandir(SHM) as entries:
        return {e.inode(): e.name for e in entries if e.stat(follow_symlinks=False).st_uid == os.geteuid()}
    return {}


class Supervisor:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.me, self.home = config, os.getpid(), os.getcwd()
        self.owners = [(int(pid), int(start)) for pid, start in config["owners"]]
        self.unpinned = False  # there is an owner that no pidfd could be had for
        self.nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.null = os.open(os.devnull, os.O_RDONLY)
        self.group = ""  # the server's cgroup
        self.code = -1  # ours, once we are done
        self.root = self.root_fd = self.exec_fd = -1
        self.exit_code: int | None = None
        self.alarms, self.fired = dict[str, Alarm](), list[str]()
        self.dump: Dump | None = None
        self.killing, self.deadline = "", 0.0  # why the server is to be gone, and when it is killed
        self.shared, self.left = set[int](), False  # daemons to spare; something would not die
        self.before, self.shm, self.tries, self.next_look = own_shm(), dict[int, str](), dict[int, int](), 0.0
        for fd in config.get("keep", ()):  # GPU leases: ours until we end, never the server's
            os.set_inheritable(fd, False)
        os.chdir(config["directory"])  # a socket's path may have 107 bytes only
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in RESET[:3]:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.nofile[1], self.nofile[1]))
        self.loop, self.journal = Loop(), Journal("events.jsonl")
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self.loop.watch(wake, lambda: os.read(wake, 4096))
        if (made := watch_folder(SHM)) >= 0:
            self.loop.watch(made, partial(self.shm_made, made))
        self.log = loop.Log(config["log"], int(config.get("log_limit", 0)))
        self.listener = Listener(self.loop, "supervisor.sock", self.answer)

    def run(self) -> int:
        """Until the server has been ended; the exit code."""
        for pid, _ in self.owners:
            try:
                fd = os.pidfd_open(pid)
                self.loop.watch(fd, partial(self.owner_gone, fd))
            except (OSError, AttributeError):
                self.unpinned = True
        for alarm in self.config["alarms"]:
            self.answer({"do": "arm", **alarm})
        self.launch()
        self.tree = Tree(self.loop, self.hear, self.nofile)
        self.check_owners()  # one may have died before its pidfd was opened
        while self.code < 0:
            self.loop.turn(self.due())
            self.collect()
            self.tick(time.monotonic())
        return self.code

    def due(self) -> float:
        """When to look again, if nothing happens."""
        busy = self.unpinned or self.killing or self.journal.waiting
        times = [time.monotonic() + (0.1 if busy else 1.0), self.log.next_look]
        times += [self.tree.limit] if self.tree.asked else [] if self.dump or self.killing else [self.next_look]
        times += [self.dump.until] if self.dump else [alarm.deadline for alarm in self.alarms.values()]
        return min(times)

    def tick(self, now: float) -> None:
        self.journal.flush()
        if self.log.look(now) and not self.killing:
            self.answer({"do": "fire", **self.config["log_alarm"]})
        if self.unpinned:
            self.check_owners()
        if self.tree.asked and now >= self.tree.limit:
            self.tree.replace()
        if self.dump:
            if now >= self.dump.until and not self.starved(self.dump):
                with suppress(OSError):
                    os.killpg(self.dump.pid, signal.SIGKILL)  # not reaped yet, so still ours
                self.dumped(None)
        elif self.killing:
            if self.group and now > self.deadline + STRIKE:
                self.strike()
            if not self.tree.asked:
                self.tree.ask("end", **self.whose(), deadline=self.deadline)
            elif now > self.deadline + LAST_RESORT:
                self.finish(SOME_LEFT)
        elif due := sorted((a for a in self.alarms.values() if a.deadline <= now), key=lambda a: a.deadline):
            self.fire(due[0])
        elif now >= self.next_look and not self.tree.asked:
            self.next_look = now + 1.0
            fresh = [inode for inode in own_shm() if inode not in self.before and inode not in self.shm]
            if fresh := [inode for inode in fresh if self.tries.get(inode, 0) < 3]:
                self.tries.update({inode: self.tries.get(inode, 0) + 1 for inode in fresh})
                self.tree.ask("journal", **self.whose())

    def shm_made(self, fd: int) -> None:
        """Look soon: whoever makes a file may be killed next, and we too, and then it must be known whose it was."""
        with suppress(OSError):
            os.read(fd, 65536)
        self.next_look = min(self.next_look, time.monotonic() + 0.01)

    def collect(self) -> None:
        """Reap the server, alarms, tree.py, and the orphans of the server, which become our children."""
        reaped = False
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code, reaped = found[0], os.waitstatus_to_exitcode(found[1]), True
                if pid == self.root:
                    self.launched()  # exec came first, whatever poll said first
                    self.exit_code = code
                    self.journal.emit("exited", code=code)
                elif pid == self.tree.pid:
                    self.tree.pid = -1
                elif self.dump and pid == self.dump.pid:
                    self.dumped(code)
        if reaped and self.tree.asked == "end":
            self.tree.tell({})

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a client asks for; its mistakes are raised."""
        do, name = request["do"], str(request.get("name", ""))
        if do == "status":
            state = {"dumping": self.dump.alarm.name if self.dump else None, "stopping": bool(self.killing)}
            lists = {"armed": sorted(self.alarms), "fired": self.fired}
            return {"pid": self.root, "start": self.root_start, "exit": self.exit_code, **lists, **state}
        if do in ("arm", "fire"):
            alarm = Alarm.parse(request, seconds(request["deadline"]) if do == "arm" else time.monotonic())
            if self.killing:
                raise ValueError("the server is being ended")
            self.alarms[alarm.name] = alarm
            if do == "arm":
                self.journal.emit("armed", name=name, deadline=alarm.deadline)
        elif do == "disarm":
            if known := self.alarms.pop(name, None):
                self.journal.emit("disarmed", name=name)
            return {"was_armed": bool(known)}
        elif do == "stop":
            self.begin("stop", seconds(request.get("grace", self.config["grace"])))
        else:
            raise ValueError(f"unknown request {do!r}")
        return {}

    # Starting things.

    def launch(self) -> None:
        changes = {**self.config["env"], COOKIE: self.config["cookie"]}
        env = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
        self.group = cgroup.make(f"{self.me}-{stat(self.me)[0]}-{os.urandom(4).hex()}")
        if self.group:
            self.journal.emit("cgroup", path=self.group)
        cwd, log = self.config["cwd"], self.config["log"]
        self.root, self.exec_fd = spawn(
            self.config["argv"], env, cwd, stdin=self.null, out=log, nofile=self.nofile, group=self.group
        )
        self.root_start = stat(self.root)[0]
        self.loop.watch(self.exec_fd, self.launched)
        with suppress(OSError, AttributeError):
            self.root_fd = os.pidfd_open(self.root)

    def launched(self) -> None:
        """exec succeeded or failed: say so to pytest, which waits at our standard output."""
        if self.exec_fd < 0:
            return
        why = os.read(self.exec_fd, 65536)
        self.loop.unwatch(self.exec_fd)
        self.exec_fd = -1
        found = json.loads(why) if why else {"pid": self.root, "start": self.root_start}
        self.journal.emit("failed" if why else "started", **found)
        with suppress(OSError):
            os.write(1, json.dumps(found).encode())
        os.dup2(2, 1)
        if why:
            self.begin("failed", 0.0)

    def fire(self, alarm: Alarm) -> None:
        self.alarms.pop(alarm.name, None)
        self.fired.append(alarm.name)
        self.journal.emit("fired", name=alarm.name, kill=alarm.kill)
        now, pid, env = time.monotonic(), -1, {**os.environ, MARK: self.config["cookie"]}
        if alarm.argv:
            with suppress(OSError):  # no process to be had
                pid, told = spawn(alarm.argv, env, self.home, stdin=self.null, out=2, nofile=self.nofile)
                os.close(told)
                with suppress(OSError):  # where we may: a machine that is too busy is often why there is a dump
                    os.setpriority(os.PRIO_PROCESS, pid, -10)
        self.dump = Dump(alarm, pid, now, now + alarm.limit, now + (1 + loop.STARVED) * alarm.limit)
        if pid < 0:
            self.dumped(127)

    def starved(self, dump: Dump) -> bool:
        """Its limit is over, but not once the time is taken off for which it stood in line for a CPU."""
        until = min(dump.begun + dump.alarm.limit + loop.waited(dump.pid), dump.most)
        if until <= dump.until:
            return False
        self.dump = dump._replace(until=until)
        return True

    def dumped(self, code: int | None) -> None:
        """An alarm's argv ended, or was killed at its limit (None). Unless that spares the server, the server goes."""
        if self.dump:
            alarm, begun = self.dump.alarm, self.dump.begun
            self.dump = None
            self.journal.emit("dumped", name=alarm.name, code=code, seconds=round(time.monotonic() - begun, 3))
            if not alarm.kill or code in alarm.spare:
                self.journal.emit("spared", name=alarm.name)
            else:
                self.begin("alarm", 0.0, name=alarm.name)

    # Ending the server.

    def check_owners(self) -> None:
        if any(stat(pid)[0] != start or stat(pid)[1] in ("Z", "X") for pid, start in self.owners):
            self.owner_gone(-1)

    def owner_gone(self, fd: int) -> None:
        self.loop.unwatch(fd)
        self.unpinned = False
        self.begin("owner", seconds(self.config["grace"]))

    def begin(self, why: str, grace: float, **data: Any) -> None:
        """SIGTERM now, SIGKILL after ``grace`` seconds; the earliest wish wins. A running dump may finish before, but
        when an owner is gone not beyond the grace."""
        deadline = time.monotonic() + grace
        if why == "owner" and self.dump:
            self.dump = self.dump._replace(until=min(self.dump.until, deadline), most=min(self.dump.most, deadline))
        if not self.killing:
            self.killing, self.deadline = why, deadline
            self.journal.emit("killing", why=why, **data)
            self.alarms.clear()
            with suppress(OSError):  # a server that forks without end must not starve its killer
                os.setpriority(os.PRIO_PROCESS, 0, -10)
        elif deadline < self.deadline:
            self.deadline = deadline
            if self.tree.asked == "end":
                self.tree.tell({"deadline": deadline})

    def whose(self) -> dict[str, object]:
        return {"supervisor": self.me, "root": self.root, "cookie": self.config["cookie"], "group": self.group}

    def hear(self, word: str, *rest: Any) -> None:
        """What tree.py says."""
        if word == "shm" and rest[0] not in self.before and rest[0] not in self.shm:
            if name := own_shm().get(rest[0]):  # maps shows a semaphore by the name that it had for a moment
                self.shm[rest[0]] = name
                self.journal.emit("shm", inode=rest[0], name=name)
        elif word == "shared":
            self.shared = set(rest)
        elif word == "all":
            cgroup.kill(self.group, self.shared | set(rest))
        elif word == "hunt":
            self.hunt(self.shared | set(rest))
        elif word == "left":
            self.left = True
            self.journal.emit("left", pid=rest[0], state=rest[1])
        elif word == "unlinked":
            self.journal.emit("unlinked", name=rest[0])
        elif word == "kept":
            self.journal.emit("kept", name=rest[0], why=rest[1])
        elif word == ".":
            self.answered()

    def answered(self) -> None:
        asked, self.tree.asked = self.tree.asked, ""
        if asked == "journal":
            return
        self.collect()
        if not self.left and self.children() - self.shared - {self.tree.pid}:
            self.hunt(self.shared)  # too quick to be seen; tick asks again
        elif self.shm:
            self.tree.ask("clean", files={inode: self.shm.pop(inode) for inode in list(self.shm)[:500]})
        else:
            self.finish(SOME_LEFT if self.left else ALL_GONE)

    def children(self) -> set[int]:
        """Our children, zombies too. Complete, since nobody but us reaps them; empty where the kernel cannot tell."""
        with suppress(OSError), open(f"/proc/self/task/{self.me}/children") as file:
            return {int(pid) for pid in file.read().split()}
        return set()

    def hunt(self, spare: set[int]) -> None:
        """Kill our children, and theirs, which become ours: faster than they can fork."""
        cgroup.kill(self.group, spare)
        with suppress(OSError, AttributeError, ValueError):
            signal.pidfd_send_signal(self.root_fd, signal.SIGKILL, None, PIDFD_SIGNAL_PROCESS_GROUP)  # Linux >= 6.9
        until, seen = time.monotonic() + 0.05, spare | {self.tree.pid}
        while time.monotonic() < until and (prey := self.children() - seen):
            for pid in prey:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)  # not reaped yet, so still ours
            seen |= prey
            self.collect()

    def strike(self) -> None:
        """tree.py is late (it starves, or is stuck): the kernel kills the whole cgroup, unless a shared daemon is in
        it. comm can be read of any process, whatever that is stuck in."""
        for pid in cgroup.members(self.group):
            with suppress(OSError), open(f"/proc/{pid}/comm") as file:
                if file.read().strip() in SHARED:
                    return
        cgroup.kill(self.group, self.shared)

    def finish(self, code: int) -> None:
        cgroup.remove(self.group)
        self.journal.emit("stopped")
        self.code = code


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as file:
        supervisor = Supervisor(json.load(file))
    try:
        return supervisor.run()
    except BaseException:
        traceback.print_exc()
        for _ in range(100):
            with suppress(BaseException):
                supervisor.hunt(set())
            time.sleep(0.02)
        return TROUBLE


if __name__ == "__main__":
    sys.exit(main())
