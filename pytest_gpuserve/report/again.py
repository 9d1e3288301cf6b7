"""A bundle judged and written again: on another machine, by another version, from nothing but its files."""

from __future__ import annotations

import re
from typing import Any

from ..diagnose import evidence_json, parse
from ..diagnose.merge import Merged, merge
from ..diagnose.model import Judgement, ProcessDump
from ..diagnose.verdict import judge
from ..foreign import MOST_JSON
from ..text import escape
from . import repro
from .bundle_reader import MOST_PARSED, Bundle
from .files import Store
from .issue import issue
from .pages import verdict_page


def rounds(bundle: Bundle) -> list[list[ProcessDump]]:
    """The server's stacks, without those of pytest."""
    found: list[ProcessDump] = []
    left = MOST_PARSED
    for name in bundle.stacks():
        if not re.match(r"stacks/pytest\.\d+\.json$", name) and not name.endswith(".native.json"):
            left -= bundle.files.names[name]
            if left < 0:
                break
            found += parse.read_dumps(bundle.text(name, MOST_JSON) or "", source=name)
    return parse.as_rounds(found)


def judge_again(bundle: Bundle) -> tuple[Judgement, Merged] | None:
    """By this version's rules and signatures; None where the evidence is not there, or is not ours."""
    try:
        evidence = evidence_json.from_json(bundle.json("evidence.json"), rounds(bundle))
        return judge(evidence), merge(evidence.rounds)
    except Exception:  # anybody may have written it
        return None


def written_again(bundle: Bundle) -> Bundle:
    """The same bundle with its incident judged anew, where that can be done."""
    incident: dict[str, Any] = bundle.json("incident.json")
    found = judge_again(bundle)
    if found is None:
        return bundle
    judgement, merged = found
    verdict = judgement.to_json()
    del verdict["schema"]
    sections = incident.get("sections")
    stacks = {"Stacks": escape(merged.text(max_lines=60), 160).splitlines()}
    sections = {**sections, **stacks} if isinstance(sections, dict) else stacks
    return Bundle(bundle.name, bundle.files, {"incident.json": {**incident, **verdict, "sections": sections}})


def render(bundle: Bundle, store: Store) -> None:
    """verdict.md, issue.md and repro.sh.

    Raises:
        OSError: they cannot be written.
    """
    incident = bundle.json("incident.json")
    clean = not store.redacts
    store.write("verdict.md", verdict_page(incident), clean=clean)
    store.write("repro.sh", repro.script(bundle.json("server.json"), incident), clean=clean)
    store.write("issue.md", issue(bundle), clean=clean)
