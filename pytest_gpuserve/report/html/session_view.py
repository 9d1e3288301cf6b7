"""Everything that the page of a session shows: its incidents, its matrices as grids, its searches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...isolation.conclude import CellResult
from ...isolation.grid import cell_text
from ...phases.labels import format_ranks
from ...vocabulary import VERDICTS
from .. import results_log
from ..files import ours
from ..pages import REASONS
from .reading import Folder, items, mapping, number, text, texts
from .wording import moment, seconds

INCIDENTS: Final = 500
RESULTS: Final = 4000
CELLS: Final = 1500
TESTS: Final = 2000
RUNS: Final = 400
PAGE: Final = "index.html"

_GRAVE: Final = ("hang", "crash", "oom", "leak", "stalled", "slow", "config", "unsupported_arch", "port", "degraded")


@dataclass(frozen=True, slots=True)
class Entry:
    """One incident. ``link``: name of its directory when there is a page in it. ``earlier``: of a session before."""

    name: str
    link: str
    id: str
    verdict: str
    word: str
    phase: str
    culprits: str
    reason: str
    test: str
    when: str
    text: str
    earlier: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a grid. ``word``: a verdict, or pass, flaky, skip, none."""

    id: str
    said: str
    word: str
    link: str


@dataclass(frozen=True, slots=True)
class Grid:
    """One way to lay a matrix out. ``column``: the axis whose values are the columns; "" for a plain list."""

    column: str
    columns: tuple[str, ...]
    heads: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One ``matrix.json``: what it proves, and the same cells laid out by each of its axes, the last one first."""

    id: str
    name: str
    statements: tuple[tuple[str, str], ...]
    flaky: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    grids: tuple[Grid, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One launch of a search."""

    number: str
    on: str
    purpose: str
    outcome: str
    said: str
    seconds: str
    link: str
    text: str


@dataclass(frozen=True, slots=True)
class Search:
    """One ``isolate.json``."""

    id: str
    name: str
    command: str
    target: str
    found: tuple[tuple[str, str], ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Test:
    """One line of ``results.jsonl``."""

    nodeid: str
    outcome: str
    said: str
    reason: str
    link: str


@dataclass(frozen=True, slots=True)
class SessionView:
    """``incidents``: the newest first."""

    name: str
    incidents: tuple[Entry, ...]
    matrices: tuple[Matrix, ...]
    searches: tuple[Search, ...]
    tests: tuple[Test, ...]
    outcomes: tuple[tuple[str, int], ...]

    @property
    def now(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.incidents if not entry.earlier)

    @property
    def worst(self) -> str:
        """The gravest verdict of this session's incidents."""
        return min((entry.word for entry in self.now), key=_gravity, default="ready")

    @property
    def earlier(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.incidents if entry.earlier)


def view(folder: Folder, since: float | None) -> SessionView:
    """Read an artifacts directory. ``since``: when this session began; None: nothing counts as earlier. Never raises
    because of what is in it."""
    names = [name for name in folder.names() if not name.startswith(".")]
    pages = {name for name in names[-3000:] if (folder.path / name / PAGE).is_file()}
    incidents = sorted(_incidents(folder, names, pages, since), key=lambda pair: pair[0], reverse=True)[:INCIDENTS]
    matrices = [
        _matrix(n, name, folder.json(name), pages)
        for n, name in enumerate(n for n in names if n.startswith("matrix") and n.endswith(".json"))
    ]
    places = ["isolate.json", *(f"{name}/isolate.json" for name in names[-3000:])]
    searches = [(place, found) for place in places if (found := folder.json(place))]
    logs = ours(folder.path, results_log.NAME, results_log.SCHEMA)
    lines = _last_session([line for log in logs for line in folder.lines(log.name)])
    return SessionView(
        name=folder.path.name,
        incidents=tuple(entry for _, entry in incidents),
        matrices=tuple(matrix for matrix in matrices[:20] if matrix is not None),
        searches=tuple(_search(n, place, raw, folder, pages) for n, (place, raw) in enumerate(searches[:20])),
        tests=tuple(_tests(lines, pages)),
        outcomes=tuple(Counter(_ended(line) for line in lines).most_common(8)),
    )


def _incidents(
    folder: Folder, names: Sequence[str], pages: set[str], since: float | None
) -> Iterator[tuple[float, Entry]]:
    for name in names[-3000:]:
        raw = folder.json(f"{name}/incident.json")
        if not raw:
            continue
        when = number(raw.get("time"))
        verdict = text(raw.get("verdict"), 40) or "undecided"
        yield (
            when or 0.0,
            Entry(
                name=name,
                link=name if name in pages else "",
                id=text(raw.get("id"), 200),
                verdict=verdict,
                word=_word(verdict),
                phase=text(raw.get("phase"), 40),
                culprits=format_ranks(texts(raw.get("culprits"))),
                reason=REASONS.get(text(raw.get("reason"), 60), text(raw.get("reason"), 60)),
                test=text(raw.get("test"), 400),
                when=moment(when),
                text=text(raw.get("text"), 600),
                earlier=since is not None and when is not None and when < since,
            ),
        )


def _gravity(word: str) -> int:
    return _GRAVE.index(word) if word in _GRAVE else len(_GRAVE)


def _word(verdict: str) -> str:
    """A verdict as a class of the style sheet: one that we know."""
    return verdict if verdict in (*VERDICTS, "pass", "skip", "test", "flaky") else "undecided"


def _matrix(n: int, name: str, raw: Mapping[str, Any], pages: set[str]) -> Matrix | None:
    results = [r for entry in items(raw.get("cells"), RESULTS) if (r := _result(mapping(entry))) is not None]
    if not results:
        return None
    links = {text(id, 300): _link(where, pages) for id, where in mapping(raw.get("incidents")).items()}
    axes: dict[str, dict[str, None]] = {}
    for result in results:
        for axis, value in result.values.items():
            axes.setdefault(axis, {})[value] = None
    varied = [axis for axis, values in axes.items() if len(values) > 1]
    choices = list(reversed(varied)) if len(varied) * len(results) <= CELLS else varied[-1:]
    grids = [_grid(results, axes, [a for a in varied if a != column], column, links) for column in choices]
    said = [mapping(entry) for entry in items(raw.get("conclusion"), 100)]
    return Matrix(
        id=f"matrix{n}",
        name=name,
        statements=tuple((text(s.get("kind"), 20), text(s.get("text"), 1500)) for s in said if s),
        flaky=tuple(_flaky(raw.get("flaky"))),
        counts=tuple(Counter(_of_cell(runs) for runs in _by_id(results).values()).most_common(12)),
        grids=tuple(grids) if grids else (_list(results, links),),
    )


def _result(raw: Mapping[str, Any]) -> CellResult | None:
    values = mapping(raw.get("values"))
    id = text(raw.get("id"), 300)
    if not id:
        return None
    named = {text(axis, 80): text(value, 120) for axis, value in list(values.items())[:12]}
    return CellResult(
        id, named, text(raw.get("verdict"), 40) or "undecided", text(raw.get("phase"), 40) or None, reason=None
    )


def _by_id(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    runs: dict[str, list[CellResult]] = {}
    for result in results:
        runs.setdefault(result.id, []).append(result)
    return runs


def _of_cell(runs: Sequence[CellResult]) -> str:
    """One word for all runs of a cell."""
    if not runs:
        return "none"
    if all(run.passed for run in runs):
        return "pass"
    if any(run.passed for run in runs):
        return "flaky"
    worst = max(runs, key=lambda run: run.failed).verdict
    return "skip" if worst in ("skip", "skipped", "not_run") else _word(worst)


def _cell(runs: Sequence[CellResult], links: Mapping[str, str]) -> Cell:
    id = runs[0].id if runs else ""
    return Cell(id, cell_text(runs), _of_cell(runs), links.get(id, ""))


def _grid(
    results: Sequence[CellResult],
    axes: Mapping[str, Mapping[str, None]],
    rows: Sequence[str],
    column: str,
    links: Mapping[str, str],
) -> Grid:
    cells: dict[tuple[str, ...], list[CellResult]] = {}
    for result in results:
        key = tuple(result.values.get(axis, "") for axis in (*rows, column))
        cells.setdefault(key, []).append(result)
    heads = list(dict.fromkeys(key[:-1] for key in cells))
    order = [{value: n for n, value in enumerate(axes[axis])} for axis in rows]
    heads.sort(key=lambda head: tuple(order[n].get(value, -1) for n, value in enumerate(head)))
    columns = tuple(axes[column])
    return Grid(
        column,
        columns,
        tuple(rows),
        tuple((head, tuple(_cell(cells.get((*head, value), ()), links) for value in columns)) for head in heads),
    )


def _list(results: Sequence[CellResult], links: Mapping[str, str]) -> Grid:
    """No axis varies, or the cells say none."""
    return Grid("", ("result",), ("cell",), tuple(((id,), (_cell(r, links),)) for id, r in _by_id(results).items()))


def _flaky(value: object) -> Iterator[str]:
    for entry in items(value, 100):
        if isinstance(entry, dict):
            id, failed, runs = (text(entry.get(name), 300) for name in ("id", "failed", "runs"))
        else:
            id, failed, runs = (*texts(entry, 3), "", "", "")[:3]
        if id:
            yield f"{id} failed in {failed} of {runs} runs"


def _link(where: object, pages: set[str]) -> str:
    """The directory of an incident beside this page, when it has a page; whatever else is named is no link."""
    name = text(where, 1000).rstrip("/").rpartition("/")[2]
    return name if name in pages else ""


def _search(n: int, place: str, raw: Mapping[str, Any], folder: Folder, pages: set[str]) -> Search:
    result = mapping(raw.get("result"))
    target = mapping(raw.get("target"))
    beside = place.rpartition("/")[0]
    rate, sure = number(result.get("repro_rate")), number(result.get("confidence"))
    sets = [" + ".join(texts(entry)) for entry in items(result.get("sets"), 50)]
    found = [
        ("status", text(result.get("status"), 60) or "not finished"),
        *(("fails with", names) for names in sets),
        *((f"of {text(name, 200)}", ", ".join(texts(parts)) or "its core alone") for name, parts in _refined(result)),
        ("smallest command that fails", text(result.get("smallest"), 4000)),
        ("smallest remedy that passes", text(result.get("remedy"), 400)),
        ("fails in", f"{rate:.0%} of the launches" if rate is not None and sets else ""),
        ("confidence", f"{sure:.1%}" if sure is not None and sets else ""),
    ]
    runs = sorted((mapping(r) for r in items(raw.get("runs"), RUNS)), key=lambda run: number(run.get("number")) or 0.0)
    return Search(
        id=f"search{n}",
        name=place,
        command=text(raw.get("command"), 4000),
        target=" ".join(filter(None, (text(target.get("verdict"), 40), text(target.get("phase"), 40)))),
        found=tuple((head, said) for head, said in found if said),
        runs=tuple(_run(run, beside, folder, pages) for run in runs if run),
    )


def _refined(result: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(mapping(result.get("refined")).items())[:50]


def _run(run: Mapping[str, Any], beside: str, folder: Folder, pages: set[str]) -> Run:
    stage = text(run.get("stage"), 200)
    on = ", ".join(texts(run.get("deltas"))) or "base alone"
    name = text(run.get("incident"), 1000).rstrip("/").rpartition("/")[2]
    link = name if name in pages else ""
    for inner in ("incidents", ""):
        place = "/".join(filter(None, (beside, inner, name)))
        if not link and name and name not in (".", "..") and (folder.path / place / PAGE).is_file():
            link = place
    return Run(
        number=text(run.get("number")),
        on=on if stage in ("search", "") else f"{stage}: {on}",
        purpose=text(run.get("purpose"), 60),
        outcome=text(run.get("outcome"), 20),
        said=" ".join(filter(None, (text(run.get("verdict"), 40), text(run.get("phase"), 40)))),
        seconds=seconds(number(run.get("seconds"))),
        link=link,
        text=text(run.get("text"), 500) if run.get("outcome") != "pass" else "",
    )


def _last_session(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the last session in the files, the last line of every test: a rerun's earlier attempts do not count."""
    tests = sorted(
        (line for line in lines if text(line.get("nodeid"))), key=lambda line: number(line.get("time")) or 0.0
    )
    session = text(tests[-1].get("session"), 80) if tests else ""
    return list({text(t["nodeid"], 400): t for t in tests if text(t.get("session"), 80) == session}.values())


def _ended(line: Mapping[str, Any]) -> str:
    """How a test ended; its line says ``running`` when its process was killed in it."""
    outcome = text(line.get("outcome"), 20)
    return "did not end" if outcome == "running" else outcome


def _tests(lines: Sequence[Mapping[str, Any]], pages: set[str]) -> Iterator[Test]:
    """Those that did not pass first, as far as there is room."""
    for line in sorted(lines, key=lambda line: line.get("outcome") in ("passed", "skipped"))[:TESTS]:
        yield Test(
            nodeid=text(line.get("nodeid"), 400),
            outcome=_ended(line),
            said=" ".join(filter(None, (text(line.get("verdict"), 40), text(line.get("phase"), 40)))),
            reason=text(line.get("reason"), 400),
            link=_link(line.get("incident"), pages),
        )
