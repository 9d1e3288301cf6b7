"""Asks NVML, in a process of its own: run as ``python -I -S gpu_helper.py PATH/pynvml.py [--events]`` by :mod:`.gpu`.

One JSON request a line on stdin, ``{"limit": seconds}``; one JSON reply a line on stdout:
``{"driver": "570.86", "gpus": [...]}`` or ``{"problem": "one sentence"}``. Every GPU is read by a thread of its own:
one that does not answer (a wedged driver call cannot be interrupted) costs the others nothing and is named.
Standard library only. Leaves at once when stdin ends or the process that started it is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import select
import sys
import threading
import time
from typing import Any

XID_CRITICAL = 0x8
"""nvmlEventTypeXidCriticalError."""


def load_pynvml(path: str) -> Any:
    """The module at exactly this path, whatever sys.path says (we run with -I -S)."""
    spec = importlib.util.spec_from_file_location("pynvml", path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module
    spec.loader.exec_module(module)
    return module


def text(value: object) -> str:
    """NVML text as str: old bindings return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class Reader:
    """Reads all GPUs of this machine through one pynvml module."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.stuck: dict[int, threading.Thread] = {}
        self.known: dict[int, dict[str, Any]] = {}
        self.xids: dict[str, list[int]] = {}

    def ask(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """One NVML call; None where this driver, GPU or binding has no answer. A lost GPU raises.

        Not every refusal is an NVMLError: newer bindings raise NVMLLibraryMismatchError when the driver is older.
        """
        call = getattr(self.nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments, **keywords)
        except Exception as error:
            if getattr(error, "value", None) == self.nvml.NVML_ERROR_GPU_IS_LOST:
                raise
            return None

    def memory(self, handle: Any) -> tuple[int | None, int | None]:
        """(total, used) bytes. Version 2 leaves out what the driver keeps for itself, as nvidia-smi does."""
        version = getattr(self.nvml, "nvmlMemory_v2", None)
        found = self.ask("nvmlDeviceGetMemoryInfo", handle, version=version) if version else None
        found = found or self.ask("nvmlDeviceGetMemoryInfo", handle)
        return (int(found.total), int(found.used)) if found else (None, None)

    def processes(self, handle: Any) -> list[list[int | None]] | None:
        """[pid, bytes or None] of every process, of compute (MPS clients included) and graphics.

        None: the driver does not say who computes.
        """
        lists = [
            next(
                (found for version in ("_v3", "_v2", "") if (found := self.ask(name + version, handle)) is not None),
                None,
            )
            for name in (
                "nvmlDeviceGetComputeRunningProcesses",
                "nvmlDeviceGetMPSComputeRunningProcesses",
                "nvmlDeviceGetGraphicsRunningProcesses",
            )
        ]
        if lists[0] is None and lists[1] is None:
            return None
        held: dict[int, int | None] = {}
        for process in (p for found in lists for p in found or ()):
            size = None if process.usedGpuMemory is None else int(process.usedGpuMemory)
            old = held.get(int(process.pid))
            held[int(process.pid)] = size if old is None else old if size is None else max(old, size)
        return [[pid, size] for pid, size in sorted(held.items())]

    def instances(self, handle: Any, index: int) -> list[dict[str, Any]]:
        found = []
        for n in range(int(self.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0)):
            mig = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, n)
            if mig is None:
                continue
            total, used = self.memory(mig)
            found.append(
                {
                    "index": index,
                    "uuid": text(self.ask("nvmlDeviceGetUUID", mig) or ""),
                    "name": text(self.ask("nvmlDeviceGetName", mig) or ""),
                    "memory_total": total,
                    "memory_used": used,
                    "processes": self.processes(mig),
                }
            )
        return found

    def one(self, index: int) -> dict[str, Any]:
        """Everything about one GPU. ``error`` says why the rest is missing."""
        nvml = self.nvml
        result: dict[str, Any] = {"index": index, **self.known.get(index, {})}
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            capability = self.ask("nvmlDeviceGetCudaComputeCapability", handle)
            identity = {
                "uuid": text(self.ask("nvmlDeviceGetUUID", handle) or ""),
                "name": text(self.ask("nvmlDeviceGetName", handle) or ""),
                "capability": list(capability) if capability else None,
                "minor": self.ask("nvmlDeviceGetMinorNumber", handle),
            }
            self.known[index] = identity
            total, used = self.memory(handle)
            utilisation = self.ask("nvmlDeviceGetUtilizationRates", handle)
            power = self.ask("nvmlDeviceGetPowerUsage", handle)
            mig = self.ask("nvmlDeviceGetMigMode", handle)
            result.update(
                identity,
                memory_total=total,
                memory_used=used,
                utilisation=int(utilisation.gpu) if utilisation else None,
                power=power / 1000 if power is not None else None,
                processes=self.processes(handle),
                ecc=self.ask(
                    "nvmlDeviceGetTotalEccErrors",
                    handle,
                    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    nvml.NVML_VOLATILE_ECC,
                ),
                clocks=self.ask("nvmlDeviceGetCurrentClocksEventReasons", handle),
                instances=self.instances(handle, index) if mig and mig[0] else [],
                mig=bool(mig and mig[0]),
            )
        except Exception as error:
            result["error"] = f"NVML says: {text(error) or type(error).__name__}"
        return result

    def all(self, limit: float) -> dict[str, Any]:
        """One reading of every GPU, at most ``limit`` seconds long."""
        nvml, deadline = self.nvml, time.monotonic() + limit
        count = int(nvml.nvmlDeviceGetCount())
        answers: dict[int, dict[str, Any]] = {}

        def read(index: int) -> None:
            answers[index] = self.one(index)

        self.stuck = {index: thread for index, thread in self.stuck.items() if thread.is_alive()}
        threads = {
            n: threading.Thread(target=read, args=(n,), daemon=True) for n in range(count) if n not in self.stuck
        }
        for thread in threads.values():
            thread.start()
        for index, thread in threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.stuck[index] = thread
        no_answer = f"the driver did not answer within {limit:g} s"
        gpus = [answers.get(n) or {"index": n, **self.known.get(n, {}), "error": no_answer} for n in range(count)]
        for gpu in gpus:
            gpu["xids"] = list(self.xids.get(gpu.get("uuid", ""), ()))
        return {"driver": text(self.ask("nvmlSystemGetDriverVersion") or ""), "gpus": gpus}

    def listen(self) -> None:
        """Collect Xid events for ever: NVML does not replay those of the past."""
        nvml = self.nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for index in range(int(nvml.nvmlDeviceGetCount())):
                self.ask("nvmlDeviceRegisterEvents", nvml.nvmlDeviceGetHandleByIndex(index), XID_CRITICAL, events)
        except nvml.NVMLError:
            return
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(events, 1000)
                uuid = text(self.ask("nvmlDeviceGetUUID", event.device) or "")
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                    time.sleep(1.0)
                continue
            seen = self.xids.setdefault(uuid, [])
            if event.eventData not in seen:
                seen.append(int(event.eventData))


def read_requests(requests: queue.Queue[bytes]) -> None:
    """Runs in a thread: even while NVML blocks the main one, the end of stdin or of our parent ends us."""
    watched: list[int] = [0]
    with contextlib.suppress(OSError):
        watched.append(os.pidfd_open(os.getppid()))
    buffer = b""
    while True:
        ready, _, _ = select.select(watched, [], [])
        if len(watched) == 2 and watched[1] in ready:
            os._exit(0)
        chunk = os.read(0, 4096)
        if not chunk:
            os._exit(0)
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            requests.put(line)


def main(argv: list[str]) -> int:
    requests: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    reader: Reader | None = None
    while True:
        limit = float(json.loads(requests.get())["limit"])
        try:
            if reader is None:
                nvml = load_pynvml(argv[0])
                nvml.nvmlInit()
                reader = Reader(nvml)
                if "--events" in argv:
                    threading.Thread(target=reader.listen, daemon=True).start()
            reply = reader.all(limit)
        except Exception as error:  # any failure is an answer
            reader = None
            reply = {"problem": f"NVML cannot be used: {text(error) or type(error).__name__}"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
