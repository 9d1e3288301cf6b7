"""``gpuserve reap``: free what dead sessions left; ``--devices``: who holds the GPUs, whoever started it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import GpuserveError
from ..gpu import MIB, Gpu, Reading
from ..server import gpu_holders, quarantine, reaper
from ..server.gpu_holders import DEVICES, Holder, View
from ..server.paths import existing_state
from ..text import one_line

_SPARED = "  [spared: others may use it; where nobody does, end it by its pid]"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what dead sessions of this user left: processes (by the cookie that they inherited), files in /dev/shm "
        "(by the inode that was noted); --yes frees it. Daemons that others may use (sccache, ray, MPS) "
        "stay, and are named. With --devices, show everybody who holds a GPU."
    )
    parser.add_argument("--yes", action="store_true", help="end the processes and unlink the files that are shown")
    parser.add_argument(
        "--grace", type=float, default=5.0, metavar="S", help="seconds from SIGTERM to SIGKILL (default 5)"
    )
    parser.add_argument(
        "--devices",
        nargs="?",
        const=DEVICES,
        metavar="PATTERN",
        help=f"list every process that has a device open (default {DEVICES}; '/dev/kfd' for AMD) or is on a GPU by "
        "NVML, with user, age, memory and command",
    )
    parser.add_argument("--kill", action="store_true", help="with --devices: end those listed, after you confirmed it")
    parser.add_argument(
        "--lift",
        action="append",
        default=[],
        metavar="GPU",
        help="with --devices: end the quarantine of this GPU (its number, or its name as listed)",
    )
    parser.add_argument(
        "--pid", type=int, action="append", default=[], metavar="N", help="with --kill: only this one, without asking"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: there was nothing, or all of it is gone (daemons that are spared count as nothing). 1: there is something, or
    something stayed."""
    if arguments.devices is None:
        if arguments.kill or arguments.pid or arguments.lift:
            raise GpuserveError("--kill, --pid and --lift choose among the holders of GPUs: give --devices too.")
        return _sessions(arguments.yes, arguments.grace)
    if not arguments.devices.startswith("/"):
        raise GpuserveError(f"--devices takes the path of a device, such as {DEVICES}, not {arguments.devices!r}.")
    if arguments.yes:
        raise GpuserveError("--yes does not confirm --devices --kill, which ends what others started: name --pid N.")
    if arguments.pid and not arguments.kill:
        raise GpuserveError("--pid without --kill does nothing: give both.")
    if arguments.lift:
        if arguments.kill:
            raise GpuserveError("--lift ends no process: give it without --kill.")
        return _lift(arguments.lift)
    view = gpu_holders.holders(arguments.devices)
    kept = _quarantines()
    print("\n".join([_table(view, arguments.devices), *kept]))
    if not arguments.kill:
        return 1 if view.holders or view.busy() or view.unreadable() or view.reading.mute or kept else 0
    return _kill(view, arguments.pid, arguments.devices, arguments.grace)


# Dead sessions


def _sessions(yes: bool, grace: float) -> int:
    found = reaper.find_leftovers(existing_state(), strays=True)
    if not found:
        if yes:
            reaper.sweep_dead_sessions()  # directories that nobody wants any more
        print("Nothing is left of dead sessions.")
        return 0
    for leftover in found:
        where = f"  ({one_line(str(leftover.directory))})" if leftover.directory else ""
        why = one_line(leftover.waits or leftover.problem)
        print(f"{leftover.name}{where}{f': {why}' if why else ''}")
        for seen in (*leftover.processes, *leftover.spared):
            note = _SPARED if seen in leftover.spared else ""
            command = one_line(seen.command, 100)
            print(f"  {seen.id.pid:>8}  {one_line(seen.user):<12} {_age(seen.age):>8}  {command}{note}")
        for name in (leftover.files or {}).values():
            print(f"  /dev/shm/{one_line(name)}")
    if not yes:
        if any(leftover.endable for leftover in found):
            print("Nothing was touched: --yes ends these processes and unlinks these files.")
        return 1 if any(leftover.endable or leftover.waits or leftover.problem for leftover in found) else 0
    swept = reaper.free(found, grace=grace, limit=grace + 30.0)
    if not swept.left and swept.complete:
        reaper.sweep_dead_sessions()  # the files around them
    print(swept.text or ("Nothing was ended." if swept.waiting else "Nothing had to be ended."))
    return 1 if swept.left or swept.kept or swept.waiting or swept.problems or not swept.complete else 0


# GPUs


def _table(view: View, pattern: str) -> str:
    lines = []
    if view.holders:
        lines.append(f"{'PID':>8}  {'USER':<12} {'AGE':>8}  {'GPU':<8} {'MEMORY':>11}  COMMAND")
    for holder in view.holders:
        seen = holder.process
        gpus = ",".join(map(str, holder.gpus)) or "-"
        memory = f"{sum(holder.memory.values()) // MIB:,} MiB" if holder.memory else "-"
        note = f"  [spared: {holder.spared}]" if holder.spared else ""
        lines.append(
            f"{seen.id.pid:>8}  {one_line(seen.user):<12} {_age(seen.age):>8}  {gpus:<8} {memory:>11}  "
            f"{one_line(seen.command, 80)}{note}"
        )
    if not view.holders:
        lines.append(f"No process that can be seen holds {one_line(pattern)}.")
    for index, pid, used in view.unseen:
        size = "" if used is None else f" with {used // MIB:,} MiB"
        lines.append(f"GPU {index}: NVML names pid {pid}{size}, which is not of this container, or has just ended.")
    if view.hidden:
        lines.append(f"{view.hidden} processes of other users cannot be looked at: run as root to see all.")
    if view.reading.problem and pattern == DEVICES:
        lines.append(view.reading.problem)
    return "\n".join([*lines, *_unreadable(view), *_busy(view.busy())])


def _unreadable(view: View) -> list[str]:
    return [f"{gpu.label} cannot be read: {one_line((gpu.error or '').rstrip('.'))}." for gpu in view.unreadable()]


def _quarantines() -> list[str]:
    lines = []
    for path, name, told in quarantine.imposed():
        if told is None:
            lines.append(f"{one_line(str(path))} is damaged, and ignored: remove it, or --lift {one_line(name)}.")
        else:
            lines.append(f"{one_line(str(told))}. It ends by itself, or with --lift {one_line(_choice(name, told))}.")
    return lines


def _choice(name: str, told: quarantine.Quarantined) -> str:
    """What --lift takes: a GPU's number, else the device's name."""
    number = told.device.removeprefix("GPU ")
    return number if number.isdecimal() else name


def _lift(chosen: Sequence[str]) -> int:
    there = list(quarantine.imposed())
    for text in chosen:
        files = [path for path, name, told in there if text == name or (told and text == _choice(name, told))]
        if not files:
            raise GpuserveError(f"No GPU {one_line(text)} is in quarantine: --devices alone lists those that are.")
        for path in files:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise GpuserveError(
                    f"{one_line(str(path))} cannot be removed: {error.strerror}. Its owner, or root, may do so."
                ) from None
        print(f"GPU {one_line(text)} is in quarantine no more.")
    return 0


def _busy(gpus: Sequence[Gpu]) -> list[str]:
    return [
        f"{gpu.label}: {(gpu_holders.unexplained(gpu) or 0) // MIB:,} MiB are in use by no process that NVML names. "
        "A process of another container, one that is still exiting, or a lost allocation; when it stays, the driver "
        "has to be reset, which this command never does."
        for gpu in gpus
    ]


def _kill(view: View, pids: Sequence[int], pattern: str, grace: float) -> int:
    by_pid = {holder.process.id.pid: holder for holder in view.holders}
    if strangers := [pid for pid in pids if pid not in by_pid]:
        raise GpuserveError(f"pid {strangers[0]} holds none of {pattern}: nothing was ended.")
    if kept := [by_pid[pid] for pid in pids if by_pid[pid].spared]:
        raise GpuserveError(f"{kept[0].process} is spared: {kept[0].spared}. Nothing was ended.")
    chosen = [by_pid[pid] for pid in pids] or [holder for holder in view.holders if not holder.spared]
    if not chosen:
        print("There is nothing to end.")
        return 0
    if not pids and not _confirmed(chosen):
        print("Nothing was ended.")
        return 1
    left = gpu_holders.end([holder.process.id for holder in chosen], grace=grace)
    for holder in chosen:
        fate = "is still there" if holder.process.id in left else "is gone"
        print(f"{holder.process}, user {one_line(holder.process.user)}, {fate}.")
    busy: list[Gpu] = []
    mute = view.reading.mute
    if view.reading.gpus:
        after = gpu_holders.wait_idle(view.reading, chosen)
        _memory(view.reading, after, chosen)
        busy = View((), after, (), 0).busy()
        print("\n".join(_busy(busy)) or "No GPU is busy without a process.")
        silent = _unreadable(View((), after, (), 0))
        mute = after.mute or bool(silent)
        for line in silent:
            print(line)
    return 1 if left or busy or mute else 0


def _confirmed(chosen: Sequence[Holder]) -> bool:
    if not sys.stdin.isatty():
        raise GpuserveError(f"there is no terminal to confirm at: name what to end, --pid {chosen[0].process.id.pid}.")
    print(f"End {len(chosen)} processes: {', '.join(str(holder.process) for holder in chosen)}?")
    print("Type yes: ", end="", flush=True)
    return sys.stdin.readline().strip() == "yes"


def _memory(before: Reading, after: Reading, chosen: Sequence[Holder]) -> None:
    touched = {number for holder in chosen for number in holder.gpus}
    used = {gpu.index: gpu.memory_used for gpu in after.gpus}
    for gpu in before.gpus:
        if gpu.index in touched and gpu.memory_used is not None:
            now = used.get(gpu.index)
            print(
                f"{gpu.label}: {gpu.memory_used // MIB:,} MiB before, {'?' if now is None else f'{now // MIB:,}'} now."
            )


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
