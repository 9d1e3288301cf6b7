"""A server's command line, taken apart: what the model needs, and what can be taken away. Pure.

``env NAME=VALUE… PROGRAM… --flag value…`` becomes a base and deltas (:func:`split`); a choice of deltas becomes a
command line again (:meth:`Parts.command`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import PurePath

from .. import shell
from ..engines.features import Feature, Features, Remedy
from ..errors import SpecError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_NUMBER = re.compile(r"-\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Option:
    """One flag with its values as the user wrote them; ``glued``: ``--flag=value``."""

    flag: str
    values: tuple[str, ...] = ()
    glued: bool = False

    def words(self) -> tuple[str, ...]:
        if self.glued:
            return (f"{self.flag}={self.values[0]}",)
        return (self.flag, *self.values)


@dataclass(frozen=True, slots=True)
class Delta:
    """Something that can be taken away.

    Attributes:
        options, env: what is there when it is on.
        off, off_env: what is there when it is off.
        parts: smaller deltas of which it consists, where some can go without the others; ``core`` is what is left.
    """

    name: str
    options: tuple[Option, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    off: tuple[Option, ...] = ()
    weight: float = 1.0
    core: tuple[Option, ...] = ()
    parts: tuple[Delta, ...] = ()

    def text(self) -> str:
        """What it adds, for people."""
        if self.env or self.options:
            return shell.line([w for o in self.options for w in o.words()], self.env)
        return f"without {shell.line([w for o in self.off for w in o.words()])} (the engine does it unasked)"


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to run: ``argv`` with ``{port}`` and ``{host}`` left open, and what to add to the environment."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()

    def at(self, host: str, port: str) -> Command:
        """With the open places filled in."""

        def filled(word: str) -> str:
            return word.replace("{port}", port).replace("{host}", host)

        return Command(tuple(map(filled, self.argv)), tuple((name, filled(value)) for name, value in self.env))


@dataclass(frozen=True, slots=True)
class Parts:
    """A command line, taken apart."""

    program: tuple[str, ...]
    base: tuple[Option, ...]
    base_env: tuple[tuple[str, str], ...]
    deltas: tuple[Delta, ...]
    remedies: tuple[Remedy, ...]
    features: Features
    model: str | None
    tp: int
    port: str | None = None
    host: str | None = None
    port_added: bool = False

    def typed(self, command: Command) -> Command:
        """A command as the user would type it, with the port and host that were given."""
        return command.at(self.host or "127.0.0.1", self.port or "30000")

    def command(self, on: Iterable[int], remedy: Remedy | None = None, cold: str = "") -> Command:
        """The command line with these deltas on and all others off."""
        chosen = frozenset(on)
        options = list(self.base)
        env = dict(self.base_env)
        for number, delta in enumerate(self.deltas):
            options += delta.options if number in chosen else delta.off
            env.update(delta.env if number in chosen else ())
        if remedy is not None:
            added = parse_options(remedy.words)
            options = [option for option in options if option.flag not in {o.flag for o in added}] + added
            env.update((name, value.replace("{cold}", cold)) for name, value in remedy.env)
        words = [word for option in _joined(options) for word in option.words()]
        return Command((*self.program, *words), tuple(sorted(env.items())))

    def refined(self, number: int, others: Collection[int]) -> Parts | None:
        """A smaller problem: the other deltas of a failing set are base now, the parts of this one are the deltas.

        None when it has no parts.
        """
        delta = self.deltas[number]
        if not delta.parts:
            return None
        options, env = [*self.base, *delta.core], dict(self.base_env)
        for n, other in enumerate(self.deltas):
            if n != number:
                options += other.options if n in others else other.off
                env.update(other.env if n in others else ())
        return replace(self, base=tuple(options), base_env=tuple(sorted(env.items())), deltas=delta.parts)


def split(words: Sequence[str], features: Features) -> Parts:
    """Take a command line apart.

    Raises:
        SpecError: there is no program in it, or it says its port in a way that cannot be replaced.
    """
    env, rest = environment(words)
    program, options = _program(rest)
    if not program:
        raise SpecError(
            "there is no command after --. Write the server's command line as you start it, for example: "
            "gpuserve isolate -- python -m sglang.launch_server --model-path M --tp-size 2 --attention-backend triton"
        )
    tp = _tp(options, features)
    model = _value(options, features.served) or _value(options, features.model) or _positional_model(program)
    base: list[Option] = []
    base_env: list[tuple[str, str]] = []
    members: dict[str, list[Option]] = {}
    variables: dict[str, list[tuple[str, str]]] = {}
    known = {feature.name: feature for feature in features.features}
    placed = _with_port(options, features, (*program, *(value for _, value in env)))
    for option in placed:
        if _matches(option.flag, features.base) or any(map(_is_open, option.words())):
            base.append(option)
        else:
            members.setdefault(_owner(option.flag, features.features, "flags") or option.flag, []).append(option)
    for variable, value in env:
        if _matches(variable, features.base_env) or _is_open(value):
            base_env.append((variable, value))
        else:
            owner = _owner(variable, features.features, "env")
            variables.setdefault(owner or variable, []).append((variable, value))
    deltas: list[Delta] = []
    for name in dict.fromkeys((*members, *variables, *known)):
        feature = known.get(name, Feature(name))
        own, own_env = tuple(members.get(name, ())), tuple(variables.get(name, ()))
        off = tuple(parse_options(feature.off))
        if feature.parallel and tp < 2 and not own and not own_env:
            continue
        if off and all(_same(o, own) for o in off):
            base += own  # the user has it off already
            base_env += own_env
        elif own or own_env or off:
            deltas.append(_delta(feature, own, own_env, off))
    remedies = [r for r in features.remedies if tp > 1 or not r.parallel]
    remedies = [r for r in remedies if not _in_effect(r, base, base_env)]
    return Parts(
        program=tuple(program),
        base=tuple(base),
        base_env=tuple(base_env),
        deltas=tuple(deltas),
        remedies=tuple(remedies),
        features=features,
        model=model,
        tp=tp,
        port=_given(options, features.port),
        host=_given(options, features.host),
        port_added=len(placed) > len(options),
    )


def ordered_remedies(parts: Parts, blamed: Collection[str]) -> list[Remedy]:
    """Those that help a blamed feature first; each once."""
    return sorted(parts.remedies, key=lambda remedy: not set(remedy.helps) & set(blamed))


def parse_options(words: Sequence[str]) -> list[Option]:
    """Flags with the words that follow each. A negative number is a value, a word before the first flag is an error."""
    found: list[Option] = []
    for word in words:
        if word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word):
            flag, equals, value = word.partition("=")
            found.append(Option(flag, (value,), True) if equals else Option(word))
        elif found and not found[-1].glued:
            found[-1] = replace(found[-1], values=(*found[-1].values, word))
        elif found:  # a positional after --flag=value
            found.append(Option(word))
        else:
            raise SpecError(f"{word!r} stands where a flag is expected.")
    return found


def environment(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The variables that a command line begins with (``env`` or not), and the command behind them."""
    rest = list(words)
    if rest and PurePath(rest[0]).name == "env" and len(rest) > 1 and _ASSIGNMENT.match(rest[1]):
        rest.pop(0)
    env = []
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        env.append((name, value))
    return env, rest


def _program(words: Sequence[str]) -> tuple[list[str], list[Option]]:
    """Everything up to the server's own first flag: an interpreter with its options, a module, sub-commands."""
    program = list(words[:1])
    at = 1
    if program and re.fullmatch(r"(python|pypy)[\d.]*", PurePath(program[0]).name):
        while at < len(words) and words[at].startswith("-"):
            program.append(words[at])
            at += 1
            if program[-1] in ("-m", "-c", "-X", "-W") and at < len(words):
                program.append(words[at])
                at += 1
                if program[-2] in ("-m", "-c"):
                    break
    while at < len(words) and not words[at].startswith("-"):
        program.append(words[at])
        at += 1
    return program, parse_options(words[at:])


def _delta(
    feature: Feature, options: tuple[Option, ...], env: tuple[tuple[str, str], ...], off: tuple[Option, ...]
) -> Delta:
    core: list[Option] = []
    loose: list[Delta] = []
    for option in options if feature.core else ():
        keys = _keys(option)
        wanted = {name.removeprefix(f"{option.flag}.") for name in feature.core if name.startswith(f"{option.flag}.")}
        if keys and wanted:
            core.append(_json(option, {key: value for key, value in keys.items() if key in wanted}))
            for key, value in keys.items():
                if key not in wanted:
                    loose.append(Delta(f"{option.flag}.{key}", (_json(option, {key: value}),)))
        elif option.flag in feature.core:
            core.append(option)
        else:
            loose.append(Delta(option.flag, (option,)))
    loose += [Delta(name, env=((name, value),)) for name, value in env if core]
    whole = not core or not loose
    return Delta(
        feature.name, options, env, off, feature.weight, () if whole else tuple(core), () if whole else tuple(loose)
    )


def _joined(options: Sequence[Option]) -> list[Option]:
    """Options of one flag whose values are JSON objects become one object: parts of a configuration."""
    found: list[Option] = []
    for option in options:
        keys = _keys(option)
        for n, earlier in enumerate(found):
            if keys is not None and earlier.flag == option.flag and (known := _keys(earlier)) is not None:
                found[n] = _json(earlier, {**known, **keys})
                break
        else:
            found.append(option)
    return found


def _keys(option: Option) -> dict[str, object] | None:
    if len(option.values) != 1 or not option.values[0].lstrip().startswith("{"):
        return None
    try:
        value = json.loads(option.values[0])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _json(option: Option, value: Mapping[str, object]) -> Option:
    return replace(option, values=(json.dumps(value),))


def _is_open(word: str) -> bool:
    """Filled in at each launch."""
    return "{port}" in word or "{host}" in word


def _with_port(options: Sequence[Option], features: Features, others: Sequence[str]) -> list[Option]:
    """The options with ``{port}`` and ``{host}`` where the user said a port and a host; a port is added where not, and
    no other word of the command says it."""
    if any("{port}" in word for word in (*others, *(w for o in options for w in o.words()))):
        return list(options)
    found = [replace(o, values=("{port}",)) if o.flag in features.port else o for o in options]
    found = [replace(o, values=("{host}",)) if o.flag in features.host else o for o in found]
    if not any(o.flag in features.port for o in found):
        found.append(Option(features.port[0], ("{port}",)))
    return found


def _tp(options: Sequence[Option], features: Features) -> int:
    value = _value(options, features.tp)
    return int(value) if value and value.isdigit() and int(value) else 1


def _value(options: Sequence[Option], flags: Collection[str]) -> str | None:
    return next((o.values[0] for o in reversed(options) if o.flag in flags and o.values), None)


def _given(options: Sequence[Option], flags: Collection[str]) -> str | None:
    """A place that the user chose; None where it is open."""
    value = _value(options, flags)
    return None if value in ("{port}", "{host}") else value


def _positional_model(program: Sequence[str]) -> str | None:
    """``vllm serve MODEL``."""
    for word, following in pairwise(program):
        if word == "serve":
            return following
    return None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _owner(name: str, features: Iterable[Feature], kind: str) -> str | None:
    return next((f.name for f in features if _matches(name, getattr(f, kind))), None)


def _same(option: Option, options: Iterable[Option]) -> bool:
    return any(option.flag == o.flag and option.values == o.values for o in options)


def _in_effect(remedy: Remedy, options: Sequence[Option], env: Sequence[tuple[str, str]]) -> bool:
    return all(_same(o, options) for o in parse_options(remedy.words)) and set(remedy.env) <= set(env)
