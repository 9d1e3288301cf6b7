"""Launches of ``gpuserve isolate``'s search on planted minimal failing sets, against three textbook algorithms.

``python benchmarks/isolate_search.py [--seeds 200] [--rates 0.5]``. Search launches count against the floor
log2 C(n, k); calibration and verification are counted apart. The rivals get the repro rate for nothing: they repeat
every question r times and take any failure for the answer.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from pytest_gpuserve.isolation.search import Question, search

N = 12


def simulate(k: int, q: float, f: float, seed: int, budget: int) -> tuple[bool, bool, int, int, int]:
    """(right, verified, search launches, verification, calibration)."""
    rng = random.Random(f"{k} {q} {f} {seed}")
    planted = frozenset(rng.sample(range(N), k))
    run = search([1.0] * N, budget=budget, others=False)
    question: Question = next(run)
    while True:
        failed = rng.random() < (q if planted <= question.deltas else f)
        try:
            question = run.send("fail" if failed else "pass")
        except StopIteration as stop:
            found = stop.value
            right = found.sets[:1] == (planted,)
            return (
                right,
                found.status == "found",
                found.launches("search"),
                found.launches("verify"),
                found.launches("calibrate"),
            )


def one(job: tuple[int, float, float, int, int]) -> tuple[bool, bool, int, int, int]:
    return simulate(*job)


Ask = Callable[[frozenset[int]], bool]


def one_factor_off(ask: Ask) -> set[int]:
    return {i for i in range(N) if not ask(frozenset(range(N)) - {i})}


def ddmin(ask: Ask) -> set[int]:
    """Zeller and Hildebrandt 2002, section 3."""
    left, parts = list(range(N)), 2
    while len(left) >= 2:
        chunks = [left[i * len(left) // parts : (i + 1) * len(left) // parts] for i in range(parts)]
        smaller = next((chunk for chunk in chunks if ask(frozenset(chunk))), None)
        if smaller is not None:
            left, parts = smaller, 2
            continue
        rests = ([x for x in left if x not in chunk] for chunk in chunks)
        rest = next((rest for rest in rests if ask(frozenset(rest))), None) if parts > 2 else None
        if rest is not None:
            left, parts = rest, max(parts - 1, 2)
        elif parts >= len(left):
            break
        else:
            parts = min(len(left), 2 * parts)
    return set(left)


def quickxplain(ask: Ask) -> set[int]:
    """Junker 2004."""

    def explain(base: list[int], added: list[int], rest: list[int]) -> list[int]:
        if added and ask(frozenset(base)):
            return []
        if len(rest) == 1:
            return rest
        left, right = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        second = explain([*base, *left], left, right)
        return [*explain([*base, *second], second, left), *second]

    return set(explain([], [], list(range(N))))


RIVALS: dict[str, Callable[[Ask], set[int]]] = {
    "one-factor-off": one_factor_off,
    "ddmin": ddmin,
    "QuickXplain": quickxplain,
}


def rival(name: str, k: int, q: float, f: float, seed: int) -> tuple[bool, int]:
    rng = random.Random(f"{k} {q} {f} {seed}")
    planted = frozenset(rng.sample(range(N), k))
    repeats = 1 if q == 1 else math.ceil(math.log(0.03) / math.log(1 - q))
    launches, known = 0, {}

    def ask(deltas: frozenset[int]) -> bool:
        nonlocal launches
        if deltas not in known:
            known[deltas] = False
            for _ in range(repeats):
                launches += 1
                if rng.random() < (q if planted <= deltas else f):
                    known[deltas] = True
                    break
        return known[deltas]

    return RIVALS[name](ask) == planted, launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--budget", type=int, default=60)
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 0.8, 0.5])
    parser.add_argument("--alarms", type=float, nargs="*", default=[0.0, 0.02])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    print(
        "| repro | false alarms | k | floor | search launches | x floor | verify | calibrate | right | verified "
        "| one-factor-off | ddmin | QuickXplain |"
    )
    print("|" + "---:|" * 13)
    begin = time.monotonic()
    with ProcessPoolExecutor(given.jobs) as pool:
        for q in given.rates:
            for f in given.alarms:
                for k in given.sizes:
                    jobs = [(k, q, f, seed, given.budget) for seed in range(given.seeds)]
                    results = list(pool.map(one, jobs, chunksize=4))
                    count = len(results)
                    floor = math.log2(math.comb(N, k))
                    mean = [sum(r[i] for r in results) / count for i in range(5)]
                    others = []
                    for name in RIVALS:
                        runs = [rival(name, k, q, f, seed) for seed in range(given.seeds)]
                        right = sum(ok for ok, _ in runs) / count
                        others.append(f"{sum(n for _, n in runs) / count:.1f} ({right:.0%})")
                    print(
                        f"| {q:g} | {f:g} | {k} | {floor:.2f} | {mean[2]:.1f} | {mean[2] / floor:.2f} | {mean[3]:.1f} "
                        f"| {mean[4]:.1f} | {mean[0]:.1%} | {mean[1]:.1%} | {' | '.join(others)} |",
                        flush=True,
                    )
    print(f"\n{given.seeds} seeds a row, n = {N}, budget {given.budget}; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
