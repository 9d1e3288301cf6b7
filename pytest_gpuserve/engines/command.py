"""Any program that serves HTTP: the spec's command, with ``{port}``, ``{host}``, ``{model}``, ``{tp}`` filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import EngineError, SpecError
from ..spec import Scalar, ServerSpec
from .arguments import local_path
from .base import PAGE_ASKED, Launch, LogGrammar, ProcessRole, ReadyProbe
from .titles import common_role

_NEVER = re.compile(rb"(?!)")
_PLACEHOLDER = re.compile(r"\{\{(?P<escaped>[A-Za-z_]\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


class Command:
    """Knows nothing of the program but its command line and the path that answers 200 when it is ready."""

    name = "command"
    uses_gpus = False
    axes: Mapping[str, Sequence[str]] = {}
    grammar = LogGrammar(rank=_NEVER, rules=(), heartbeats=(PAGE_ASKED,), anchors=(PAGE_ASKED,))

    def launch(self, spec: ServerSpec, *, host: str, port: int, python: str) -> Launch:
        """The template, filled in. ``args`` are appended as flags.

        Raises:
            SpecError: there is no command or it never says {port}, a placeholder is unknown, or {model} is used without
                a model.
            EngineError: the spec has axes, which only known engines can express.
        """
        if not spec.command:
            raise SpecError(
                'engine "command" needs a command: add command=["python", "-m", "my_server", "--port", "{port}"] to '
                "the gpuserve mark."
            )
        if spec.axes:
            raise EngineError(
                f'engine "command" does not know what {spec.axes[0][0]} means: say it in the command itself, with '
                f"args or with env, and take the axis out of the mark."
            )
        if not any("{port}" in word.replace("{{port}}", "") for word in spec.command):
            raise SpecError(
                f"the command {list(spec.command)!r} never says {{port}}: each start has a port of its own, and the "
                'server must listen there. Put {port} where it takes its port: "--port", "{port}", or, for an '
                'environment variable, "env", "PORT={port}" in front.'
            )
        model = local_path(spec.model, "model", spec) if spec.model else None
        values = {"port": port, "host": host, "model": model, "tp": spec.tp, "python": python}
        argv = [_fill(word, values) for word in spec.command]
        return Launch((*argv, *(word for pair in spec.args for word in _flag(*pair))))

    def ready(self, spec: ServerSpec) -> ReadyProbe:
        path = spec.ready or "/health"
        return ReadyProbe(path if path.startswith("/") else f"/{path}")

    def served_model(self, spec: ServerSpec) -> str:
        return spec.model or ""

    def process_role(self, cmdline: Sequence[str], comm: str) -> ProcessRole | None:
        """Titles are the engines' business; compilers and helpers look alike everywhere."""
        return common_role(cmdline, comm)

    def own_timeout(self, launch: Launch) -> float | None:
        return None


def _fill(word: str, values: Mapping[str, object]) -> str:
    """Fill in ``{name}``; ``{{name}}`` is ``{name}``, and every other brace (JSON) stays what it is.

    Raises:
        SpecError: the name is none of ours, or has no value.
    """

    def value(match: re.Match[str]) -> str:
        if name := match["escaped"]:
            return "{" + name + "}"
        name = match["name"]
        if name not in values:
            known = ", ".join("{" + key + "}" for key in values)
            raise SpecError(
                f"command: {word!r} has the unknown placeholder {{{name}}}. Known: {known}; write {{{{{name}}}}} for "
                f"{{{name}}} itself."
            )
        if values[name] is None:
            raise SpecError(f"command: {word!r} needs a model: add model= to the gpuserve mark.")
        return str(values[name])

    return _PLACEHOLDER.sub(value, word)


def _flag(name: str, value: Scalar) -> tuple[str, ...]:
    flag = name if name.startswith("-") else "--" + name.replace("_", "-")
    if value is False:
        return ()
    return (flag,) if value is None or value is True else (flag, str(value))


ENGINE = Command()
