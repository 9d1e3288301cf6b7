"""Ranks of torch.distributed (gloo) that hang for real causes: ``torch_ranks.py CAUSE TP RANK DIRECTORY``.

Prints ``pid RANK PID`` for every rank; run by scoreboard_torch.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def all_reduce_step(steps: int = 1) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(steps):
        dist.all_reduce(torch.ones(8))


def sleeps() -> None:
    time.sleep(100_000)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stale_extension_lock() -> None:
    from torch.utils.cpp_extension import load

    where = Path(os.environ["TORCH_EXTENSIONS_DIR"], "py", "ext")
    where.mkdir(parents=True, exist_ok=True)
    (where / "lock").touch()
    (where / "ext.cpp").write_text("int x;")
    load(name="ext", sources=[str(where / "ext.cpp")], build_directory=str(where))


def compiles_an_extension() -> None:
    from torch.utils.cpp_extension import load

    where = Path(os.environ["TORCH_EXTENSIONS_DIR"], "py", "long")
    where.mkdir(parents=True, exist_ok=True)
    (where / "long.cpp").write_text("#include <torch/extension.h>\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}\n")
    load(name="long", sources=[str(where / "long.cpp")], build_directory=str(where))


def waits_for_file_lock() -> None:
    from filelock import FileLock

    time.sleep(1.0)  # the holder takes it first
    with FileLock(Path(os.environ["TRITON_CACHE_DIR"], "kernel.lock")):
        pass


def holds_file_lock() -> object:
    from filelock import FileLock

    lock = FileLock(Path(os.environ["TRITON_CACHE_DIR"], "kernel.lock"))
    lock.acquire()
    return lock


def waits_for_kernel_lock() -> None:
    import fcntl

    with open(Path(os.environ["TRITON_CACHE_DIR"], "foreign"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def spins_in_python() -> None:
    while True:
        pass


def spins_in_torch() -> None:
    import torch

    torch.set_num_threads(1)
    a = torch.ones(300, 300)
    while True:
        a = (a @ a).clamp(0, 1)


def waits_for_a_child() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(100000)"], check=False)


def waits_for_a_queue() -> None:
    import queue

    queue.Queue().get()


def other_collective() -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.ones(8), src=0)


def receives(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.ones(8), src=(rank + 1) % world)


def worker(rank: int, world: int, cause: str, sick: int, port: int) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    print(f"pid {rank} {os.getpid()}", flush=True)
    mine = rank == sick
    if cause == "late_rank" and mine:
        sleeps()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    all_reduce_step(3)
    kept = None
    if cause == "late_for_a_barrier":
        if mine:
            sleeps()
        dist.monitored_barrier()
    elif cause == "late_for_a_group":
        if mine:
            sleeps()
        dist.new_group(list(range(world)))
    elif cause == "receive_cycle":
        receives(rank, world)
    elif cause == "waits_for_file_lock" and rank == (sick + 1) % world:
        kept = holds_file_lock()
    elif mine:
        globals()[cause]()
    all_reduce_step()
    del kept
    print(f"done {rank}", flush=True)


def main() -> None:
    cause, world, sick, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    os.environ.update(TORCH_EXTENSIONS_DIR=f"{folder}/ext", TRITON_CACHE_DIR=folder, HOME=folder)
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    ranks = [context.Process(target=worker, args=(n, world, cause, sick, port)) for n in range(world)]
    for rank in ranks:
        rank.start()
    time.sleep(100_000)


if __name__ == "__main__":
    main()
