"""What must not leave the machine, by name and by shape. Data and predicates; redact.py applies them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SECRET_WORDS = _set(
    "password passwd passphrase secret secrets credential credentials apikey accesskey secretkey privatekey "
    "authorization auth token jwt bearer"
)
_HARMLESS_KEYS = _set(
    "public cache hash primary foreign sort partition row lookup store dict map group routing sharding shortcut"
)
"""``cache_key`` is no secret, ``API_KEY`` and ``OPENAI_KEY`` are."""
_HARMLESS_TOKENS = _set(
    "eos bos pad unk sep cls mask image audio video vision speech next first last per special stop draft start end "
    "begin fim think tool user system assistant prompt output input new max min num total one each this decode "
    "prefill extra added cached thinking"
)
"""``eos_token='</s>'`` is no secret, ``hf_token`` is."""
_PLACES = _set("file path dir directory sock socket name url uri id ids type mode header env variable")

SECRET_NAME_HINT = r"pass|secret|credential|token|key|auth|pwd|jwt|bearer|signature|\bsig\b"
"""Every secret's name has one of these; a cheap first look for the pattern that finds names."""

TOKEN_SHAPES = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"
    r"|sk-(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{8,}|nvapi-[A-Za-z0-9_-]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}"
    r"|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|npm_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_-]{30,}|dckr_pat_[A-Za-z0-9_-]{16,}"
    r"|hooks\.slack\.com/(?:services|workflows)/[A-Za-z0-9_/-]{8,}|discord(?:app)?\.com/api/webhooks/[A-Za-z0-9_/-]{8,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)?"
    r")"
)
"""Credentials known by their looks: Hugging Face, OpenAI and the like, NVIDIA, GitHub, GitLab, AWS, Google ..."""

PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)

PROMPT_NAMES = (
    "prompt|prompts|text|input_text|output_text|decoded_text|content|reasoning_content|messages|input_value|completion"
    "|input_ids|output_ids|token_ids|prompt_token_ids|output_token_ids|new_token_ids|cached_token_ids|fill_ids"
    "|origin_input_ids|origin_input_ids_unpadded|origin_input_text|input_embeds|prompt_embeds|prompt_logprobs|tokens"
)
"""Names under which SGLang and vLLM log requests (--log-requests) and print them in errors."""

_PUBLIC_HOSTS = _set(
    "github.com githubusercontent.com github.io huggingface.co hf.co pypi.org pythonhosted.org python.org pytorch.org "
    "nvidia.com readthedocs.io vllm.ai sglang.ai sglang.io lmsys.org docker.com docker.io ghcr.io quay.io "
    "pydantic.dev numpy.org scipy.org json-schema.org w3.org kernel.org gnu.org wikipedia.org arxiv.org medium.com "
    "example.com example.org schemas.openxmlformats.org llvm.org triton-lang.org ray.io kubernetes.io anyscale.com "
    "tiangolo.com"
)
"""Hosts that tell nothing of anybody: documentation, issue trackers, registries."""

ENVIRONMENT_NAMES = re.compile(
    r"(CUDA|NVIDIA|NCCL|RCCL|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|VLLM|SGLANG|SGL|FLASHINFER|TRITON|GLOO|NVSHMEM|UCX"
    r"|TRTLLM|TLLM|HF_HUB|TRANSFORMERS|TOKENIZERS|OMP|MKL|OPENBLAS|KMP|HIP|ROCR|ROCM|HSA|GPUSERVE|PYTEST_XDIST|RAY"
    r"|SAFETENSORS|DG|TVM|CUTLASS|XDG_CACHE|LC)_[A-Z0-9_]*"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON[A-Z]*|LANG|TZ|CI|TMPDIR|HF_HOME|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE"
    r"|MASTER_PORT|VIRTUAL_ENV|CONDA_PREFIX|GPU_MAX_HW_QUEUES|MAX_JOBS"
)
"""Variables whose values help to understand a failure and are shown; of all others not even the name is."""

COMMON_HOST_NAMES = _set(
    "localhost server worker main master test tests docker runner host linux ubuntu debian fedora node model python "
    "pytest gpu gpuserve engine scheduler build builder local home desktop laptop"
)
"""Names of machines that are also words of any log: not worth a replacement."""


def words_of(name: str) -> list[str]:
    """``X-Api-Key``, ``apiKey``, ``--api-key``, ``API_KEY`` -> api, key."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return re.split(r"[^a-z0-9]+", spaced.lower().strip("-_. \"'"))


def is_secret_name(name: str) -> bool:
    """True for names of options, fields and variables that hold a credential."""
    words = [w for w in words_of(name) if w]
    if not words or words[-1] in _PLACES:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in _HARMLESS_TOKENS
    if words[-1] == "key":
        return bool(before) and before not in _HARMLESS_KEYS
    if words[-1] == "keys":
        return before in ("api", "access", "secret", "private", "auth")
    if words[-1] == "pwd":
        return bool(before)
    if words[-1] == "signature":
        return before in ("amz", "goog")
    return words[-1] in _SECRET_WORDS or bool(_SECRET_WORDS - {"auth", "token", "bearer"} & set(words))


def is_secret(name: str, value: str) -> bool:
    """True where the name alone does not tell: ``PWD=/a/directory``, ``pwd=a-password``."""
    return is_secret_name(name) or (words_of(name) == ["pwd"] and not value.startswith(("/", "~", "$", ".", "\\")))


_HARMLESS = re.compile(
    r"None|null|nil|[Tt]rue|[Ff]alse|EMPTY|-?\d{1,5}(?:\.\d+)?|[*x.]+|<?(?i:redacted|hidden|masked)>?|<[a-z]+-[\w: ]+>|"
)


_NO_KEY = re.compile(
    r"sglang|vllm|llama|openai|gpuserve|pytest|python|engine|server|scheduler|worker|localhost|default"
    r"|(?:local|dummy)[-_]key|no[-_]key|not[-_]needed",
    re.IGNORECASE,
)
"""What is written where no key is needed, and names that every log is full of."""


def is_harmless_value(value: str) -> bool:
    """True for values that are none: switches, small numbers, masks, our own placeholders."""
    return _HARMLESS.fullmatch(value) is not None


def is_telling(value: str) -> bool:
    """True for a value that may be taken out wherever it occurs, though nobody said that it is to be a credential:
    plain words would stain everything."""
    return len(value) >= 6 and not is_harmless_value(value) and not re.fullmatch(r"[a-z]+|[A-Z][a-z]*|[A-Z]+", value)


def _stains(value: str) -> bool:
    return _NO_KEY.fullmatch(value) is not None or is_own_address(value) is True


def known_secrets(environments: Iterable[Mapping[str, str]], argv: Iterable[str] = ()) -> set[str]:
    """Values that are credentials by the name of their variable, or by the option before them in ``argv``.

    Short values, loopback addresses and what people write where no key is needed (``OPENAI_API_KEY=sglang``) are left
    out: they would stain everything.
    """
    pairs = [pair for environment in environments for pair in environment.items()]
    option = ""
    for word in argv:
        name, equals, value = word.partition("=")
        if option:
            pairs.append((option, word))
            option = ""
        elif name.startswith("-") and is_secret_name(name):
            if equals:
                pairs.append((name, value))
            else:
                option = name
    return {v for name, v in pairs if len(v) >= 6 and is_secret_name(name) and not (is_harmless_value(v) or _stains(v))}


def is_own_address(text: str) -> bool | None:
    """True for loopback and "any" addresses, False for others, None when it is no address."""
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    return address.is_loopback or address.is_unspecified or str(address).startswith("255.")


_NO_HOSTS = _set("str int bool float cpu cuda memory device auto default unset unknown any all none")


def is_public_host(host: str) -> bool:
    """True for what may be named as a host: loopback names, the public ones above, and words that name none."""
    host = host.lower().rstrip(".")
    if host in _NO_HOSTS or host in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    return any(host == public or host.endswith("." + public) for public in _PUBLIC_HOSTS)
