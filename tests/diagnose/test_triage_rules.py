"""The data behind triage: every rule does what its example says, and none is written for one report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_gpuserve.diagnose.literals import Words, required
from pytest_gpuserve.diagnose.triage_rules import DEPTHS, load

RULES = load()
NAMED = (*RULES.noise, *RULES.signs, *RULES.causes, *RULES.fallbacks, *RULES.last_words)


@pytest.mark.parametrize("rule", NAMED, ids=lambda rule: rule.name)
def test_every_rule_matches_its_example(rule):
    assert rule.pattern.search(rule.example)


def test_names_are_unique():
    names = [rule.name for rule in NAMED]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("rule", RULES.causes, ids=lambda rule: rule.name)
def test_a_cause_is_classified_by_its_own_rule_and_is_no_noise(rule):
    assert RULES.classify(rule.example) is rule
    assert RULES.noise_in(rule.example) is None
    assert RULES.sign_in(rule.example) is None
    assert rule.depth in DEPTHS


@pytest.mark.parametrize("rule", RULES.noise, ids=lambda rule: rule.name)
def test_noise_is_found_through_the_index(rule):
    assert RULES.noise_in(rule.example) is rule
    assert rule.text
    assert rule.since


@pytest.mark.parametrize("rule", RULES.signs, ids=lambda rule: rule.name)
def test_signs_are_found_through_the_index(rule):
    assert RULES.sign_in(rule.example) is rule


@pytest.mark.parametrize("rule", RULES.fallbacks, ids=lambda rule: rule.name)
def test_fallbacks_are_found_through_the_index(rule):
    assert rule in RULES.fallbacks_in(rule.example)


@pytest.mark.parametrize("rule", [*RULES.signs, *RULES.fallbacks, *(r for r in RULES.causes if r.anywhere)])
def test_the_gate_lets_through_what_counts_anywhere(rule):
    assert RULES.gate.any_in(rule.example.lower().encode())


def test_advice_gives_way_to_a_cause_in_the_same_line():
    advice = "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    assert RULES.noise_in(advice).name == "generic_advice"
    assert RULES.noise_in(f"Worker failed: CUDA out of memory. Tried to allocate 2 GiB. {advice}") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "No symmetric memory multicast: not supported, symmetric memory multicast is not supported on this device",
            "capability_notice",
        ),
        ("RuntimeError: symmetric memory multicast is not supported on this device", None),
        ("chunked prefill is not supported for this model, disabled", "feature_follows_from_another"),
        ("NotImplementedError: chunked prefill is not supported for this model", None),
        ("KeyError: '/psm_1f0b1c2d'", "resource_tracker"),
        ("vllm.exceptions.VLLMValidationError: temperature must be non-negative, got -1.", "request_level"),
    ],
)
def test_an_exception_is_no_notice_unless_a_rule_says_so(text, name):
    rule = RULES.noise_in(text)
    assert (rule and rule.name) == name


def test_no_rule_holds_a_number_of_a_report():
    """A process number, a time, a size or an issue: what only one log can have."""
    for rule in NAMED:
        assert not re.search(r"(?<![\\\w{,\[-])\d{4,}", rule.pattern.pattern), rule.name


def test_no_rule_is_one_reported_line():
    """Patterns are shapes: none may be a sentence of more than sixty letters that stands in one reported case only."""
    cases = Path(__file__).parents[1] / "data" / "cases" / "cases.json"
    lines = [line for case in json.loads(cases.read_text()) for line in case["log"].splitlines()]
    for rule in NAMED:
        for part in rule.pattern.pattern.split("|"):
            plain = part.replace("\\", "")
            assert not (len(plain) > 60 and sum(plain in line for line in lines) == 1), (rule.name, part)


@pytest.mark.parametrize(
    ("name", "message", "file", "about"),
    [
        ("ValueError", "Please set --tp-size to 8", "/x/sglang/srt/models/llama.py", True),
        ("AssertionError", "", "/x/sglang/srt/server_args.py", True),
        ("KeyError", "'rope'", "/x/vllm/config/model.py", True),
        ("ValueError", "page size must be one of 1, 16", "/x/vllm/v1/worker/gpu_worker.py", True),
        ("ValueError", "block must be positive", "/x/sglang/srt/layers/attention/triton_ops/extend.py", False),
        ("RuntimeError", "please set the flag", "/x/vllm/v1/worker/gpu_worker.py", False),
        ("AttributeError", "'NoneType' object has no attribute 'x'", "/x/sglang/srt/models/llama.py", False),
    ],
)
def test_what_concerns_a_setting(name, message, file, about):
    assert RULES.setting.concerns(name, message, file) is about


@pytest.mark.parametrize(
    "text",
    [
        "Detected a model on Blackwell, using the triton kernel to avoid a SIGSEGV of another one.",
        "kill_process_tree: 2 process(es) still alive after 5.0s SIGKILL; continuing to wait",
        "If exit code is unusual, a common cause is the OS OOM killer",
        "Port 28500 is already in use, trying port 28501",
        "NVFP4 requires compute capability >= 10.0; serving this checkpoint weight-only instead.",
    ],
)
def test_lines_that_only_mention_a_failure_are_not_fatal(text):
    rule = RULES.classify(text)
    assert RULES.noise_in(text) or rule is None or not rule.fatal


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("abc", ("abc",)),
        ("a?bcd", ("bcd",)),
        ("(?:foo|barbaz) qux", (" qux",)),
        (r"\bAborted \(core dumped\)", ("aborted (core dumped)",)),
        ("(?i:Hello)|World", ("hello", "world")),
        ("foo(?!bar)baz", ("foobaz",)),
        ("a{0,3}bcd", ("bcd",)),
        ("(?:a|b)", ()),
        ("(?:worker|rank)?died", ("died",)),
        ("[Ff]ailed", ("ailed",)),
        (r"\d+ [^x]* left", (" left",)),
        (".*", ()),
    ],
)
def test_texts_that_a_pattern_requires(pattern, texts):
    assert required(pattern) == texts


def test_required_prefers_the_given_words():
    assert required("(?:scheduler|worker) \\w+ died", ["died"]) == (" died",)
    assert required("extraordinarily (?:dead|died)", ["dead", "died"]) == ("dead", "died")


def test_words_are_found_all_at_once():
    words = Words(["fail", "failed", "timed out", "kill"])
    assert words.words == {"fail", "timed out", "kill"}
    assert words.any_in(b"it has failed")
    assert not words.any_in(b"all is well")
    assert words.all_in("killed, failed, timed out") == {"kill", "fail", "timed out"}
    assert not Words(()).any_in(b"anything")
