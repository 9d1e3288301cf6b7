"""Redaction: what goes to the artifacts directory, and what a message of ours quotes, goes through here before.

Same value, same placeholder (``<secret-1>``), so that a reader can still see that two things are the same. Better too
much than too little, but counts, versions, flags, paths below a home and loopback addresses stay: they are evidence.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

from ..home import expanded
from . import sensitive
from .values import secret_values, value_end

_MOST_PLACEHOLDERS = 1 << 16

_ENCODED = re.compile(r"%(?:3[AaDd]|22)")
_PROSE = re.compile(
    r"(?i)(?P<name>(?<![\w-])(?:"
    r"(?:password|passwd|passphrase|pwd|(?:api|access|secret)[ _-]?key)(?:[ \t]+is)?:?[ \t]+(?![/~.$])"
    r"|(?:wandb|huggingface-cli|hf[ ]auth)[ ]login(?:[ ]--?[\w-]+(?:=\S+)?){0,5}[ ]"
    r")[\"']?)(?P<value>(?=[^\s\"'<>\d]{0,64}\d)(?=[^\s\"'<>A-Za-z]{0,64}[A-Za-z])[^\s\"'<>,;]{4,127}[^\s\"'<>,;.:)])"
)
_NODE_LINE = re.compile(r"(?m)^[^\n]*(?:NCCL|socket)[^\n]*")
_NODE = re.compile(
    r"(?<![\w.<-])[A-Za-z0-9][\w.-]{2,253}(?=:\d+:\d+ \[-?\d+\] (?:\S{1,80} )?NCCL )"
    r"|(?<=[\s,\[])[A-Za-z][\w.-]{2,253}(?=<\d{3,5}>)|(?<=\s\[)[A-Za-z][\w.-]{2,253}(?=\]:\d{4,5}\b)"
)
"""Other nodes of a run: before NCCL's own lines, and as the peers of its connections and of c10d's."""
_BEARER = re.compile(r"(?i)\b(?P<scheme>bearer|basic)\s+(?P<value>[A-Za-z0-9._~+/-]{8,}=*)")
_COOKIE = re.compile(r"(?i)(?P<name>\b(?:set-)?cookie\\*[\"']?\s*[:=]\s*\\*[\"']?)(?P<value>[^\n\r\"'\\]{4,})")
_CURL_LOGIN = re.compile(r"(?P<flag>(?<!\S)(?:-u|--user)[ =])(?P<value>(?!\d+:\d+(?!\S))[^\s:]+:\S+)")
_PROMPT = re.compile(
    rf"(?<![\w.])(?P<key>{sensitive.PROMPT_NAMES})(?P<separator>\\*[\"']?\s*[:=]\s*)"
    r"(?=[bru]?\\*[\"']|[\[(]|tensor\(|array\()"
)
_URL = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{1,15}://)(?P<login>[^\s/@\"']+@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s/:?#\"'<>\\,()\[\]{}|]+)"
)
_MAIL = re.compile(r"(?<![\w.@%+-])[A-Za-z0-9._%+-]+@(?=[A-Za-z0-9-]+\.)[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b")
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w)(?!\.\d)")
_IPV6 = re.compile(
    r"(?<![\w:.])\[?(?=[0-9A-Fa-f:.]*\d)[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f.]{0,15}){2,8}(?:%\w+)?\]?(?![\w:])"
)
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_VERSION_BEFORE = re.compile(
    r"(?:[=<>~!]=|(?:version|driver|release|\bv|nccl|rccl|cudnn|cublas|cuda)[\"']?\s*[:=]?\s*[\"']?)$", re.IGNORECASE
)
_HOST_FIELD = re.compile(
    r"(?<![\w-])(?P<key>(?:--)?(?:[a-z0-9]+[_-])*(?:host|hostname|host_?ip|nodename|node_name|nodelist|addr)"
    r"(?:\\*[\"']?\s*[:=]\s*|\\*[\"'],\s*|(?<=[\w-])[ ](?<!\w\s\w)))(?P<open>\\*[\"'])?"
    r"(?P<host>[a-z0-9][a-z0-9.-]{0,253})(?=[:\\\"'\s,)\]}]|$)",
    re.IGNORECASE,
)
_INNER_HOST = re.compile(
    r"(?<![\w.@/-])(?=[a-z0-9-]*[0-9-])[a-z0-9][a-z0-9-]*(?:\.[a-z0-9-]+)*"
    r"\.(?:internal|local|lan|corp|intra|intranet|localdomain|svc|cluster|home|private)\b(?![\w(])"
    r"|\bip-\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3}(?:\.[a-z0-9-]+)*"
)
_HOME = re.compile(r"(?P<above>(?<![\w.-])(?:/[\w.-]+){0,3}/(?:home|Users)/)(?P<user>[^/\s\"':,;<>)\]}]+)")
_BREAK = r"(?:\\?\r?\n[ \t]*|\r[ \t]*)"
_NAME_AT_END = re.compile(r"(?:^|[\s\"'({\[,])(?P<key>-{0,2}[A-Za-z_][\w.-]{2,64})\\*[\"']?\s*(?P<sign>[:=,]?)\s*\\?$")
_OPEN_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?!.*-----END)", re.DOTALL)


class Redactor:
    """Replaces what must not leave the machine. One for everything that is written of an incident.

    ``known``: values that are secret wherever they occur (:meth:`of` finds them); ``home``: this user's home directory;
    ``hosts``: names of this machine.
    """

    def __init__(
        self, known: Iterable[str] = (), *, home: str | None = None, hosts: Iterable[str] | None = None
    ) -> None:
        forms = {form: value for value in known if len(value) >= 4 for form in _forms(value)}
        self._known = dict(sorted(forms.items(), key=lambda pair: len(pair[0]), reverse=True))
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._counts: dict[str, int] = {}
        self._seen: dict[str, str] = {}
        home = str(expanded("~")) if home is None else home
        self._home = re.compile(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])") if len(home.strip("/")) > 1 else None
        names = {n for n in (own_names() if hosts is None else hosts) if len(n) >= 4}
        names -= {n for n in names if n.lower() in sensitive.COMMON_HOST_NAMES}
        alternatives = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True))
        self._hosts = re.compile(rf"(?<![\w.-])(?:{alternatives})(?![\w-])", re.IGNORECASE) if names else None

    @classmethod
    def of(cls, *environments: Mapping[str, str], argv: Iterable[str] = ()) -> Redactor:
        """One that knows the secrets of these environments and of a command line."""
        argv = tuple(argv)
        texts = [*argv, *(value for environment in environments for value in environment.values())]
        inside = {text[begin:end] for text in texts for begin, end in secret_values(text)}  # JSON, NAME=VALUE, headers
        return cls(sensitive.known_secrets(environments, argv) | set(filter(sensitive.is_telling, inside)))

    def redact(self, text: str) -> str:
        """``text`` with placeholders; redacting twice changes nothing more."""
        text = self._known_values(text)
        text = self._prompts(text)
        text = sensitive.PRIVATE_KEY.sub(lambda m: self._place("secret", m[0]), text)
        text = _COOKIE.sub(lambda m: m["name"] + self._secret(m["value"]), text)
        text = _CURL_LOGIN.sub(lambda m: m["flag"] + self._secret(m["value"]), text)
        text = self._fields(text)
        if _ENCODED.search(text):
            text = re.sub(r"[^\s\"']+", self._encoded, text)
        text = _PROSE.sub(lambda m: m["name"] + self._secret(m["value"]), text)
        text = _BEARER.sub(self._bearer, text)
        text = sensitive.TOKEN_SHAPES.sub(lambda m: self._place("secret", m[0]), text)
        text = _URL.sub(self._url, text)
        text = _MAIL.sub(lambda m: self._place("address", m[0]), text)
        text = _MAC.sub(lambda m: self._place("address", m[0]), text)
        text = _IPV4.sub(self._address, text)
        text = _IPV6.sub(self._address, text)
        text = _HOST_FIELD.sub(lambda m: m["key"] + (m["open"] or "") + self._host(m["host"]), text)
        text = _NODE_LINE.sub(lambda m: _NODE.sub(self._node, m[0]), text)
        text = _INNER_HOST.sub(lambda m: self._host(m[0]), text)
        if self._hosts:
            text = self._hosts.sub(lambda m: self._host(m[0]), text)
        if self._home:
            text = self._home.sub("~", text)
        return _HOME.sub(lambda m: m["above"] + self._place("user", m["user"]), text)

    def conceal(self, error: Exception) -> None:
        """Redact what ``error`` says: its message is printed, and kept, where nobody knows what it quotes."""
        error.args = tuple(self.redact(part) if isinstance(part, str) else part for part in error.args)

    def environment(self, mapping: Mapping[str, str]) -> dict[str, str]:
        """The variables that may be shown (an allow-list), their values redacted, sorted by name."""
        return {
            name: self.value(value, name)
            for name, value in sorted(mapping.items())
            if sensitive.ENVIRONMENT_NAMES.fullmatch(name) and name != "GPUSERVE_COOKIE"
        }

    def value(self, value: Any, name: str = "") -> Any:
        """A JSON value with every string in it redacted; what stands under a secret's name is replaced whole."""
        if isinstance(value, str):
            return self._secret(value) if name and sensitive.is_secret(name, value) else self._short(value)
        if isinstance(value, Mapping):
            return {self._short(str(k)): self.value(v, str(k)) for k, v in value.items()}
        if isinstance(value, (list, tuple)):  # of a command line, the word after --api-key is the secret
            flags = [
                v if isinstance(v, str) and v.startswith("-") and sensitive.is_secret_name(v) else "" for v in value
            ]
            return [self.value(v, flag or name) for v, flag in zip(value, ["", *flags], strict=False)]
        return value

    def _short(self, text: str) -> str:
        """Names of functions and files come again and again in stacks; 30 us each would be seconds for 64 ranks."""
        if len(text) > 300:
            return self.redact(text)
        found = self._seen.get(text)
        if found is None:
            if len(self._seen) > 20_000:
                self._seen.clear()
            found = self._seen[text] = self.redact(text)
        return found

    def unfinished(self, text: str) -> bool:
        """True when what ends ``text`` may go on in the next line: a name without its value, half a secret, a list."""
        tail = text.rstrip("\r\n")
        if any(tail.endswith(known[:n]) for known in self._known for n in range(1, len(known))):
            return True
        named = _NAME_AT_END.search(tail)
        if named and (named["sign"] or named["key"].startswith("-")) and sensitive.is_secret_name(named["key"]):
            return True
        return bool(_OPEN_PRIVATE_KEY.search(text)) or any(
            value_end(text, found.end()) is None for found in _PROMPT.finditer(text)
        )

    def _place(self, kind: str, value: str) -> str:
        key = (kind, blake2b(value.encode(errors="surrogatepass"), digest_size=8).digest())
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MOST_PLACEHOLDERS:
                return f"<{kind}-more>"
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            self._numbers[key] = number
        return f"<{kind}-{number}>"

    def _secret(self, value: str) -> str:
        return value if sensitive.is_harmless_value(value) else self._place("secret", value)

    def _known_values(self, text: str) -> str:
        for form, value in self._known.items():
            if form in text:
                text = text.replace(form, self._place("secret", value))
        if self._known and ("\n" in text or "\r" in text):
            joined = re.sub(_BREAK, "", text)
            for form, value in self._known.items():
                if form in joined:  # somebody wrapped the line
                    broken = f"{_BREAK}?".join(re.escape(c) for c in form)
                    text = re.sub(broken, self._place("secret", value), text)
        return text

    def _prompts(self, text: str) -> str:
        parts: list[str] = []
        done = 0
        while found := _PROMPT.search(text, done):
            end = value_end(text, found.end())
            end = len(text) if end is None else end
            value = text[found.end() : end]
            if value.strip("bru'\"\\[]() \n"):
                place = f"{self._place('prompt', value)[:-1]}: {len(value)} characters>"
                parts += (text[done : found.end()], place)
            else:
                parts.append(text[done:end])
            done = max(end, found.end())
        return "".join(parts) + text[done:]

    def _fields(self, text: str) -> str:
        parts: list[str] = []
        done = 0
        for begin, end in secret_values(text):
            parts += (text[done:begin], self._secret(text[begin:end]))
            done = end
        return "".join(parts) + text[done:]

    def _encoded(self, found: re.Match[str]) -> str:
        """A word of a URL: ``token%3DVALUE`` is looked at as ``token=VALUE``."""
        if not _ENCODED.search(found[0]):
            return found[0]
        pieces = re.findall(r"%[0-9A-Fa-f]{2}|.", found[0])
        plain = "".join(chr(int(piece[1:], 16)) if len(piece) == 3 else piece for piece in pieces)
        for begin, end in reversed(list(secret_values(plain))):
            if not sensitive.is_harmless_value(plain[begin:end]):
                pieces[begin:end] = [self._place("secret", plain[begin:end])]
        return "".join(pieces)

    def _node(self, found: re.Match[str]) -> str:
        return found[0] if found[0].lower() in sensitive.COMMON_HOST_NAMES else self._host(found[0])

    def _bearer(self, found: re.Match[str]) -> str:
        prose = len(found["value"]) < 24 and not re.search(r"[\d=]", found["value"])
        return found[0] if prose else f"{found['scheme']} {self._secret(found['value'])}"

    def _url(self, found: re.Match[str]) -> str:
        login = (found["login"] or "")[:-1]
        if login and login != "git":
            login = self._secret(login)
        return found["scheme"] + (f"{login}@" if login else "") + self._host(found["host"])

    def _host(self, host: str) -> str:
        own = sensitive.is_own_address(host)
        if own is False:
            return self._place("address", host.strip("[]"))
        if own or sensitive.is_public_host(host) or sensitive.is_harmless_value(host) or re.match(r"\d+$|0x", host):
            return host
        return self._place("host", host.lower())

    def _address(self, found: re.Match[str]) -> str:
        text = found[0].partition("%")[0].strip("[]")
        if sensitive.is_own_address(text) is not False:
            return found[0]
        if _VERSION_BEFORE.search(found.string[max(0, found.start() - 24) : found.start()]):
            return found[0]
        return found[0].replace(text, self._place("address", text))


def shown_command(argv: Sequence[str] | str) -> str:
    """A command line, of whatever process, as people may be told it; foreign text, still to be escaped."""
    words = [argv] if isinstance(argv, str) else argv
    return Redactor.of(os.environ, argv=words).redact(" ".join(words))


def own_names() -> set[str]:
    """Names of this machine, without asking any network service."""
    name = socket.gethostname()
    return {name, name.partition(".")[0]} - {""}


def _forms(value: str) -> set[str]:
    """A secret as it may stand in a URL, in JSON, in a repr."""
    return {value, quote(value, safe=""), json.dumps(value)[1:-1], value.replace("/", "\\/"), repr(value)[1:-1]}
