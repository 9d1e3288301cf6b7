"""Mutation testing of the algorithms that decide: which small changes of the code does no test notice?

    python benchmarks/mutants.py [FILE...] [--jobs N] [--sample N] [--again FILE] [--seed 1] [--json FILE]

Default: those of TESTS (who is stuck where, the search, the conclusion), each against the tests of its own. Each is
one change in a copy of the package: a comparison turned round or made strict, ``and`` for ``or``, a condition negated,
a number one larger, an operator exchanged, a statement left out; types, which nothing reads at run time, stay. Prints
the survivors; each is to be killed by a test, or, where it changes nothing that can be seen, explained in ``EQUAL``
below. Exit code 1 when there are others.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
STACKS = (
    "tests/diagnose/test_merge.py",
    "tests/diagnose/test_verdict.py",
    "tests/diagnose/test_signatures.py",
    "tests/diagnose/test_evidence.py",
    "tests/diagnose/test_mechanism.py",
    "tests/diagnose/test_pastes.py",
)
TESTS = {
    "diagnose/merge.py": STACKS,
    "diagnose/telling.py": STACKS,
    "diagnose/conduct.py": (*STACKS, "tests/diagnose/test_conduct.py"),
    "isolation/search.py": ("tests/isolation/test_search.py",),
    "isolation/conclude.py": ("tests/isolation/test_conclude.py",),
}
NEVER_JUST = "a probability, a rate, a time or a cost is never just that number"
BOUND = "a bound of work, one more or less"
TIE = "either of two that are worth the same"
EQUAL: dict[str, dict[str, str]] = {
    "diagnose/conduct.py": {
        "seconds <= 0.2  ->  seconds < 0.2": NEVER_JUST,
        "used <= STILL  ->  used < STILL": NEVER_JUST,
        "(growth(dumps, 'cpu_seconds') or 0.0) <= STILL  ->  (growth(dumps, 'cpu_seconds') or 0.0) < STILL": NEVER_JUST,
    },
    "diagnose/merge.py": {
        "True  ->  False   in: members = _whole_paths([_member(dumps, label) for dumps, label in "
        "zip(classed, names, strict=True)])": "they are equally long",
        "0  ->  1   in: frames, found, same, leaf = ((), None, 0, None)": "one round is not frozen either",
    },
    "isolation/search.py": {
        "20  ->  21": BOUND,
        "8  ->  9": BOUND,
        "state.belief.posterior().weight.get(mask_of(deltas), 0.0) >= _LIKELY  ->  "
        "state.belief.posterior().weight.get(mask_of(deltas), 0.0) > _LIKELY": NEVER_JUST,
        "(belief := state.belief.posterior()).weight[belief.best] < enough  ->  "
        "(belief := state.belief.posterior()).weight[belief.best] <= enough": NEVER_JUST,
        "belief.weight[mask] >= max(_SURE, state.confidence)  ->  "
        "belief.weight[mask] > max(_SURE, state.confidence)": NEVER_JUST,
        "low + 1  ->  low - 1   in: first, last = (low + 1, high - 1)": "what passed is never most uncertain",
        "high - low  ->  high + low   in: longest = min(half, high - low - half // 2)": (
            "as many launches for 5 to 23 deltas"
        ),
        "0  ->  1   in: if min(state.left(), state.left('verify')) <= 0:": BOUND,
        "other <= rest  ->  other < rest   in: if any((other <= rest for other in state.sets[1:])):": (
            "two deltas are missing in what was found without an earlier one"
        ),
    },
    "isolation/conclude.py": {
        "20000  ->  20001": BOUND,
        "best.probability < LIKELY  ->  best.probability <= LIKELY": NEVER_JUST,
        "best.probability < SURE  ->  best.probability <= SURE": NEVER_JUST,
        "best.probability >= SURE  ->  best.probability > SURE": NEVER_JUST,
        "best.rate < 0.9  ->  best.rate <= 0.9": NEVER_JUST,
        "w.probability > 0.05  ->  w.probability >= 0.05": NEVER_JUST,
        "12  ->  13": BOUND,
        "information > 0.02  ->  information >= 0.02": NEVER_JUST,
        "2  ->  3   in: if key not in rated or entry[:2] > rated[key][:2]:": TIE,
        "entry[:2] > rated[key][:2]  ->  entry[:2] >= rated[key][:2]": TIE,
        "True  ->  False   in: values = dict(zip(posterior.axes, world, strict=True))": "they are equally long",
    },
}
"""Changes by file that make no difference, wherever they are in it, and why."""
COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


def run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a tree in the order of ast.walk, less decorators, which make values frozen and the like."""
    decorators = (one for node in ast.walk(tree) for one in getattr(node, "decorator_list", ()))
    left = {id(inner) for one in decorators for inner in ast.walk(one)}
    return (node for node in ast.walk(tree) if id(node) not in left)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that may stand in the place of this one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS.get(type(node.ops[0]), ()):
            yield ast.Compare(node.left, [other()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, (ast.If, ast.IfExp)):
        changed = copy.copy(node)
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield changed
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def parsed(source: str) -> ast.Module:
    """Without types of arguments, results and variables."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.copy_location(ast.Constant("object"), node.annotation)
    return tree


class Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.old:
            return ast.copy_location(self.new, node)
        return super().visit(node)


def statements(tree: ast.AST) -> dict[int, str]:
    """First line of the innermost statement around each node, by id."""
    found = {}
    for statement in ast.walk(tree):  # outer ones first
        if isinstance(statement, ast.stmt):
            text = ast.unparse(statement).splitlines()[0]
            found.update({id(inner): text for inner in ast.walk(statement)})
    return found


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Line, what was changed (and in which statement), and the whole changed source."""
    tree = parsed(source)
    texts = statements(tree)
    around = [texts.get(id(node), "") for node in run_time(tree) for _ in changes(node)]
    for wanted, statement in enumerate(around):
        tree = parsed(source)  # anew: a change shares nodes with what it replaces
        number = 0
        for node in list(run_time(tree)):
            for new in changes(node):
                if number == wanted:
                    before = ast.unparse(node).splitlines()[0]
                    after = ast.unparse(ast.fix_missing_locations(ast.copy_location(new, node))).splitlines()[0]
                    whole = ast.unparse(ast.fix_missing_locations(Replace(node, new).visit(tree)))
                    where = "" if before in (statement, statement.removesuffix(":")) else f"   in: {statement}"
                    yield getattr(node, "lineno", 0), f"{before}  ->  {after}{where}", whole
                number += 1


def noticed(copy_of: Path, tests: tuple[str, ...], limit: float) -> bool:
    """Whether a test fails, or none ends in time."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(copy_of), "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # half of the time
    try:
        done = subprocess.run(words, cwd=copy_of, env=env, capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def copied(place: Path) -> Path:
    """A copy of the package and its tests."""
    for part in ("pytest_gpuserve", "tests", "benchmarks"):
        shutil.copytree(ROOT / part, place / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / file, place / file)
    return place


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", default=list(TESTS), help="below pytest_gpuserve/")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each file; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one mutant")
    parser.add_argument("--again", type=Path, metavar="FILE", help="only what survived in an earlier --json FILE")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dice, tried, survivors, equal = random.Random(options.seed), 0, list[str](), 0
    survived = json.loads(options.again.read_text())["survivors"] if options.again else []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        free = queue.SimpleQueue[Path]()
        for number in range(options.jobs):
            free.put(copied(Path(name) / str(number)))

        def lives(file: str, changed: str) -> bool:
            place = free.get()
            target = place / "pytest_gpuserve" / file
            source = target.read_text()
            try:
                target.write_text(changed)
                return not noticed(place, TESTS[file], options.limit)
            finally:
                target.write_text(source)
                free.put(place)

        for file in options.files:
            source = (ROOT / "pytest_gpuserve" / file).read_text()
            if not lives(file, source):
                print(f"the tests of {file} fail without a change")
                return 2
            found = list(mutants(source))
            if options.again:
                found = [one for one in found if any(text.endswith(one[1]) for text in survived)]
            chosen = sorted(dice.sample(found, min(options.sample or len(found), len(found))))
            tried += len(chosen)
            with ThreadPoolExecutor(options.jobs) as pool:
                results = pool.map(partial(lives, file), (changed for *_, changed in chosen))
                for (line, what, _), alive in zip(chosen, results, strict=True):
                    if alive and not {what, what.partition("   in: ")[0]}.isdisjoint(EQUAL.get(file, {})):
                        equal += 1
                    elif alive:
                        survivors.append(f"{file}:{line}: {what}")
                        print(survivors[-1], flush=True)
            print(f"{file}: {len(chosen)} of {len(found)} mutants tried", flush=True)
    print(f"{tried} mutants, {equal} make no difference, {len(survivors)} survived")
    if options.json:
        options.json.write_text(json.dumps({"tried": tried, "equal": equal, "survivors": survivors}, indent=1) + "\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
