"""Incidents to make pages of, written as an incident writes them, and a reader of pages."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from html.parser import HTMLParser

import pytest

BEGIN = 1_795_990_000.0
LINK = re.compile(
    r"#[a-z]*|\.\./index\.html|[A-Za-z0-9._%/-]+|https://[A-Za-z0-9.-]+/[A-Za-z0-9._~/#?=&%+-]*",
    re.ASCII,
)
"""To a part of the page, to a file beside it, to a public report."""
VOID = {"meta", "br", "input", "link", "img", "hr"}


class Page(HTMLParser):
    """A page taken apart. ``tags``: (name, attributes); ``text``: by the nearest id above; fails on unbalanced tags."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.html = source
        self.tags, self.text, self.raw = [], {"": ""}, {}
        self._open = []
        self.feed(source)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert len(found) == len(attrs), f"an attribute twice in {tag}: {attrs}"
        self.tags.append((tag, found))
        if found.get("id"):
            assert found["id"] not in self.text, f"id {found['id']} twice"
            self.text[found["id"]] = ""
        if tag not in VOID:
            self._open.append((tag, found.get("id")))

    def handle_startendtag(self, tag, attrs):
        raise AssertionError(f"<{tag}/> means <{tag}> in HTML")

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> without a begin"
        assert self._open[-1][0] == tag, f"</{tag}> ends {self._open[-3:]}"
        if tag not in ("span", "code", "a", "strong"):
            self.handle_data(" ")
        self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1][0] in ("style", "script"):
            if data != " ":
                self.raw.setdefault(self._open[-1][0], []).append(data)
            return
        for id in {id for _, id in self._open if id} | {""}:
            self.text[id] += data

    def all(self, tag, **wanted):
        """Attributes of the tags that have these; ``class_`` is one of the classes."""
        word = wanted.pop("class_", None)
        return [
            found
            for name, found in self.tags
            if name == tag
            and (word is None or word in (found.get("class") or "").split())
            and all(found.get(key.replace("_", "-")) == value for key, value in wanted.items())
        ]

    def assert_harmless(self):
        """Nothing in it acts but our script, and nothing hides."""
        assert len(self.raw["script"]) == len(self.raw["style"]) == 1
        tags = {tag for tag, _ in self.tags}
        assert not tags & {"img", "iframe", "object", "embed", "link", "base", "form", "audio", "video"}
        for tag, attributes in self.tags:
            for name, value in attributes.items():
                assert not name.startswith("on"), (tag, attributes)
                assert name not in ("style", "src", "srcset", "action", "formaction", "background"), (tag, attributes)
                if name == "href":
                    assert re.match(
                        r"#|https://[A-Za-z0-9.-]+/[A-Za-z0-9._~/#?=&%+-]*$|\.\./index\.html$|[A-Za-z0-9._%/-]+$", value
                    ), value
        shown = html.unescape(self.html)
        odd = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"}
        assert not odd

    def words(self, id=""):
        return " ".join(self.text[id].split())


@pytest.fixture
def read():
    return lambda path: Page(path.read_text(encoding="ascii"))


def stack_file(label, pid, frames, rounds=2):
    stack = {
        "pid": pid,
        "thread_id": 1,
        "os_thread_id": pid,
        "thread_name": "MainThread",
        "active": False,
        "frames": [{"name": name, "filename": file, "line": line} for name, file, line in reversed(frames)],
    }
    entry = {
        "schema": "gpuserve.stack/1",
        "pid": pid,
        "start": 7,
        "label": label,
        "title": f"sglang::scheduler_{label}",
        "state": "S",
        "facts": {},
        "stacks": [stack],
    }
    return {"schema": "gpuserve.stacks/1", "label": label, "rounds": [{"round": n, **entry} for n in range(rounds)]}


class Scene:
    """The files of one incident, as values; change them, then :meth:`write`."""

    def __init__(self, ranks=8, culprit=3, seconds=60, hang=20, gpus=8):
        labels = [f"TP{n}" for n in range(ranks)]
        guilty = f"TP{culprit}"
        end = BEGIN + seconds
        shared = [("run_scheduler", "/x/srt/scheduler.py", 164), ("capture", "/x/srt/runner.py", 95)]
        waits = [*shared, ("barrier", "/x/srt/runner.py", 129), ("all_reduce", "/x/srt/comm.py", 54)]
        stuck = [*shared, ("run_kernels", "/x/srt/runner.py", 120), ("synchronize", "/x/torch/cuda.py", 21)]

        def path(frames):
            return [f"{name} ({'/'.join(file.split('/')[-2:])})" for name, file, _ in frames]

        def kind(of, kind, frames, signature):
            entry = {"role": "scheduler", "group": "", "ranks": of, "kind": kind, "path": path(frames)}
            return {**entry, "signature": signature, "moving": False}

        self.incident = {
            "schema": "gpuserve.incident/1",
            "complete": True,
            "reason": "startup_budget",
            "test": "test_it.py::test_greedy[sglang-tp8]",
            "time": end,
            "engine": "sglang",
            "id": f"sglang-tp{ranks}",
            "spec": {"engine": "sglang", "env": {"NCCL_DEBUG": "INFO"}},
            "argv": ["python", "-m", "sglang.launch_server", f"--tp={ranks}"],
            "gpuserve": "0.1.0",
            "verdict": "hang",
            "phase": "cuda_graph",
            "culprits": [guilty],
            "missing": [],
            "confidence": 0.85,
            "text": f"hang in cuda_graph after {seconds - hang} s without progress: {guilty} waits for its GPU.",
            "kill": True,
            "why": "it was not ready within its start-up budget",
            "seconds": 4.7,
            "facts": [{"claim": f"{guilty} waits for its GPU", "witness": "py-spy"}],
            "ruled_out": [{"what": "out of memory", "by": "33 of 128 GB resident"}],
            "classes": [
                kind([x for x in labels if x != guilty], "waits", waits, "collective-by-name"),
                kind([guilty], "cause", stuck, None),
            ],
            "ranks": {
                label: {
                    "pid": 1000 + n,
                    "role": "scheduler",
                    "state": "S",
                    "phase": "cuda_graph",
                    "done": 3,
                    "total": 24,
                    "leaf": "synchronize (/x/torch/cuda.py:21)",
                    "facts": {"wchan": "futex_wait", "cpu_seconds": 31.2, "rss_bytes": 4 << 30},
                }
                for n, label in enumerate(labels)
            },
            "gpus": [
                {"index": n, "name": "NVIDIA X", "memory_total": 98 << 30, "memory_used": 76 << 30, "utilisation": 0}
                for n in range(gpus)
            ],
            "memory": {"resident": 33 << 30, "virtual": 425 << 30, "limit": 128 << 30, "oom_kills": 0},
            "environment": {"NCCL_P2P_DISABLE": "1"},
            "problems": [],
        }
        self.timeline = [{"t": BEGIN, "kind": "event", "text": "launched"}]
        for n, label in enumerate(labels):
            for phase, begin, until in (("spawn", 0, 4), ("weight_load", 4, 15), ("cuda_graph", 15, None)):
                line = {"t": BEGIN + begin, "kind": "phase", "rank": label, "phase": phase}
                counted = phase == "cuda_graph"
                self.timeline.append(
                    {
                        **line,
                        "end": None if until is None else BEGIN + until + n / 100,
                        "done": 3 if counted else None,
                        "total": 24 if counted else None,
                    }
                )
        for second in range(seconds):
            busy = second < hang
            self.timeline.append(
                {
                    "t": BEGIN + second,
                    "kind": "sample",
                    "state": "moving" if busy or second < hang + 10 else "hung",
                    "still": 0.0 if busy else float(second - hang),
                    "phase": "cuda_graph",
                    "log": 100 * second,
                    "cpu": {label: 0.9 * min(second, hang) for label in labels},
                    "rss": min(second, 15) << 31,
                    "gpus": [[min(second, 15) * (5 << 30), 50 if busy else 0, 300 if busy else 88]] * gpus,
                    "tokens": None,
                    "requests": None,
                }
            )
        self.timeline.append({"t": end, "kind": "event", "text": "incident: startup_budget"})
        self.stacks = {
            f"{label}.{1000 + n}.json": stack_file(label, 1000 + n, stuck if label == guilty else waits)
            for n, label in enumerate(labels)
        }
        self.log = [f"[2026-11-29 22:29:01 TP{n % ranks}] Load weight begin. avail mem=138.28 GB" for n in range(40)]

    def write(self, directory):
        (directory / "stacks").mkdir(parents=True)
        (directory / ".gpuserve").write_text("gpuserve\n")
        (directory / "incident.json").write_text(json.dumps(self.incident))
        lines = sorted(self.timeline, key=lambda line: line["t"])
        (directory / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, content in self.stacks.items():
            (directory / "stacks" / name).write_text(json.dumps(content))
        (directory / "log_tail.txt").write_text("\n".join(self.log), encoding="utf-8", errors="surrogatepass")
        (directory / "verdict.md").write_text("# hang\n")
        return directory


@pytest.fixture
def scene():
    return Scene
