"""pytest-xdist's scheduler for tests with servers: one configuration is one unit of work, on one worker.

pytest-xdist runs a worker's last test only when the worker knows what comes after it. Handing out the next unit so
early would tie it to a worker that may be busy for long, so each unit is followed by a *pause*: an item that every
worker adds to its session after collecting, that runs nothing, and during which the worker waits for more. Inside a
unit a worker knows one test ahead, so that ``-x`` ends soon.
Unlike in pytest-xdist's own schedulers the test that killed its worker is not run again (pytest-dev/pytest-xdist#1371),
and node ids are not touched (#1386).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import pytest

from ..isolation.plan import PlannedTest, Unit, choose, longest_first, make_units

MODES = ("load", "loadgroup")
"""Values of --dist that leave the choice to us; any other was made by the user."""


@dataclass(slots=True)
class Worker:
    """What one node was given.

    Attributes:
        unit: what it works on.
        todo: positions of its tests that are not finished, in order.
        sent: how many of them the node knows: the one it runs, and the next.
    """

    unit: Unit | None = None
    todo: list[int] = field(default_factory=list)
    sent: int = 0


class ServerScheduling:
    """Implements ``xdist.scheduler.protocol.Scheduling``.

    Args:
        config: the controller's.
        log: pytest-xdist's producer of debug lines.
        published: what a node's worker said about its tests (``describe`` in distribution.py), None: nothing.
        allow_pause: makes a node's worker add the pause to its tests.
        durations: seconds of tests in past runs, by node id.
        gpus: how many GPUs there are to lease, None: not known; asked once, when there are units with servers.
    """

    def __init__(
        self,
        config: pytest.Config,
        log: Any,
        published: Callable[[Any], Mapping[str, Any] | None],
        allow_pause: Callable[[Any], None],
        durations: Mapping[str, float],
        gpus: Callable[[], int | None],
    ) -> None:
        self.config = config
        self.log = log
        self.numnodes = _expected_nodes(config)
        self.collection: list[str] | None = None
        self._published = published
        self._allow_pause = allow_pause
        self._durations = durations
        self._ask_gpus = gpus
        self._gpus: int | None = None
        self._workers: dict[Any, Worker] = {}
        self._collections: dict[Any, list[str]] = {}
        self._queue: list[Unit] = []
        self._unit_of: dict[int, Unit] = {}

    # The protocol: questions

    @property
    def nodes(self) -> list[Any]:
        """Active nodes."""
        return list(self._workers)

    @property
    def collection_is_completed(self) -> bool:
        """True when every node that was started has collected."""
        return len(self._collections) >= self.numnodes

    @property
    def tests_finished(self) -> bool:
        """True when nothing is left to hand out or to wait for."""
        return self.collection_is_completed and not self.has_pending

    @property
    def has_pending(self) -> bool:
        """True while tests wait or run."""
        return bool(self._queue) or any(worker.todo for worker in self._workers.values())

    # The protocol: events

    def add_node(self, node: Any) -> None:
        """A worker is up."""
        self._workers[node] = Worker()

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """A worker has collected; one that replaces a dead worker must have found the same tests."""
        if self.collection is not None and list(collection) != self.collection:
            self._complain(node, collection)
            node.shutdown()
            return
        self._collections[node] = list(collection)
        self._allow_pause(node)

    def schedule(self) -> None:
        """All workers have collected, or one more has."""
        if self.collection is None:
            if not self._same_everywhere():
                return
            self._plan()
        for node in self.nodes:
            self._feed(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """A worker is through with a test, all its reruns included, or with a pause."""
        worker = self._workers[node]
        if item_index in worker.todo[: worker.sent]:
            worker.todo.remove(item_index)
            worker.sent -= 1
            self._feed(node)

    def mark_test_pending(self, item: str) -> None:
        """pytest-rerunfailures: the test that killed its worker is to be run again, with the rest of its unit."""
        assert self.collection is not None
        position = self.collection.index(item)
        unit = self._unit_of[position]
        for n, waiting in enumerate(self._queue):
            if waiting.key == unit.key:
                self._queue[n] = _with_tests(waiting, (position, *waiting.tests))
                return
        for node, worker in self._workers.items():
            if worker.unit is not None and worker.unit.key == unit.key and worker.todo and not node.shutting_down:
                worker.todo.append(position)
                self._send(node)
                return
        self._queue.insert(0, _with_tests(unit, (position,)))
        for node in self.nodes:
            self._feed(node)

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> NoReturn:
        """Answer to a steal, which we never ask for."""
        raise NotImplementedError

    def remove_node(self, node: Any) -> str | None:
        """A worker is gone. Returns the test in which it died, if any; the rest of its unit waits for another."""
        worker = self._workers.pop(node)
        rest = worker.todo[1:] if worker.sent else worker.todo
        if rest:
            self._queue.insert(0, _with_tests(self._unit_of[rest[0]], tuple(rest)))
        for other in self.nodes:
            self._feed(other)
        return self.collection[worker.todo[0]] if worker.sent and self.collection is not None else None

    # Inside

    @property
    def _pause(self) -> int:
        """Position of the item that runs nothing: workers put it behind the last test."""
        assert self.collection is not None
        return len(self.collection)

    def _plan(self) -> None:
        node = next(iter(self._collections))
        self.collection = self._collections[node]
        tests, groups = _described(self.collection, self._published(node))
        if self.config.getvalue("dist") != "loadgroup":
            groups = None
        units = make_units(tests, self._durations, groups)
        self._queue = longest_first([*(u for u in units if u.server), *_chunks(units, self.numnodes)])
        self._unit_of = {position: unit for unit in self._queue for position in unit.tests}
        if any(unit.gpus for unit in self._queue):
            self._gpus = self._ask_gpus()

    def _feed(self, node: Any) -> None:
        """Give the node its next test, or its next unit, or nothing more for ever."""
        worker = self._workers[node]
        if node.shutting_down or node not in self._collections:
            return
        if not worker.todo:
            worker.unit = None
            if not self._queue:
                node.shutdown()
                return
            others = [w.unit for w in self._workers.values() if w is not worker and w.unit is not None]
            idle = len(self._workers) - 1 - len(others)
            worker.unit = choose(self._queue, others=others, idle=idle, gpus=self._gpus)
            self._queue.remove(worker.unit)
            worker.todo = list(worker.unit.tests)
        self._send(node)

    def _send(self, node: Any) -> None:
        worker = self._workers[node]
        fresh = worker.todo[worker.sent : 2]
        if fresh:
            worker.sent += len(fresh)
            node.send_runtest_some([*fresh, self._pause] if worker.sent == len(worker.todo) else fresh)

    def _same_everywhere(self) -> bool:
        (_, first), *others = self._collections.items()
        different = [(node, collection) for node, collection in others if collection != first]
        for node, collection in different:
            self._complain(node, collection)
        return not different

    def _complain(self, node: Any, collection: Sequence[str]) -> None:
        from xdist.report import report_collection_diff

        reference, tests = next(iter(self._collections.items()))
        text = report_collection_diff(tests, collection, reference.gateway.id, node.gateway.id)
        report = pytest.CollectReport(nodeid=node.gateway.id, outcome="failed", longrepr=text, result=[])
        self.config.hook.pytest_collectreport(report=report)


def _with_tests(unit: Unit, tests: tuple[int, ...]) -> Unit:
    seconds = None if unit.seconds is None else unit.seconds * len(tests) / len(unit.tests)
    return replace(unit, tests=tests, seconds=seconds)


def _chunks(units: Sequence[Unit], nodes: int) -> list[Unit]:
    """Tests without a server, some at a time: one by one a message to the worker would cost more than a short test."""
    single = [unit for unit in units if not unit.server and len(unit.tests) == 1]
    size = max(1, min(50, len(single) // (4 * max(1, nodes))))
    chunks = [single[n : n + size] for n in range(0, len(single), size)]
    joined = [
        Unit(
            key=chunk[0].key,
            id="",
            gpus=0,
            tests=tuple(unit.tests[0] for unit in chunk),
            seconds=sum(u.seconds for u in chunk if u.seconds is not None) or None,
        )
        for chunk in chunks
    ]
    return [*(unit for unit in units if not unit.server and len(unit.tests) > 1), *joined]


def _described(
    collection: Sequence[str], published: Mapping[str, Any] | None
) -> tuple[list[PlannedTest], list[str | None] | None]:
    """The worker's description of its tests; tests are on their own when there is none that fits."""
    if published is None or len(published["of"]) != len(collection):
        return [PlannedTest(nodeid) for nodeid in collection], None
    servers = published["servers"]
    tests = [
        PlannedTest(nodeid) if key is None else PlannedTest(nodeid, key, *servers[key])
        for nodeid, key in zip(collection, published["of"], strict=True)
    ]
    return tests, list(published["groups"])


def _expected_nodes(config: pytest.Config) -> int:
    from xdist import workermanage

    parse = getattr(workermanage, "parse_tx_spec_config", None) or workermanage.parse_spec_config  # before 3.7
    return len(parse(config))
