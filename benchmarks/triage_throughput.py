"""How fast ``gpuserve explain`` reads synthetic logs of ``--mib`` MiB: CPU time of one process, and of ``grep -ciE``.

    python benchmarks/triage_throughput.py [--mib 1024]

Four logs, each with a beginning and an end like a real one: a busy SGLang server, a busy vLLM server at level DEBUG,
prose in which no two lines have the same shape (so nothing is skipped as known), and a server that complains all day.
The last two are stress: no server writes them. Exits with 1 when one of the first two is read at less than 30 MB/s,
any of them with more than 100 MiB of memory, or the cause is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

WORDS = r"error|exception|traceback|fatal|fail|kill|abort|timeout|timed out|out of memory|no kernel image|in use|denied"
SPEED, MEMORY = 30.0, 100.0
BLOCK = 16 << 20


def clock(number: int) -> str:
    return f"{number // 36000 % 24:02d}:{number // 600 % 60:02d}:{number // 10 % 60:02d}"


def busy_sglang(number: int, chance: random.Random) -> str:
    time = f"2031-01-{number // 864000 % 28 + 1:02d} {clock(number)}"
    kind = number % 10
    if kind < 6:
        return (
            f"[{time} TP0] Decode batch, #running-req: {chance.randrange(64)}, #token: {number % 90000}, "
            f"token usage: 0.{number % 100:02d}, accept len: 2.{number % 90:02d}, accept rate: 0.{number % 60:02d}, "
            f"cuda graph: True, gen throughput (token/s): {chance.uniform(50, 900):.2f}, #queue-req: 0"
        )
    if kind < 8:
        return (
            f"[{time} TP0] Prefill batch, #new-seq: 1, #new-token: {number % 8192}, #cached-token: 0, "
            "token usage: 0.00, #running-req: 3, #queue-req: 0"
        )
    verb, path = ("POST", "/v1/chat/completions") if kind == 8 else ("GET", "/health")
    return f'[{time}] INFO:     127.0.0.1:{20000 + number % 40000} - "{verb} {path} HTTP/1.1" 200 OK'


def busy_vllm(number: int, chance: random.Random) -> str:
    time = f"01-{number // 864000 % 28 + 1:02d} {clock(number)}"
    request = f"chatcmpl-{chance.getrandbits(128):032x}"
    kind = number % 12
    if kind < 5:
        return (
            f"(APIServer pid=410) INFO {time} [logger.py:40] Received request {request}: params: SamplingParams(n=1, "
            f"temperature=0.{number % 10}, max_tokens={number % 4096}), prompt_token_ids: None, lora_request: None."
        )
    if kind < 8:
        return (
            f"(EngineCore pid=512) DEBUG {time} [v1/engine/core.py:512] Added request {request} with "
            f"{number % 9000} prompt tokens"
        )
    if kind == 8:
        return (
            f"(APIServer pid=410) INFO {time} [loggers.py:257] Engine 000: Avg prompt throughput: "
            f"{chance.uniform(1, 900):.1f} tokens/s, Avg generation throughput: {chance.uniform(1, 900):.1f} tokens/s, "
            f"Running: {number % 64} reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%"
        )
    if kind == 9:
        return (
            f"(EngineCore pid=512) INFO {time} [shm_broadcast.py:878] No available shared memory broadcast block found "
            "in 60 seconds. This typically happens when some processes are hanging (e.g. compilation)."
        )
    return f'(APIServer pid=410) INFO:     127.0.0.1:{20000 + number % 40000} - "POST /v1/completions HTTP/1.1" 200 OK'


def prose(number: int, chance: random.Random) -> str:
    words = " ".join("".join(chance.choices("ghijklmnopqrstuvwxyzaeiou", k=chance.randint(2, 9))) for _ in range(22))
    return f"[2031-01-05 {clock(number)} TP{number % 8}] {words}"


def complaints(number: int, chance: random.Random) -> str:
    time = f"01-{number // 864000 % 28 + 1:02d} {clock(number)}"
    if number % 4 == 0:
        return (
            f"(APIServer pid=410) ERROR {time} [serving_chat.py:201] Error in preprocessing prompt inputs of request "
            f"chatcmpl-{chance.getrandbits(128):032x}: ValueError: the template could not be applied"
        )
    return busy_vllm(number, chance)


SGLANG_HEAD = (
    "[2031-01-05 11:26:53] server_args=ServerArgs(model_path='/m', tp_size=1)\n"
    "[2031-01-05 11:27:53] The server is fired up and ready to roll!\n"
)
VLLM_HEAD = (
    "(APIServer pid=410) INFO 01-05 11:26:53 [api_server.py:1839] vLLM API server version 0.15.1\n"
    "(APIServer pid=410) INFO:     Application startup complete.\n"
)
SGLANG_TAIL = (
    "[2031-01-29 11:26:53 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/x.py", line 3, in run\n    step()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n\n"
    "[2031-01-29 11:26:54] Received sigquit from a child process. It usually means the child failed.\n"
)
VLLM_TAIL = (
    "(EngineCore pid=512) ERROR 01-29 11:26:53 [core.py:1100] EngineCore encountered a fatal error.\n"
    "(EngineCore pid=512) ERROR 01-29 11:26:53 [core.py:1100] Traceback (most recent call last):\n"
    '(EngineCore pid=512) ERROR 01-29 11:26:53 [core.py:1100]   File "/opt/x.py", line 3, in run\n'
    "(EngineCore pid=512) ERROR 01-29 11:26:53 [core.py:1100] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 2.00 GiB.\n"
)
LOGS: tuple[tuple[Callable[[int, random.Random], str], str, str], ...] = (
    (busy_sglang, SGLANG_HEAD, SGLANG_TAIL),
    (busy_vllm, VLLM_HEAD, VLLM_TAIL),
    (prose, SGLANG_HEAD, SGLANG_TAIL),
    (complaints, VLLM_HEAD, VLLM_TAIL),
)


def write(path: Path, line: Callable[[int, random.Random], str], head: str, tail: str, mib: int) -> None:
    """16 MiB of distinct lines, repeated with a different letter in each (making them takes longer than reading)."""
    chance = random.Random(1)
    lines: list[str] = []
    size = number = 0
    while size < BLOCK:
        lines.append(line(number, chance))
        size += len(lines[-1]) + 1
        number += 1
    with path.open("wb") as file:
        file.write(head.encode())
        for copy in range(max(1, mib // 16)):
            end = f" {chr(ord('g') + copy % 20)}{chr(ord('g') + copy // 20 % 20)}\n" if line is prose else "\n"
            file.write((end.join(lines) + end).encode())
        file.write(tail.encode())


SCRIPT = (
    "import sys; from pytest_gpuserve.diagnose.triage import explain;"
    "t = explain(sys.argv[1:]);"
    "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'));"
    "print(int(peak) / 1024, t.verdict, t.cause and t.cause.number)"
)
"""The process tells its own peak: getrusage counts what its parent had in memory before exec."""


def measured(argv: list[str]) -> tuple[float, str]:
    """(CPU seconds, what it printed)."""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return usage.ru_utime + usage.ru_stime, output.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of each log (default 1024)")
    arguments = parser.parse_args()
    good = True
    print(f"{'log':12} {'MiB':>5} {'explain MB/s':>13} {'peak MiB':>9} {'grep -ciE MB/s':>15}  verdict, cause line")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.log"
        for line, head, tail in LOGS:
            write(path, line, head, tail, arguments.mib)
            size = path.stat().st_size
            seconds, printed = measured([sys.executable, "-c", SCRIPT, str(path)])
            grep, _ = measured(["grep", "-ciE", WORDS, str(path)])
            peak, _, result = printed.partition(" ")
            memory, speed = float(peak or "inf"), size / seconds / 1e6
            good = good and memory <= MEMORY and result.startswith("oom ")
            good = good and (speed >= SPEED or line not in (busy_sglang, busy_vllm))
            print(
                f"{line.__name__:12} {size >> 20:5} {speed:13.1f} {memory:9.1f} {size / grep / 1e6:15.1f}  {result}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
