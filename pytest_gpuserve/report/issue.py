"""issue.md: what a maintainer asks for, under the headings of the engine's own form. A function of the bundle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .bundle_reader import Bundle
from .markdown import block, code, plain
from .pages import REASONS, gone, mapping, number, pairs, sections, strings, where
from .repro import environment, script

MOST: Final = 60_000
"""Characters: GitHub takes 65536."""

_FORMS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "sglang": (("Describe the bug", "bug"), ("Reproduction", "repro"), ("Environment", "environment")),
    "vllm": (
        ("Your current environment", "environment"),
        ("🐛 Describe the bug", "bug"),
        ("Minimal reproduction", "repro"),
    ),
}
"""Headings of the bug forms (SGLang 1-bug-report.yml, vLLM 400-bug-report.yml), in their order."""

_FAILURES: Final = {"hang", "slow", "crash", "oom", "config", "unsupported_arch", "port", "leak", "infra"}


def issue(bundle: Bundle) -> str:
    """The whole text; shorter stacks and logs rather than one that cannot be posted."""
    for most in (90, 40, 15, 5):
        text = _issue(bundle, most)
        if len(text) <= MOST:
            break
    return text if len(text) <= MOST else _short(text)


def _short(text: str) -> str:
    """Cut at the end of a line, and of what is open there."""
    kept = text[: MOST - 60].rpartition("\n")[0]
    fence = ""
    for line in kept.split("\n"):
        if not fence and (opened := re.fullmatch(r"(`{3,})[a-z]+", line)):
            fence = opened[1]
        elif line == fence:
            fence = ""
    return "\n".join([kept, *([fence] if fence else []), "", "(cut here)", ""])


def _issue(bundle: Bundle, most: int) -> str:
    incident, server, versions = bundle.json("incident.json"), bundle.json("server.json"), bundle.json("versions.json")
    engine = str(incident.get("engine"))
    parts = {
        "bug": lambda: _bug(incident, most),
        "repro": lambda: code(script(server, incident).splitlines(), "sh"),
        "environment": lambda: _environment(engine, versions, server, most),
    }
    lines = [f"**Title:** [Bug] {_title(incident, versions)}", ""]
    for heading, part in _FORMS.get(engine, _FORMS["sglang"]):
        lines += [f"### {heading}", "", *parts[part](), ""]
    lines.append(f"<sub>Written by pytest-gpuserve {plain(incident.get('gpuserve'))}; secrets, addresses and prompts ")
    lines.append("were replaced by placeholders. Read it before you post it.</sub>")
    return "\n".join(lines) + "\n"


def _title(incident: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """``hang in cuda_graph, TP3 (sglang 0.5.6, tp=8, eagle3)``."""
    phase = f" {plain(place)}" if (place := where(incident)) else ""
    culprits = strings(incident.get("culprits"))
    who = f", {plain(', '.join(culprits[:4]))}" if culprits else ""
    return f"{plain(incident.get('verdict'))}{phase}{who} ({_engine(incident, versions)}, {plain(incident.get('id'))})"


def _engine(incident: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    name = str(incident.get("engine"))
    version = _packages(versions).get(name)
    return plain(f"{name} {version}" if version else name)


def _bug(incident: Mapping[str, Any], most: int) -> list[str]:
    body = dict(sections(incident))
    lines = [plain(incident.get("text")), "", "| | |", "|---|---|"]
    lines += [f"| {name} | {plain(value, 2000)} |" for name, value in _table(incident)]
    if stacks := body.get("Stacks"):
        stacks = [*stacks, *(f"gone: {entry}" for entry in gone(incident))]
        lines += ["", "**What every rank does** (ranks in the same place are put together; leaf frame last)", ""]
        lines += code(_cut(stacks, most))
    if facts := pairs(incident.get("facts"), "claim", "witness"):
        lines += ["", "**What this rests on**", "", *(f"- {plain(c, 400)} ({plain(w, 100)})" for c, w in facts[:12])]
    if ruled_out := pairs(incident.get("ruled_out"), "what", "by"):
        lines += ["", "**What was ruled out**", "", *(f"- {plain(c, 400)}: {plain(by, 400)}" for c, by in ruled_out)]
    for title in ("Last lines of the log", "Machine"):
        if found := body.get(title):
            lines += ["", f"**{title}**", "", *code(_cut(found, most))]
    return lines


def _table(incident: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "verdict", str(incident.get("verdict"))
    over = " is over; which came next is not known" if incident.get("phase_over") is True else ""
    yield "phase", f"{incident.get('phase') or 'unknown'}{over}"
    culprits = strings(incident.get("culprits"))
    yield "rank", ", ".join(culprits) or "none stands out"
    if missing := strings(incident.get("missing")):
        yield "not there", ", ".join(missing)
    if ended := gone(incident):
        yield "gone", "; ".join(ended[:8])
    if cause := incident.get("cause"):
        yield "cause", str(cause)
    if advice := incident.get("advice"):
        yield "what helps", str(advice)
    if known := strings(incident.get("known")):
        yield "seen before", " ".join(known[:4])
    if how := mapping(incident.get("probe")).get("how"):
        yield "asked just now", str(how)
    reason = str(incident.get("reason"))
    yield "noticed because", REASONS.get(reason, reason)
    if test := incident.get("test"):
        yield "test", str(test)


def _environment(engine: str, versions: Mapping[str, Any], server: Mapping[str, Any], most: int) -> list[str]:
    machine, torch = mapping(versions.get("machine")), mapping(versions.get("torch"))
    lines = [f"{name} {version}" for name, version in sorted(_packages(versions).items(), key=lambda p: p[0] != engine)]
    lines += [f"{name} from commit {commit}" for name, commit in mapping(versions.get("commits")).items()]
    rows = (
        ("Python", versions.get("python")),
        ("CUDA of torch", torch.get("cuda")),
        ("driver", machine.get("driver")),
        ("kernel", machine.get("kernel")),
        ("system", machine.get("system")),
        ("libc", machine.get("libc")),
        ("CPU", f"{machine.get('cpus')} x {machine.get('cpu')}" if machine.get("cpu") else machine.get("cpus")),
        ("memory", f"{number(machine.get('memory')) / (1 << 30):.0f} GiB" if machine.get("memory") else None),
        ("container", machine.get("container")),
    )
    lines += [f"{name}: {value}" for name, value in rows if value is not None]
    lines += _gpus(versions.get("gpus"))
    lines += [f"{name}={value}" for name, value in environment(server).items()]
    if topology := versions.get("topology"):
        lines += ["", *str(topology).splitlines()[:80]]
    lines += [f"not known: {problem}" for problem in strings(versions.get("problems"))]
    return code(_cut([line for entry in lines for line in block(entry, 300) or [""]], max(most, 40)))


def _gpus(entries: Any) -> list[str]:
    """``8 x NVIDIA RTX PRO 6000 (sm_120, 95.6 GiB)``."""
    counts: dict[str, int] = {}
    for gpu in entries if isinstance(entries, list) else ():
        if isinstance(gpu, Mapping):
            capability = gpu.get("capability")
            sm = f"sm_{''.join(map(str, capability))}, " if isinstance(capability, list) else ""
            text = f"{gpu.get('name')} ({sm}{number(gpu.get('memory')) / (1 << 30):.1f} GiB)"
            counts[text] = counts.get(text, 0) + 1
    return [f"GPU: {count} x {text}" for text, count in counts.items()]


def _packages(versions: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(version) for name, version in mapping(versions.get("packages")).items()}


def _cut(lines: list[str], most: int) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"… {len(lines) - most} lines more are in the bundle"]
