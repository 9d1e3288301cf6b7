"""Before a test with a server is set up: may it run here? Says so by failing or skipping it, in one paragraph."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import pytest

from ..engines import uses_gpus
from ..errors import GpuserveError, ServerError, SpecError
from ..gpu import Gpu, Reading, query, visible
from ..home import expanded
from ..text import escape
from .marks import capabilities, names_an_architecture
from .state import ERROR, LACKS, PROBLEM, WANTED, State, uses_pool

if TYPE_CHECKING:
    from ..isolation.matrix import Cell
    from ..spec import ServerSpec

_READING: pytest.StashKey[Reading] = pytest.StashKey()


def check(item: pytest.Item, state: State) -> None:
    """Fail or skip the test whose set-up begins, when its marks or this machine's GPUs leave nothing else."""
    settings = state.settings
    if settings.action == "skip" and uses_pool(item):
        pytest.skip("needs a server, and --gpuserve=skip starts none")
    if problem := item.stash.get(PROBLEM, None):
        _refuse(item, SpecError(problem))
    wanted = item.stash.get(WANTED, None)
    if wanted is None:
        check_gpus(item, state)
        return
    if problem := missing_model(wanted.spec):
        _refuse(item, SpecError(problem))
    if settings.session_deadline is not None and time.monotonic() >= settings.session_deadline:
        _refuse(item, ServerError("not run: the session's deadline (--gpuserve-session-deadline) has passed."))
    if reason := missing_gpus(item, wanted.spec):
        _lacks(item, reason, state)


def check_gpus(item: pytest.Item, state: State) -> None:
    """The same for a test that wants no server of ours, or starts its own by hand: one GPU that its marks allow."""
    try:
        reason = missing_gpus(item, None) if names_an_architecture(item) else None
    except pytest.UsageError as error:
        _refuse(item, SpecError(str(error)))
    if reason:
        item.stash[LACKS] = reason
        _lacks(item, reason, state)


def _lacks(item: pytest.Item, reason: str, state: State) -> NoReturn:
    if state.settings.strict_arch:
        text = f"{reason} (failed, not skipped, because of --gpuserve-strict-arch)"
        _refuse(item, ServerError(text, verdict="infra"))
    pytest.skip(escape(reason))


def _refuse(item: pytest.Item, error: GpuserveError) -> NoReturn:
    """Fail the set-up, and have its report say of what kind the failure is: the test itself was never run."""
    item.stash[ERROR] = error
    pytest.fail(escape(str(error)), pytrace=False)


def skip_excluded(item: pytest.Item, cell: Cell) -> None:
    """Skip a cell that its matrix excludes on the architecture of this machine."""
    if cell.skip_on:
        here = {gpu.sm for gpu in visible_to(item.config, None) if gpu.sm is not None}
        if here & set(cell.skip_on):
            pytest.skip(f"excluded on sm{min(here & set(cell.skip_on))} by the matrix (exclude=, arch)")


def missing_model(spec: ServerSpec) -> str | None:
    """Why the model cannot be served: it is written as a path that leads nowhere."""
    if spec.model and spec.model.startswith(("/", "./", "../", "~")) and not expanded(spec.model).exists():
        return (
            f"the model {spec.model} does not exist. Change model= in the gpuserve mark, or override it with "
            f"--gpuserve-set model=PATH."
        )
    return None


def missing_gpus(item: pytest.Item, spec: ServerSpec | None) -> str | None:
    """Why this machine's GPUs will not do for a test, naming what was found; None when they will.

    ``spec``: of its server; None: it has none, and one GPU will do.
    """
    exact, least = capabilities(item)
    asked = bool(exact) or least is not None
    if not asked and (spec is None or not uses_gpus(spec)):
        return None
    count = spec.tp if spec is not None else 1
    units = visible_to(item.config, spec)
    if len(suitable_gpus(item, units)) >= count or not (asked or units):
        return None  # an engine without any GPU may run on CPU: that is for the engine to say
    names = [f"sm{major}{minor}" for major, minor in sorted(exact)]
    names += [f"sm{least[0]}{least[1]} or later"] if least else []
    kind = f" of compute capability {' or '.join(names)}" if names else ""
    return f"needs {count} GPU{'s' if count > 1 else ''}{kind}; found {_found(item.config, units)}"


def suitable_gpus(item: pytest.Item | None, units: Sequence[Gpu]) -> list[Gpu]:
    """Those of ``units`` that the ``sm`` marks of a test allow."""
    exact, least = capabilities(item) if item is not None else (frozenset(), None)
    if not exact and least is None:
        return list(units)
    return [
        g for g in units if g.capability and (g.capability in exact or (least is not None and g.capability >= least))
    ]


def visible_to(config: pytest.Config, spec: ServerSpec | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, that of the server's own environment if it has one."""
    own = dict(spec.env) if spec is not None else {}
    return visible(reading(config).gpus, own.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")))


def reading(config: pytest.Config) -> Reading:
    """What NVML said of this machine, asked once a session."""
    if _READING not in config.stash:
        config.stash[_READING] = query(20.0)  # without nvidia-persistenced the driver sets up every GPU first
    return config.stash[_READING]


def _found(config: pytest.Config, units: Sequence[Gpu]) -> str:
    if not units:
        problem = reading(config).problem
        return f"none ({problem.rstrip('.')})" if problem else "none (see CUDA_VISIBLE_DEVICES)"
    kinds = Counter((gpu.name or "GPU", gpu.sm) for gpu in units)
    return ", ".join(
        f"{count} x {name} (sm{sm if sm is not None else ' unknown'})" for (name, sm), count in kinds.items()
    )
