"""What can go wrong, and how it is asked for."""

from __future__ import annotations

import argparse

from .arguments import seconds, share, whole
from .config import PHASES, Fault

AXES = {
    "custom_all_reduce": ("on", "off"),
    "overlap": ("on", "off"),
    "kv_cache_dtype": (),
    "moe_runner": (),
    "sampling_backend": (),
    "nccl_p2p": ("on", "off"),
    "log_level": (),
    "jit_cache": ("cold", "warm"),
}
"""Axes that change nothing but what ``when=`` conditions see (and, for a cold JIT cache, a compile at start-up)."""

KINDS = {
    "sleep": "asleep in a device synchronisation (one sleep call)",
    "spin": "burns a CPU in C without the GIL; how=python: in bytecode",
    "gil": "a C call that holds the GIL",
    "flock": "waits in flock for a lock that another rank holds, which waits in the collective",
    "stale_lock": "polls for a lock file that a dead process left",
    "pipe": "reads a pipe to which nobody writes",
    "stop": "SIGSTOPs itself",
    "die": "SIGKILLs itself",
    "exit": "exits without a word; code=N",
    "raise": "raises an exception",
    "oom": "raises CUDA out of memory",
    "skip_collective": "goes past the collective in which the others wait",
    "symmetric": "all ranks wait in the same place (futex)",
    "slow": "alive: how=cpu (default), io or compile, for=SECONDS (30), then goes on",
    "deaf": "the port is open, no HTTP request is answered (front end)",
    "garble": "adds to its share of every logit: wrong tokens, and nothing else to see",
    "wedge": "/health says 200, tokens stand still: a reply is lost and every process idles",
}
_HOWS = {"spin": ("c", "python"), "slow": ("cpu", "io", "compile")}
_ALL_RANKS = ("symmetric",)
_SERVING_ONLY = ("garble", "wedge")


def parse_fault(text: str, tp: int) -> tuple[Fault, list[tuple[str, str]], float]:
    """One fault, the (axis, value) conditions under which it happens, and the share of starts in which it does.

    Raises:
        ValueError: with the sentence to show.
    """
    head, *pairs = text.split(":")
    kind, at, phase = head.partition("@")
    if kind not in KINDS:
        raise ValueError(f"--fault {text!r}: there is no kind {kind!r}; kinds: {', '.join(KINDS)}")
    if not at or phase not in PHASES:
        raise ValueError(f"--fault {text!r}: {phase!r} is no phase; write {kind}@PHASE with one of {', '.join(PHASES)}")
    if kind == "deaf" and phase == "shutdown":
        raise ValueError(f"--fault {text!r}: a server that shuts down answers nobody anyway")
    if kind in _SERVING_ONLY and phase != "serving":
        raise ValueError(f"--fault {text!r}: {kind} happens in phase serving only, write {kind}@serving")
    front = kind == "deaf"
    ranks = () if front else (0,) if kind == "wedge" else tuple(range(tp)) if kind in _ALL_RANKS else (tp - 1,)
    fault = Fault(kind, phase, ranks)
    conditions: list[tuple[str, str]] = []
    chance = 1.0
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            if not equals or not value:
                raise ValueError("write KEY=VALUE")
            if key == "rank" and not front and kind not in ("wedge", *_ALL_RANKS):
                fault = fault._replace(ranks=_ranks(value, tp))
            elif key == "after":
                fault = fault._replace(after=seconds(value))
            elif key == "at" and phase != "serving":
                fault = fault._replace(at=share({"begin": "0", "end": "1", "middle": "0.5"}.get(value, value)))
            elif key in ("requests", "tokens") and phase == "serving" and not (front and key == "tokens"):
                number = whole(0, 1 << 40)(value)
                fault = fault._replace(requests=number) if key == "requests" else fault._replace(tokens=number)
            elif key == "how" and value in _HOWS.get(kind, ()):
                fault = fault._replace(how=value)
            elif key == "for" and kind == "slow":
                fault = fault._replace(seconds=seconds(value))
            elif key == "code" and kind == "exit":
                fault = fault._replace(code=whole(0, 255)(value))
            elif key == "chance":
                chance = share(value)
            elif key == "when":
                for condition in value.split("+"):
                    axis, _, wanted = condition.partition("=")
                    if axis not in (*AXES, "spec_decode", "cuda_graph", "attention_backend") or not wanted:
                        raise ValueError(f"{condition!r} is no AXIS=VALUE")
                    conditions.append((axis, wanted))
            else:
                raise ValueError(f"{key}={value} means nothing for {kind}@{phase}")
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"--fault {text!r}: {pair!r}: {error}; see --help") from None
    return fault, conditions, chance


def _ranks(value: str, tp: int) -> tuple[int, ...]:
    if value == "all":
        return tuple(range(tp))
    ranks = tuple(sorted({whole(0, 1 << 20)(part) for part in value.split(",")}))
    if ranks[-1] >= tp:
        raise ValueError(f"there is no rank {ranks[-1]} with --tp {tp}")
    return ranks
