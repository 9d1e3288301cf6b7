"""Everything that the page of one incident shows, as plain values: foreign text, which the templates escape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ... import shell
from ...phases.labels import format_ranks, label_order
from ...vocabulary import VERDICTS
from ..blame import fate
from ..bundle import NAME, PARTS
from ..pages import REASONS
from . import curves, log_view, timeline_view, tree
from .reading import Folder, items, mapping, number, text, texts
from .timeline_view import EVENTS
from .wording import moment, seconds, size

PROCESSES: Final = 700

_ADDRESS: Final = re.compile(r"https://[A-Za-z0-9.-]+/[A-Za-z0-9._~/#?=&%+-]*", re.ASCII)
"""Of a public report: nothing else is ever made a link."""


@dataclass(frozen=True, slots=True)
class Process:
    """One row of the table of processes."""

    label: str
    culprit: bool
    pid: str
    role: str
    state: str
    phase: str
    where: str
    cpu: str
    resident: str
    kernel: str


@dataclass(frozen=True, slots=True)
class IncidentView:
    """``warnings``: what the reader must know before he believes the rest."""

    name: str
    id: str
    engine: str
    version: str
    verdict: str
    word: str
    phase: str
    culprits: str
    missing: str
    text: str
    reason: str
    test: str
    when: str
    fate: str
    confidence: str
    took: str
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    ruled_out: tuple[tuple[str, str], ...]
    known: tuple[str, ...]
    pictures: list[timeline_view.Picture]
    phases: list[timeline_view.Line]
    events: list[tuple[str, str]]
    charts: list[curves.Chart]
    gpus: list[tuple[str, ...]]
    roles: list[tree.Role]
    log: log_view.LogView
    processes: list[Process]
    command: str
    environment: list[tuple[str, str]]
    machine: tuple[str, ...]
    files: tuple[str, ...]
    gpuserve: str


def view(folder: Folder) -> IncidentView:
    """Read an incident's directory. Never raises because of what is in it, or is missing."""
    incident = folder.json("incident.json")
    culprits, missing = texts(incident.get("culprits")), texts(incident.get("missing"))
    began = number(incident.get("time"))
    timeline = timeline_view.read(folder.lines("timeline.jsonl"), began)
    spec = mapping(incident.get("spec"))
    gpus = [mapping(gpu) for gpu in items(incident.get("gpus"), 256)]
    totals = [t for gpu in gpus if (t := number(gpu.get("memory_total"))) is not None]
    verdict = text(incident.get("verdict"), 40) or "undecided"
    names = folder.names()
    confidence = number(incident.get("confidence"))
    kill = incident.get("kill")
    why = text(incident.get("why"), 400)
    return IncidentView(
        name=folder.path.name,
        id=text(incident.get("id"), 200) or folder.path.name,
        engine=text(incident.get("engine"), 80),
        version=text(incident.get("engine_version"), 80),
        verdict=verdict,
        word=verdict if verdict in VERDICTS else "undecided",
        phase=text(incident.get("phase"), 40) + (" (over)" if incident.get("phase_over") is True else ""),
        culprits=format_ranks(culprits),
        missing=format_ranks(missing),
        text=text(incident.get("text"), 6000),
        reason=REASONS.get(text(incident.get("reason"), 60), text(incident.get("reason"), 60)),
        test=text(incident.get("test"), 600),
        when=moment(began),
        fate=": ".join(filter(None, (fate(kill, text(incident.get("reason"))), why))) if isinstance(kill, bool) else "",
        confidence=f"{confidence:.0%}" if confidence is not None and 0 <= confidence <= 1 else "",
        took=seconds(number(incident.get("seconds"))),
        warnings=tuple(_warnings(incident)),
        facts=_pairs(incident.get("facts"), "claim", "witness"),
        ruled_out=_pairs(incident.get("ruled_out"), "what", "by"),
        known=tuple(url for url in texts(incident.get("known"), 20) if _ADDRESS.fullmatch(url)),
        pictures=timeline_view.pictures(timeline, culprits, missing),
        phases=timeline_view.table(timeline, missing),
        events=[(f"{when - timeline.begin:+.1f} s", said) for when, said in timeline.events[:EVENTS]],
        charts=curves.charts(timeline, max(totals, default=None)),
        gpus=[_gpu(gpu) for gpu in gpus],
        roles=tree.roles_of(folder, incident),
        log=log_view.view(folder, text(incident.get("engine"), 80)),
        processes=list(_processes(mapping(incident.get("ranks")), culprits)),
        command=shell.line(texts(incident.get("argv"), 400)),
        environment=_environment(mapping(incident.get("environment")), mapping(spec.get("env"))),
        machine=tuple(_machine(mapping(incident.get("memory")))),
        files=tuple(name for name in (*PARTS, "log_head.txt", "log_cause.txt", NAME) if name in names),
        gpuserve=text(incident.get("gpuserve"), 40),
    )


def _warnings(incident: Mapping[str, Any]) -> Iterator[str]:
    if not incident:
        yield "incident.json is not there or cannot be read: this page shows what else was found."
    elif incident.get("complete") is not True:
        yield "This incident is not complete: its taking was cut short, or still goes on. What had been read is here."
    schema = text(incident.get("schema"), 80)
    if incident and not schema.startswith("gpuserve.incident/1"):
        yield f"Its schema is {schema or 'not told'}, which this version does not know: parts may be missing."
    yield from texts(incident.get("problems"), 40)


def _pairs(value: object, first: str, second: str) -> tuple[tuple[str, str], ...]:
    pairs = [mapping(entry) for entry in items(value, 200)]
    return tuple((text(pair.get(first), 1500), text(pair.get(second), 600)) for pair in pairs if pair)


def _processes(ranks: Mapping[str, Any], culprits: tuple[str, ...]) -> Iterator[Process]:
    for label in sorted(list(ranks)[:PROCESSES], key=lambda label: (label not in culprits, label_order(label[:200]))):
        process = mapping(ranks[label])
        facts = mapping(process.get("facts"))
        done, total = number(process.get("done")), number(process.get("total"))
        counted = f" {done:.0f}/{total:.0f}" if done is not None and total is not None else ""
        wchan = text(facts.get("wchan"), 80)
        cpu = number(facts.get("cpu_seconds"))
        yield Process(
            label=text(label, 200),
            culprit=label in culprits,
            pid=text(process.get("pid")),
            role=text(process.get("role"), 40),
            state=text(process.get("state"), 20),
            phase=f"{text(process.get('phase'), 40)}{counted}",
            where=text(process.get("leaf"), 300) or text(process.get("problem"), 300),
            cpu=f"{cpu:.1f} s" if cpu is not None else "",
            resident=size(number(facts.get("rss_bytes"))),
            kernel="" if wchan == "0" else wchan,
        )


def _gpu(gpu: Mapping[str, Any]) -> tuple[str, ...]:
    index = text(gpu.get("index"), 10)
    used, total = number(gpu.get("memory_used")), number(gpu.get("memory_total"))
    busy, power = number(gpu.get("utilisation")), number(gpu.get("power"))
    return (
        f"GPU {index}" if index else text(gpu.get("label"), 80) or "GPU",
        text(gpu.get("name"), 100),
        " of ".join(filter(None, (size(used), size(total)))),
        f"{busy:.0f} %" if busy is not None else "",
        f"{power:.0f} W" if power is not None else "",
        ", ".join(texts(gpu.get("xids"), 20)),
        text(gpu.get("error"), 200),
    )


def _machine(memory: Mapping[str, Any]) -> Iterator[str]:
    resident, limit, virtual = (number(memory.get(name)) for name in ("resident", "limit", "virtual"))
    if resident:
        yield f"{size(resident)} resident{f' of {size(limit)}' if limit else ''}"
    if virtual:
        yield f"{size(virtual)} of address space (reserved, not used)"
    if kills := number(memory.get("oom_kills")):
        yield f"{kills:.0f} killed for memory by the kernel"


def _environment(*layers: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = {text(name, 200): text(value, 2000) for layer in layers for name, value in list(layer.items())[:300]}
    return sorted(found.items())
