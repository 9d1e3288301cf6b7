"""Which flags an installed engine takes: asked from the interpreter that will run it, once per install, and kept."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import EngineError
from ..home import unfit, xdg
from ..spec import ServerSpec
from ..text import escape, one_line

HELP_LIMIT: Final = 300.0
"""Seconds that ``--help`` may take: it imports torch, from a cold disk perhaps."""

_PROBE_LIMIT: Final = 60.0
_SCHEMA: Final = 1

_PROBE = r"""
import hashlib, importlib.metadata as metadata, importlib.util, json, os, sys
name, patterns, script = sys.argv[1], sys.argv[2].split(), sys.argv[3] == "script"
if script:
    sys.path[:] = [part for part in sys.path if part]
spec = importlib.util.find_spec(name)
if spec is None or spec.origin is None or not spec.submodule_search_locations:
    print(json.dumps(None))
    raise SystemExit
root = list(spec.submodule_search_locations)[0]
try:
    version = metadata.version(name)
except metadata.PackageNotFoundError:
    owners = metadata.packages_distributions().get(name)
    version = metadata.version(owners[0]) if owners else "unknown"
digest = hashlib.sha256()
for pattern in patterns:
    folder, wanted = os.path.split(os.path.join(root, pattern))
    for entry in sorted(os.scandir(folder), key=lambda e: e.name) if os.path.isdir(folder) else ():
        if entry.name == wanted or wanted == "*.py" and entry.name.endswith(".py"):
            digest.update(f"{entry.name} {entry.stat().st_size} {entry.stat().st_mtime_ns}".encode())
print(json.dumps({"version": version, "root": root, "sources": digest.hexdigest()}))
"""

_OPTION = re.compile(r"^ {2}(-\S.*?)(?: {2,}(\S.*))?$")
_CHOICES = re.compile(r"\{([^{}]*)\}|\[((?:'[^']*'(?:, ?)?)+)\]")


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of a command line.

    Attributes:
        names: every spelling, as ``--help`` lists them.
        choices: the legal values; empty when any value is.
        value: it takes a value. many: it takes several.
        text: the help text.
    """

    names: tuple[str, ...]
    choices: tuple[str, ...] = ()
    value: bool = False
    many: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class Install:
    """An engine as installed for one interpreter: ``root`` is its package directory, ``flags`` maps each spelling."""

    engine: str
    version: str
    root: str
    flags: Mapping[str, Flag]

    @property
    def name(self) -> str:
        return f"{self.engine} {self.version}"

    def has(self, *names: str) -> bool:
        """True when every one of these is a flag, in full."""
        return all(name in self.flags for name in names)

    def choices(self, name: str) -> tuple[str, ...]:
        """Legal values of a flag; empty when it is not there or takes anything."""
        flag = self.flags.get(name)
        return flag.choices if flag else ()

    def source(self, *candidates: str) -> str:
        """Text of the first of these files of the package that exists, or ""."""
        for candidate in candidates:
            with contextlib.suppress(OSError, ValueError):
                return (Path(self.root) / candidate).read_text(errors="replace")
        return ""


def parse_help(text: str) -> dict[str, Flag]:
    """Flags of an argparse help text, by every spelling."""
    flags: dict[str, Flag] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = _OPTION.match(line)
        if not found:
            continue
        spelled = _CHOICES.sub(lambda m: m.group().replace(", ", ","), found.group(1))
        parts = spelled.split(", ")
        names = tuple(part.split()[0] for part in parts if part.startswith("-"))
        value = parts[-1].partition(" ")[2].strip()
        text_lines = [found.group(2) or ""]
        for more in lines[number + 1 :]:
            if not more.startswith(" " * 10):
                break
            text_lines.append(more.strip())
        choices = _CHOICES.search(spelled)
        listed = (choices.group(1) or choices.group(2).replace("'", "")).split(",") if choices else []
        flag = Flag(
            names=names,
            choices=tuple(choice.strip() for choice in listed if choice.strip()),
            value=bool(value),
            many=" ..." in value,
            text=" ".join(part for part in text_lines if part),
        )
        for name in names:
            flags.setdefault(name, flag)
    return flags


def installed(
    engine: str,
    spec: ServerSpec,
    python: str,
    help_argv: Sequence[str],
    *,
    sources: Sequence[str],
    must_have: str,
    script: bool = False,
    limit: float = HELP_LIMIT,
) -> Install:
    """Version and flags of ``engine`` (its import name) for ``python``, in the spec's environment and directory.

    ``help_argv`` prints the help; ``sources`` are the files of the package (``folder/name.py`` or ``folder/*.py``) that
    decide what it prints; ``must_have`` is a flag that a complete help lists.

    Raises:
        EngineError: no such interpreter, the engine is not installed for it, or its help could not be read.
    """
    env = {**os.environ, **dict(spec.env), "NO_COLOR": "1", "COLUMNS": "4000"}  # argparse wraps at COLUMNS
    facts = _facts(engine, spec, python, sources, script)
    if facts is None:
        raise EngineError(
            f"{engine} is not installed for {python}. Install it there, or name the interpreter that has it: "
            f'python="…" in the gpuserve mark, or --gpuserve-python.'
        )
    key = hashlib.sha256(
        json.dumps([_SCHEMA, engine, os.path.realpath(python), list(help_argv), facts], sort_keys=True).encode()
    ).hexdigest()[:24]
    directory = cache_root() / "flags"
    directory.mkdir(mode=0o700, exist_ok=True)
    kept = directory / f"{engine}-{key}.json"
    with _locked(directory / f"{engine}-{key}.lock", limit):
        flags = _load(kept)
        if flags is None:
            text = ask(help_argv, env, spec.cwd, limit, engine, python)
            flags = parse_help(text)
            if must_have not in flags:
                raise EngineError(
                    f"the help of {engine} {facts['version']} for {python} does not list {must_have}, so its flags are "
                    f"unknown. Run it by hand: {' '.join(help_argv)}"
                )
            _save(kept, flags)
    return Install(engine=engine, version=str(facts["version"]), root=str(facts["root"]), flags=flags)


def version_of(engine: str, spec: ServerSpec, python: str) -> tuple[str, str] | None:
    """Version and folder of an engine (its import name) for ``python``; None when it is not installed.

    Raises:
        EngineError: the interpreter cannot be run.
    """
    facts = _facts(engine, spec, python, (), False)
    return (str(facts["version"]), str(facts["root"])) if facts is not None else None


def _facts(engine: str, spec: ServerSpec, python: str, sources: Sequence[str], script: bool) -> dict[str, Any] | None:
    env = {**os.environ, **dict(spec.env)}
    argv = [python, "-c", _PROBE, engine, " ".join(sources), "script" if script else "module"]
    facts = last_json(ask(argv, env, spec.cwd, _PROBE_LIMIT, engine, python), python)
    return facts if isinstance(facts, dict) else None


def last_json(output: str, python: str) -> Any:
    """What an interpreter printed last; site hooks may have printed before. None when it printed nothing.

    Raises:
        EngineError: it is no JSON, so that was no Python.
    """
    last = "".join(output.strip().splitlines()[-1:])
    try:
        return json.loads(last) if last else None
    except ValueError:
        raise EngineError(
            f"{python} does not answer as a Python interpreter does: it printed {one_line(last, 100)!r}. Correct "
            f"python= in the gpuserve mark or --gpuserve-python."
        ) from None


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/gpuserve`` or ``~/.cache/gpuserve``, or a private one in the temporary directory, made 0700.
    One that is another user's, a link, or writable by others is passed over, and its mode stays."""
    base = xdg("XDG_CACHE_HOME", "~/.cache")
    for root in (base / "gpuserve", Path(tempfile.gettempdir()) / f"gpuserve-cache-{os.getuid()}"):
        if not root.is_absolute():
            continue  # nobody knows the home directory
        with contextlib.suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if unfit(root) is None:
                return root
    raise EngineError(
        f"no directory can be written for what gpuserve learns of engines: neither {base}/gpuserve nor one in "
        f"{tempfile.gettempdir()}. Set XDG_CACHE_HOME to a directory of your own."
    )


def ask(argv: Sequence[str], env: Mapping[str, str], cwd: str | None, limit: float, engine: str, python: str) -> str:
    """Standard output of a program, which gets a session of its own and is killed with all of it at the limit."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:  # a ValueError: NUL, or text that no file name can be
            why = error.strerror if isinstance(error, OSError) else one_line(str(error), 100)
            raise EngineError(
                f"cannot run {escape(python)}: {why}. Correct python= in the gpuserve mark or --gpuserve-python."
            ) from None
        try:
            code = child.wait(limit)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # not reaped yet: the group is ours
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise EngineError(
                f"{engine} did not tell its flags within {limit:g} s. Run this by hand, an import may hang: "
                f"{' '.join(argv) if len(argv) < 8 and '-c' not in argv else python}"
            ) from None
        out.seek(0)
        err.seek(max(0, err.seek(0, os.SEEK_END) - 4096))
        if code:
            tail = [line for line in err.read().decode(errors="replace").splitlines() if line.strip()][-1:]
            said = one_line("".join(tail), 300).rstrip(".")
            raise EngineError(
                f"{engine} could not tell its flags: {python} exited with code {code}{': ' + said if said else ''}. "
                f"Its server would not start either; mend the installation, or name another interpreter with python=."
            )
        return out.read().decode(errors="replace")


@contextlib.contextmanager
def _locked(path: Path, limit: float) -> Iterator[None]:
    """Others on this machine wait for one answer instead of asking too; past the limit they ask for themselves."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + limit
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        yield
    finally:
        os.close(file)


def _load(path: Path) -> dict[str, Flag] | None:
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())["flags"]
        flags = [
            Flag(
                names=tuple(map(str, entry["names"])),
                choices=tuple(map(str, entry["choices"])),
                value=bool(entry["value"]),
                many=bool(entry["many"]),
                text=str(entry["text"]),
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {name: flag for flag in flags for name in flag.names} or None


def _save(path: Path, flags: Mapping[str, Flag]) -> None:
    unique = {id(flag): flag for flag in flags.values()}.values()
    entries = [
        {"names": f.names, "choices": f.choices, "value": f.value, "many": f.many, "text": f.text} for f in unique
    ]
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        json.dump({"flags": entries}, file)
    Path(file.name).replace(path)
