"""One configuration is one unit on one worker: the scheduler with nodes that are objects, then with pytest-xdist."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from inspect import cleandoc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpuserve.plugin.distribution import Distributor
from pytest_gpuserve.plugin.durations import Durations
from pytest_gpuserve.plugin.scheduling import ServerScheduling

pytest.importorskip("xdist")


class Node:
    """A worker as the scheduler sees it, and as pytest-xdist 3.x behaves: it runs a test when it knows the next."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: list[int] = []
        self.shutting_down = False
        self.ran: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def can_run(self) -> bool:
        return len(self.queue) > 1 or (bool(self.queue) and self.shutting_down)


def _scheduler(
    of: str, tp: Mapping[str, int] | None = None, nodes: int = 2, dist: str = "load", **more: Any
) -> tuple[ServerScheduling, list[Node]]:
    """``of``: one letter a test, the key of its server; a dot for none. Everything collected and scheduled."""
    hook = SimpleNamespace(pytest_collectreport=lambda report: complaints.append(report))
    complaints: list[Any] = more.pop("complaints", [])
    config: Any = SimpleNamespace(
        option=SimpleNamespace(tx=["popen"] * nodes),
        getvalue=lambda name: dist if name == "dist" else ["popen"] * nodes,
        hook=hook,
        getoption=lambda name: ["popen"] * nodes,
    )
    keys = [None if letter == "." else letter for letter in of]
    said = {
        "servers": {key: [f"sim-{key}", (tp or {}).get(key, 1)] for key in keys if key},
        "of": keys,
        "groups": more.pop("groups", [None] * len(of)),
    }
    scheduler = ServerScheduling(
        config, None, lambda _: said, bool, more.pop("durations", {}), lambda: more.get("gpus")
    )
    workers = [Node(f"gw{n}") for n in range(nodes)]
    for node in workers:
        scheduler.add_node(node)
    for node in workers:
        scheduler.add_node_collection(node, ids(of))
    assert scheduler.collection_is_completed
    scheduler.schedule()
    return scheduler, workers


def ids(of: str) -> list[str]:
    return [f"test_x.py::test_{n}" for n in range(len(of))]


def run(scheduler: ServerScheduling, nodes: list[Node], seed: int = 0) -> None:
    """Let nodes run tests in a random interleaving until nobody can."""
    dice = random.Random(seed)
    for _ in range(10_000):
        able = [node for node in nodes if node.can_run()]
        if not able:
            return
        node = dice.choice(able)
        index = node.queue.pop(0)
        node.ran.append(index)
        scheduler.mark_test_complete(node, index, 0.1)
    raise AssertionError("endless")


def real(node: Node, of: str) -> list[int]:
    return [index for index in node.ran if index < len(of)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_test_runs_once_and_every_server_on_one_worker(seed: int, nodes: int) -> None:
    dice = random.Random(seed)
    of = "".join(dice.choice("ABCDE..") for _ in range(dice.randint(1, 40)))
    scheduler, workers = _scheduler(of, {"A": 8, "B": 4}, nodes, gpus=8)
    run(scheduler, workers, seed)
    assert Counter(i for node in workers for i in real(node, of)) == Counter(range(len(of)))
    for key in set(of) - {"."}:
        homes = {node.gateway.id for node in workers for i in real(node, of) if of[i] == key}
        assert len(homes) == 1
    for node in workers:
        served = [of[i] for i in real(node, of) if of[i] != "."]
        runs = [key for n, key in enumerate(served) if n == 0 or served[n - 1] != key]
        assert len(runs) == len(set(runs)), "a server's tests are not interrupted by another's"
    assert scheduler.tests_finished
    assert all(node.shutting_down for node in workers)


def test_a_worker_knows_one_test_ahead_and_no_other_unit() -> None:
    scheduler, (one, two) = _scheduler("AAAABBBBCC")
    assert (one.queue, two.queue) == ([0, 1], [4, 5])
    for expected in ([1, 2], [2, 3, 10]):
        scheduler.mark_test_complete(one, one.queue.pop(0))
        assert one.queue == expected
    scheduler.mark_test_complete(one, one.queue.pop(0))
    assert one.queue == [3, 10], "the last test can run, and C is still free for whoever comes first"
    scheduler.mark_test_complete(one, one.queue.pop(0))
    assert one.queue == [10, 8, 9, 10]


def test_a_test_that_was_sent_alone_can_run() -> None:
    _, (one, two) = _scheduler("AB")
    assert one.can_run()
    assert two.can_run()


def test_longest_first_by_gpus_and_past_durations() -> None:
    durations = {f"test_x.py::test_{n}": float(n) for n in range(4)}
    _, (node,) = _scheduler("ABCD", {"A": 4}, 1, durations=durations)
    assert node.queue[0] == 0, "four GPUs"
    scheduler, (node,) = _scheduler("ABCD", {}, 1, durations=durations)
    run(scheduler, [node])
    assert real(node, "ABCD") == [3, 2, 1, 0]


def test_workers_without_work_are_sent_home() -> None:
    _, nodes = _scheduler("AAA", nodes=3)
    assert [node.shutting_down for node in nodes] == [False, True, True]


def test_nothing_collected() -> None:
    scheduler, nodes = _scheduler("")
    assert scheduler.tests_finished
    assert all(node.shutting_down for node in nodes)


def test_the_test_that_killed_its_worker_is_not_run_again() -> None:
    of = "AAAABB"
    scheduler, (one, two) = _scheduler(of)
    scheduler.mark_test_complete(one, one.queue.pop(0))
    assert scheduler.remove_node(one) == "test_x.py::test_1"
    run(scheduler, [two])
    assert real(two, of) == [4, 5, 2, 3]
    assert scheduler.tests_finished


def test_a_replacement_takes_over_what_a_dead_worker_left() -> None:
    of = "AAAA"
    scheduler, (one, _) = _scheduler(of)
    assert scheduler.remove_node(one) == "test_x.py::test_0"
    assert not scheduler.tests_finished
    clone = Node("gw2")
    scheduler.add_node(clone)
    scheduler.add_node_collection(clone, ids(of))
    scheduler.schedule()
    run(scheduler, [clone])
    assert real(clone, of) == [1, 2, 3]


def test_a_replacement_that_collects_other_tests_gets_none() -> None:
    complaints: list[Any] = []
    scheduler, (one, _) = _scheduler("AAAA", complaints=complaints)
    scheduler.remove_node(one)
    clone = Node("gw2")
    scheduler.add_node(clone)
    scheduler.add_node_collection(clone, ["test_y.py::test_0"])
    scheduler.schedule()
    assert clone.shutting_down
    assert not clone.queue
    assert len(complaints) == 1


def test_workers_that_collect_differently_run_nothing() -> None:
    complaints: list[Any] = []
    scheduler, (one, two) = _scheduler("", complaints=complaints)
    scheduler.collection = None
    scheduler.add_node_collection(one, ["test_a"])
    scheduler.add_node_collection(two, ["test_b"])
    scheduler.schedule()
    assert len(complaints) == 1
    assert not one.queue
    assert scheduler.tests_finished


def test_a_worker_that_ends_early_reports_no_crash() -> None:
    scheduler, (one, _) = _scheduler("AAAA")
    one.shutdown()  # -x: pytest-xdist tells every worker to stop, which runs what it knows
    run(scheduler, [one])
    assert real(one, "AAAA") == [0, 1]
    assert scheduler.remove_node(one) is None


@pytest.mark.parametrize("when", ["queued", "taken", "finished"])
def test_a_crashed_test_to_be_rerun_stays_with_its_unit(when: str) -> None:
    of = {"queued": "AAABB", "taken": "AAA", "finished": "A"}[when]
    scheduler, (one, two) = _scheduler(of, nodes=2)
    clone = Node("gw2")
    if when == "taken":
        scheduler.add_node(clone)
        scheduler.add_node_collection(clone, ids(of))
    assert scheduler.remove_node(one) == "test_x.py::test_0"
    scheduler.mark_test_pending("test_x.py::test_0")
    if when != "taken":
        scheduler.add_node(clone)
        scheduler.add_node_collection(clone, ids(of))
    scheduler.schedule()
    run(scheduler, [two, clone])
    homes = {node.gateway.id for node in (two, clone) for i in real(node, of) if of[i] == "A"}
    again = [i for node in (two, clone) for i in real(node, of) if of[i] == "A"]
    assert sorted(again) == [i for i in range(len(of)) if of[i] == "A"]
    assert len(homes) == 1
    assert scheduler.tests_finished


def test_groups_count_in_loadgroup_only() -> None:
    groups = ["g", None, "g", None]
    _, (one, two) = _scheduler("AABB", groups=groups, dist="loadgroup")
    assert one.queue[:2] == [0, 1]
    assert two.shutting_down, "A and B share the group, so they are one unit"
    _, (one, two) = _scheduler("AABB", groups=groups, dist="load")
    assert (one.queue[0], two.queue[0]) == (0, 2)


def test_many_tests_without_a_server_are_sent_in_chunks() -> None:
    scheduler, nodes = _scheduler("." * 1000, nodes=2)
    run(scheduler, nodes)
    assert sum(i == 1000 for node in nodes for i in node.ran) <= 21, "pauses, one a chunk"
    assert all(len(real(node, "." * 1000)) > 300 for node in nodes)


def test_a_worker_that_says_nothing_has_tests_on_their_own() -> None:
    config: Any = SimpleNamespace(
        option=SimpleNamespace(tx=["popen"]), getvalue=lambda name: "load" if name == "dist" else ["popen"]
    )
    scheduler = ServerScheduling(config, None, lambda _: None, bool, {}, lambda: None)
    node = Node("gw0")
    scheduler.add_node(node)
    scheduler.add_node_collection(node, ["a", "b"])
    scheduler.schedule()
    run(scheduler, [node])
    assert [i for i in node.ran if i < 2] == [0, 1]


def test_gpus_are_asked_for_only_when_servers_are_about_to_start() -> None:
    asked: list[int] = []
    for of in ("...", "A.."):
        config: Any = SimpleNamespace(
            option=SimpleNamespace(tx=["popen"]), getvalue=lambda name: "load" if name == "dist" else ["popen"]
        )
        said = {"servers": {"A": ["sim", 1]}, "of": [None if c == "." else c for c in of], "groups": [None] * 3}
        scheduler = ServerScheduling(config, None, lambda _, said=said: said, bool, {}, lambda: asked.append(1))  # type: ignore[misc]
        node = Node("gw0")
        scheduler.add_node(node)
        scheduler.add_node_collection(node, ids(of))
        scheduler.schedule()
        assert len(asked) == (0 if of == "..." else 1)


# ---- durations


class Cache:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = json.loads(json.dumps(value))


def _report(nodeid: str, when: str, seconds: float, outcome: str = "passed") -> Any:
    return SimpleNamespace(nodeid=nodeid, when=when, duration=seconds, passed=outcome == "passed")


def test_durations_of_whole_passing_tests_with_servers_are_kept() -> None:
    cache = Cache()
    cache.values["gpuserve/durations"] = {"old": 7.0, "a": 1.0, "broken": "x"}
    durations = Durations(SimpleNamespace(cache=cache), lambda: {"a", "b", "rerun"})  # type: ignore[arg-type]
    for nodeid in ("a", "without a server"):
        for when, seconds in (("setup", 30.0), ("call", 2.0), ("teardown", 0.5)):
            durations.pytest_runtest_logreport(_report(nodeid, when, seconds))
    durations.pytest_runtest_logreport(_report("b", "setup", 1.0))
    durations.pytest_runtest_logreport(_report("b", "call", 900.0, "failed"))
    durations.pytest_runtest_logreport(_report("b", "teardown", 1.0))
    for when, outcome in (
        ("setup", "passed"),
        ("call", "rerun"),
        ("setup", "passed"),
        ("call", "passed"),
        ("teardown", "passed"),
    ):
        durations.pytest_runtest_logreport(_report("rerun", when, 1.0, outcome))
    durations.pytest_sessionfinish()
    assert durations.past() == {"old": 7.0, "a": 32.5, "rerun": 3.0}


def test_without_a_cache_nothing_is_known() -> None:
    durations = Durations(SimpleNamespace(), set)  # type: ignore[arg-type]
    durations.pytest_sessionfinish()
    assert durations.past() == {}


# ---- with pytest-xdist, workers of its own, and a stand-in for servers

CONFTEST = """
import json, os, time, pytest
from pytest_gpuserve.plugin.distribution import CHANNEL, Distributor, WorkerEnd

def server_of(item):
    mark = item.get_closest_marker("serve")
    return (mark.args[0], "sim-" + mark.args[0], mark.kwargs.get("tp", 1)) if mark else None

def pytest_configure(config):
    config.addinivalue_line("markers", "serve(key, tp): x")
    if channel := getattr(config, "workerinput", {}).get(CHANNEL):
        config.pluginmanager.register(WorkerEnd(channel, server_of, lambda item: note("last", item.name)))
    elif config.getoption("tx", None):
        config.pluginmanager.register(Distributor(config, dict, lambda: 8))

def pytest_collection_finish(session):
    time.sleep(0.3)  # the controller has answered by now
    assert all(item.function for item in session.items), "no item of ours is in the way of other plugins"

def note(*what):
    with open(os.path.join(os.environ["NOTES"], os.environ.get("PYTEST_XDIST_WORKER", "main")), "a") as file:
        file.write(json.dumps(what) + chr(10))

@pytest.fixture(autouse=True, scope="module")
def module(request):
    note("module up", request.node.name); yield; note("module down", request.node.name)

@pytest.fixture(autouse=True)
def started(request):
    note("test", request.node.name); yield; note("done", request.node.name)
"""


@pytest.fixture
def notes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    directory = pytester.path / "notes"
    directory.mkdir()
    monkeypatch.setenv("NOTES", str(directory))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeini("[pytest]\n")
    pytester.makeconftest(CONFTEST)
    return lambda: _notes(directory)


def _notes(directory: Path) -> dict[str, list[list[str]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(directory.iterdir())
    }


def _xdist(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:gpuserve", "-p", "no:randomly", *arguments, timeout=120)


def _tests(notes: Mapping[str, list[list[str]]]) -> dict[str, list[str]]:
    return {worker: [name for what, name in lines if what == "test"] for worker, lines in notes.items()}


MIXED = cleandoc(
    """
    import pytest

    @pytest.mark.serve("B", tp=4)
    def test_b1(): pass

    @pytest.mark.serve("A", tp=8)
    @pytest.mark.parametrize("n", range(5))
    def test_a(n): pass

    @pytest.mark.serve("B", tp=4)
    def test_b2(): pass

    def test_free(): pass
    """
)


def test_units_are_whole_with_real_workers(pytester: pytest.Pytester, notes: Any) -> None:
    pytester.makepyfile(test_one=MIXED, test_two=MIXED)
    result = _xdist(pytester, "-n2", "-v")
    result.assert_outcomes(passed=16)
    result.stdout.fnmatch_lines(["*scheduling tests via ServerScheduling"])
    result.stdout.no_fnmatch_line("*gpuserve-pause*")
    ran = _tests(notes())
    assert sum(map(len, ran.values())) == 16
    for letter in "ab":
        homes = {worker for worker, names in ran.items() if any(n.startswith(f"test_{letter}") for n in names)}
        assert len(homes) == 1
    last = [name for lines in notes().values() for what, name in lines if what == "last" and name != "test_free"]
    assert sorted(last) == ["test_a[4]", "test_b2"], "the end of each unit is told"
    for lines in notes().values():
        depth = 0
        for what, _ in lines:
            depth += {"module up": 1, "module down": -1}.get(what, 0)
            assert depth in (0, 1), "a module is torn down before the next, and at the end of a unit"
        assert depth == 0


def test_a_crash_costs_one_test_run_once(pytester: pytest.Pytester, notes: Any) -> None:
    pytester.makepyfile(
        """
        import os, pytest
        @pytest.mark.serve("A")
        @pytest.mark.parametrize("n", range(5))
        def test_a(n):
            if n == 1:
                os._exit(3)
        @pytest.mark.serve("B")
        @pytest.mark.parametrize("n", range(3))
        def test_b(n): pass
        """
    )
    result = _xdist(pytester, "-n2", "--dist=loadgroup", "-p", "no:rerunfailures", "--junitxml=j.xml")
    result.assert_outcomes(passed=7, failed=1)
    assert Counter(name for names in _tests(notes()).values() for name in names)["test_a[1]"] == 1
    assert (pytester.path / "j.xml").read_text().count("<testcase") == 8


def test_reruns_run_a_crashed_test_as_often_as_asked(pytester: pytest.Pytester, notes: Any) -> None:
    pytest.importorskip("pytest_rerunfailures")
    pytester.makepyfile(
        """
        import os, time, pytest
        @pytest.mark.serve("A")
        @pytest.mark.parametrize("n", range(3))
        def test_a(n):
            if n == 1:
                time.sleep(1)  # pytest-rerunfailures tells the controller through a socket and waits for no answer
                os._exit(3)
        @pytest.mark.serve("B")
        @pytest.mark.parametrize("n", range(2))
        def test_b(n): assert n
        """
    )
    result = _xdist(pytester, "-n2", "--reruns=1")
    ran = Counter(name for names in _tests(notes()).values() for name in names)
    assert ran["test_a[1]"] == 2, "once, and once again because --reruns=1 says so"
    assert ran["test_b[0]"] == 2
    assert ran["test_a[0]"] == ran["test_a[2]"] == 1
    assert result.ret == 1
    homes = [worker for worker, names in _tests(notes()).items() if "test_b[0]" in names]
    assert len(homes) == 1


def test_a_users_own_scheduler_comes_first(pytester: pytest.Pytester, notes: Any) -> None:
    pytester.makeconftest(
        CONFTEST
        + cleandoc(
            """
            import xdist.scheduler
            class Own(xdist.scheduler.EachScheduling): pass
            def pytest_xdist_make_scheduler(config, log):
                return Own(config, log)
            """
        )
    )
    pytester.makepyfile(test_one=MIXED)
    result = _xdist(pytester, "-n2", "-v")
    result.assert_outcomes(passed=16)
    result.stdout.fnmatch_lines(["*scheduling tests via Own"])
    result.stdout.no_fnmatch_line("*gpuserve-pause*")


def test_another_choice_of_dist_is_left_alone(pytester: pytest.Pytester, notes: Any) -> None:
    pytester.makepyfile(test_one=MIXED)
    result = _xdist(pytester, "-n2", "--dist", "each", "-v")
    result.assert_outcomes(passed=16)
    result.stdout.no_fnmatch_line("*ServerScheduling*")
    result.stdout.fnmatch_lines(["gpuserve: --dist each may start a server once in every worker*"])


@pytest.mark.parametrize(
    ("dist", "ours"), [("load", True), ("loadgroup", True), ("worksteal", False), ("loadfile", False)]
)
def test_which_choices_are_taken_over(dist: str, ours: bool) -> None:
    config: Any = SimpleNamespace(
        option=SimpleNamespace(tx=["popen"]), getvalue=lambda name: dist if name == "dist" else ["popen"]
    )
    distributor = Distributor(config, dict, lambda: None)
    assert (distributor.pytest_xdist_make_scheduler(config, None) is not None) == ours
    assert (distributor.pytest_report_header() is None) == ours


def test_x_ends_soon(pytester: pytest.Pytester, notes: Any) -> None:
    pytester.makepyfile(
        """
        import time, pytest
        @pytest.mark.serve("A")
        def test_a(): time.sleep(0.5); assert False
        @pytest.mark.serve("B")
        @pytest.mark.parametrize("n", range(40))
        def test_b(n): time.sleep(0.3)
        """
    )
    result = _xdist(pytester, "-n2", "-x")
    assert result.ret == pytest.ExitCode.INTERRUPTED or result.ret == 1
    assert sum(len(names) for names in _tests(notes()).values()) < 20
