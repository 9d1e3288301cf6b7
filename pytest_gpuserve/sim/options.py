"""The command line: what may be said, checked, with an error that says what to write instead."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping, Sequence

from .arguments import seconds, share, whole
from .config import MAX_TP, PHASES, Fault, Options
from .faults import AXES, KINDS, parse_fault

FAULT_VARIABLE = "GPUSERVE_SIM_FAULT"
KEY_VARIABLE = "GPUSERVE_SIM_API_KEY"

COLD_COMPILE = 2.0
"""Seconds of compilation on ``--jit-cache cold`` where --cold-compile says nothing else."""

SPEC_METHODS = ("base", "eagle", "eagle3", "mtp", "ngram")

EPILOG = f"""\
faults:
  KIND@PHASE[:KEY=VALUE]..., several separated by ';' or by repeating --fault; {FAULT_VARIABLE} adds more.

  kinds
{chr(10).join(f"    {kind:16} {text}" for kind, text in KINDS.items())}

  phases
    {", ".join(PHASES)}
    A phase that does not happen (cuda_graph with --cuda-graph off, draft_load without a draft model) has no fault.

  keys
    rank=R           rank, list of ranks (1,3) or all; default: the last rank
    after=S          not before S seconds of the phase; serving begins with the first request
    at=F             after this part of the phase's work: begin (0), end (1) or a number between
    requests=N       phase serving: after N requests; health probes do not count
    tokens=N         phase serving: after N generated tokens
    when=AXIS=VALUE  only if the axis has this value; several joined by '+': when=spec_decode=eagle3+cuda_graph=on
    chance=P         only in this share of all starts (the same ones for the same --seed)
    how=, for=, code=   see kinds

further axes, seen by when= and nothing else:
  {", ".join("--" + axis.replace("_", "-") for axis in AXES if axis != "jit_cache")}

signals and deaths, as in the engines:
  SIGTERM to the front end ends everything with exit code 0, stuck ranks too. SIGKILL to it: SGLang's ranks die with it,
  vLLM's engine core and workers live on. A rank's death: SGLang exits with -9; vLLM with 1 during start-up and with 0
  while serving.

examples:
  python -m pytest_gpuserve.sim --tp 8 --port 30000 --shards 64 --load-seconds 4
  python -m pytest_gpuserve.sim --tp 8 --port 30000 --fault sleep@cuda_graph:rank=3
  python -m pytest_gpuserve.sim --tp 2 --port 30000 --flavor vllm --spec-decode eagle3 --accept-rate 0.7
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m pytest_gpuserve.sim",
        description="An inference server that needs no GPU: real processes, collectives and HTTP, faults on demand.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    server = p.add_argument_group("server")
    server.add_argument(
        "--flavor",
        choices=("sglang", "vllm"),
        default="sglang",
        help="whose processes, titles and log lines (default sglang)",
    )
    server.add_argument("--tp", type=whole(1, MAX_TP), default=1, metavar="N", help="ranks (default 1)")
    server.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1")
    server.add_argument(
        "--port", type=whole(0, 65535), default=30000, metavar="P", help="0: any free one, see the log (default 30000)"
    )
    server.add_argument(
        "--model-path", default="sim/toy-128", metavar="M", help="any name; two models do not answer alike"
    )
    server.add_argument(
        "--served-model-name", metavar="NAME", help="name in requests and answers (default: the model path)"
    )
    server.add_argument(
        "--context-length", type=whole(2, 1 << 30), default=4096, metavar="N", help="tokens (default 4096)"
    )
    server.add_argument(
        "--max-running-requests", type=whole(1, 256), default=256, metavar="N", help="batch size (default 256)"
    )
    server.add_argument("--api-key", default="", metavar="KEY", help="ask for this bearer token")
    server.add_argument("--seed", type=int, help="makes sampling at a temperature above 0, and chance=, repeatable")

    speed = p.add_argument_group("speed")
    speed.add_argument("--shards", type=whole(1, 10_000), default=4, metavar="N", help="weight files (default 4)")
    speed.add_argument("--load-seconds", type=seconds, default=0.0, metavar="S", help="time to load them (default 0)")
    speed.add_argument(
        "--phase-seconds",
        action="append",
        default=[],
        metavar="PHASE=S",
        help="stretch another phase; several as for --fault",
    )
    speed.add_argument(
        "--step-seconds", type=seconds, default=0.0, metavar="S", help="time of a forward pass (default 0)"
    )
    speed.add_argument(
        "--cold-compile", type=seconds, metavar="S", help="JIT compile at start-up, compilers as children of one rank"
    )
    speed.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where compiled kernels and locks stay; default: a directory that goes with the server",
    )

    axes = p.add_argument_group("axes")
    axes.add_argument("--spec-decode", choices=SPEC_METHODS, default="base", help="speculative decoding (default base)")
    axes.add_argument("--draft-model-path", default="", metavar="M", help="draft model of --spec-decode")
    axes.add_argument("--spec-steps", type=whole(1, 16), default=3, metavar="N", help="draft steps (default 3)")
    axes.add_argument(
        "--spec-topk", type=whole(1, 16), default=1, metavar="N", help="branches a draft step (default 1)"
    )
    axes.add_argument(
        "--spec-draft-tokens",
        type=whole(2, 17),
        default=4,
        metavar="N",
        help="tokens verified at once where topk is above 1 (default 4)",
    )
    axes.add_argument(
        "--accept-rate",
        type=share,
        default=0.6,
        metavar="R",
        help="share of the drafted tokens that is accepted, 0 to 1 (default 0.6)",
    )
    axes.add_argument("--cuda-graph", choices=("on", "off"), default="on", help="graph capture (default on)")
    axes.add_argument("--attention-backend", metavar="NAME", help="default flashinfer (sglang), FLASH_ATTN (vllm)")
    for axis, values in AXES.items():
        flag = "--" + axis.replace("_", "-")
        axes.add_argument(
            flag,
            choices=values or None,
            help=argparse.SUPPRESS if axis != "jit_cache" else "cold: a compile at start-up",
        )

    trouble = p.add_argument_group("trouble")
    trouble.add_argument(
        "--fault", action="append", default=[], metavar="KIND@PHASE[:KEY=VALUE]...", help="see below; repeatable"
    )
    trouble.add_argument(
        "--daemonize",
        nargs="?",
        const="server",
        choices=("server", "helper"),
        help="server (without a value): detach from the starting process, which exits with 0; "
        "helper: only leave a detached child behind",
    )
    trouble.add_argument(
        "--leak-shm", action="store_true", help="name a file in /dev/shm that SIGKILL leaves behind, as the engines do"
    )
    trouble.add_argument(
        "--ignore-term", action="store_true", help="ignore SIGTERM, SIGINT and SIGHUP in every process"
    )
    trouble.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=0.5,
        metavar="S",
        help="how long ranks may take to end before they are killed (default 0.5)",
    )
    trouble.add_argument(
        "--watchdog-timeout",
        type=seconds,
        default=0.0,
        metavar="S",
        help="the engine's own: end the server when one step takes longer (default 0: none)",
    )
    trouble.add_argument(
        "--chatter",
        type=whole(0, 1_000_000),
        default=0,
        metavar="N",
        help="lines a second beside others (default 0)",
    )
    trouble.add_argument("--quiet", action="store_true", help="no access log, no line a batch")
    return p


def parse(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> tuple[Options, str | None]:
    """The checked options, and what --daemonize said.

    Exits with code 2 and a sentence on stderr when the command line is wrong.
    """
    p = parser()
    given = p.parse_args(argv)
    backend = given.attention_backend or ("FLASH_ATTN" if given.flavor == "vllm" else "flashinfer")
    axes = {axis: value for axis in AXES if (value := getattr(given, axis)) is not None}
    values = {**axes, "spec_decode": given.spec_decode, "cuda_graph": given.cuda_graph, "attention_backend": backend}
    faults: list[Fault] = []
    lot = random.Random(given.seed)
    try:
        phase_seconds = [("weight_load", given.load_seconds), *map(_phase_seconds, _split(given.phase_seconds))]
        for text in _split([*given.fault, environ.get(FAULT_VARIABLE, "")]):
            fault, conditions, chance = parse_fault(text, given.tp)
            if lot.random() < chance and all(values.get(axis, "") == value for axis, value in conditions):
                faults.append(fault)
    except ValueError as error:
        p.error(str(error))
    if given.spec_topk > 1 and given.spec_draft_tokens <= given.spec_steps:
        p.error("--spec-draft-tokens must be above --spec-steps where --spec-topk is above 1")
    cold = given.cold_compile if given.cold_compile is not None else COLD_COMPILE * (axes.get("jit_cache") == "cold")
    shown = {k: v for k, v in vars(given).items() if v is not None and k not in ("fault", "daemonize")}
    return Options(
        flavor=given.flavor,
        tp=given.tp,
        host=given.host,
        port=given.port,
        model=given.model_path,
        served_model_name=given.served_model_name or given.model_path,
        cache=given.cache_dir or "",
        keep_cache=bool(given.cache_dir),
        leak_shm=given.leak_shm,
        context_length=given.context_length,
        max_running=given.max_running_requests,
        shards=given.shards,
        phase_seconds=tuple(phase_seconds),
        step_seconds=given.step_seconds,
        cold_compile=cold,
        spec_decode=given.spec_decode,
        draft_model=given.draft_model_path or f"{given.model_path}-{given.spec_decode}",
        spec_steps=given.spec_steps,
        spec_topk=given.spec_topk,
        spec_draft_tokens=given.spec_draft_tokens,
        accept_rate=given.accept_rate,
        cuda_graph=given.cuda_graph == "on",
        attention_backend=backend,
        axes=tuple(sorted(axes.items())),
        api_key=given.api_key or environ.get(KEY_VARIABLE, ""),
        seed=given.seed,
        faults=tuple(faults),
        ignore_term=given.ignore_term,
        quiet=given.quiet,
        chatter=given.chatter,
        shutdown_timeout=given.shutdown_timeout,
        watchdog_timeout=given.watchdog_timeout,
        arguments=tuple(sorted({**shown, "attention_backend": backend}.items())),
    ), given.daemonize


def _split(texts: Sequence[str]) -> list[str]:
    """Each text may hold several entries."""
    return [part.strip() for text in texts for part in text.split(";") if part.strip()]


def _phase_seconds(text: str) -> tuple[str, float]:
    phase, _, value = text.partition("=")
    if phase not in PHASES or phase == "serving":
        phases = ", ".join(p for p in PHASES if p != "serving")
        raise ValueError(f"--phase-seconds {text!r}: write PHASE=SECONDS with one of {phases}")
    try:
        return phase, seconds(value)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--phase-seconds {text!r}: {error}") from None
