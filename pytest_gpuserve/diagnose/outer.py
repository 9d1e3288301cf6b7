"""What the programs around a server put before its lines (journald, containers, launchers), taken away again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

_ISO: Final = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?"
_SURE: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w./@-]+(?:\[\d+\])?: ?",  # syslog, journald
        _ISO + rb" [\w.-]+ [\w./@-]+\[\d+\]: ?",  # journalctl -o short-iso
        _ISO + rb" std(?:out|err) [FP] ",  # containerd, CRI-O
        _ISO + rb" ",  # kubectl --timestamps, GitHub Actions
        rb"[\w.-]+ +\| ",  # docker compose
        rb"\[pod/[\w./-]+\] ",  # kubectl --prefix
        rb"\[\d+,\d+\]<std(?:out|err)>: ?",  # mpirun --tag-output
        rb"\[default\d+\]: ?",  # torchrun
    )
)
_UNSURE: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rb" *\d+\t",  # cat -n
        rb" *\d+: ?",  # srun --label, grep -n
        rb"> ",  # a quotation
    )
)
"""A server may begin a line so itself: believed only where every line does."""
_RAY: Final = re.compile(
    rb"\((?!(?:Ray|Vllm)?Worker(?:Process|Wrapper|Proc)?[_ -]|EngineCore|A[Pp][Ii]Server|DPCoordinator)"
    rb"[\w:.-]+ pid=\d+(?:, ip=[\w.:]+)?\) ?"
)
"""An actor of Ray that runs the server: taken away where all lines are of the same one."""
_DOCKER: Final = b'{"log":'
_SAMPLE: Final = 24
_MOST: Final = 0.9
_FEW: Final = 3
_DEEP: Final = 3


def strip(block: bytes) -> bytes:
    """Whole lines without what stands before (nearly) each of them; every line stays a line."""
    if block.startswith(_DOCKER):
        block = b"".join(_unpacked(line) for line in block.splitlines(keepends=True))
    sample = [line for line in block[: 1 << 14].split(b"\n")[:_SAMPLE] if line.strip()]
    layers: list[bytes] = []
    while len(layers) < _DEEP and (layer := _layer(sample)):
        layers.append(layer.pattern)
        sample = [layer.sub(b"", line, count=1) if layer.match(line) else line for line in sample]
    if not layers:
        return block
    return re.sub(b"(?m)^(?:%s)" % b"".join(b"(?:%s)" % layer for layer in layers), b"", block)


def _layer(sample: Sequence[bytes]) -> re.Pattern[bytes] | None:
    ray = next(filter(None, map(_RAY.match, sample)), None)
    for layer in (*_SURE, *([re.compile(re.escape(ray[0].rstrip()) + b" ?")] if ray else [])):
        if sum(bool(layer.match(line)) for line in sample) > _MOST * len(sample):
            return layer
    if len(sample) >= _FEW:
        for layer in _UNSURE:
            if all(layer.match(line) for line in sample):
                return layer
        if margin := min(len(line) - len(line.lstrip(b" ")) for line in sample):
            return re.compile(b" {%d}" % margin)
    return None


def _unpacked(line: bytes) -> bytes:
    """A line of Docker's json-file log."""
    try:
        return str(json.loads(line)["log"]).rstrip("\n").replace("\n", " ").encode() + b"\n"
    except (ValueError, KeyError, TypeError, RecursionError):
        return line
