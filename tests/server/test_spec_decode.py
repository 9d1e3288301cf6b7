"""Speculative decoding by the counters of either engine, old and new; the closed loop; greedy parity."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_gpuserve.engines import get_engine
from pytest_gpuserve.errors import DegradedError, ServerError, SpecError
from pytest_gpuserve.server import greedy, throughput
from pytest_gpuserve.server.greedy import Greedy
from pytest_gpuserve.server.handle import Server
from pytest_gpuserve.server.lifecycle import Limits, start
from pytest_gpuserve.server.paths import session_directory
from pytest_gpuserve.server.prometheus import parse_metrics
from pytest_gpuserve.server.spec_decode import SpecDecode, from_server_info, read
from pytest_gpuserve.spec import ServerSpec

RECORDED = Path(__file__).parent.parent / "data" / "metrics"


def recorded(name: str) -> SpecDecode:
    return read(parse_metrics((RECORDED / name).read_text()))


def text(**values: float) -> SpecDecode:
    """Figures from samples: ``vllm__generation_tokens_total=5``."""
    lines = (f'{name.replace("__", ":")}{{engine="0"}} {value}' for name, value in values.items())
    return read(parse_metrics("\n".join(lines)))


# ---- vLLM


def vllm(drafts: float, drafted: float, accepted: float, generated: float = 0.0) -> SpecDecode:
    return text(
        vllm__spec_decode_num_drafts_total=drafts,
        vllm__spec_decode_num_draft_tokens_total=drafted,
        vllm__spec_decode_num_accepted_tokens_total=accepted,
        vllm__spec_decode_num_accepted_tokens_per_pos_total=accepted,
        vllm__spec_decode_num_accepted_tokens_created=1.8e9,
        vllm__generation_tokens_total=generated,
    )


def test_vllm_over_its_life_and_over_a_window() -> None:
    before, after = vllm(900, 2700, 1270), vllm(1000, 3000, 1300)
    assert before.accept_rate == pytest.approx(0.470, abs=0.001)
    assert before.accept_length == pytest.approx(2.41, abs=0.005)
    window = after - before
    assert (window.accept_rate, window.accept_length) == (pytest.approx(0.1), pytest.approx(1.3))
    assert str(window) == "accept rate 0.10, accept length 1.30, 30 of 300 drafted tokens accepted"


def test_nothing_accepted_is_useless_and_nothing_drafted_is_unknown() -> None:
    window = vllm(20, 60, 5) - vllm(10, 30, 5)
    assert (window.accept_rate, window.accept_length, window.useless) == (0.0, 1.0, True)
    idle = vllm(10, 30, 5) - vllm(10, 30, 5)
    assert (idle.accept_rate, idle.accept_length, idle.useless) == (None, None, False)
    assert not (vllm(20, 60, 6) - vllm(10, 30, 5)).useless


def test_engines_of_several_data_parallel_groups_are_added() -> None:
    lines = [
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"}} {value}'
        for name, value in (("drafts", 10), ("draft_tokens", 30), ("accepted_tokens", 15))
        for engine in "01"
    ]
    found = read(parse_metrics("\n".join(lines)))
    assert (found.drafts, found.accept_rate, found.accept_length) == (20, 0.5, 2.5)


def test_vllm_before_v1_counts_emitted_tokens() -> None:
    found = text(
        vllm__spec_decode_num_accepted_tokens_total=40,
        vllm__spec_decode_num_draft_tokens_total=100,
        vllm__spec_decode_num_emitted_tokens_total=60,
        vllm__spec_decode_draft_acceptance_rate=0.9,
    )
    assert (found.accept_rate, found.accept_length) == (0.4, 3.0)
    assert text(vllm__spec_decode_draft_acceptance_rate=0.25).accept_rate == 0.25


# ---- SGLang


def test_sglang_counters_count_the_first_token_of_a_request_apart() -> None:
    def sglang(requests: int, verified: int, generated: int) -> SpecDecode:
        return text(
            sglang__num_requests_total=requests,
            sglang__e2e_request_latency_seconds_count=requests,
            sglang__spec_verify_calls_total=verified,
            sglang__generation_tokens_total=generated,
            sglang__spec_num_draft_tokens=4,
            sglang__spec_accept_rate=0.99,
            sglang__spec_accept_length=3.9,
        )

    before = sglang(1, 0, 1)
    window = sglang(3, 20, 53) - before  # 52 tokens: 2 by prompts, 50 by 20 verifications
    assert (window.accept_length, window.accept_rate) == (2.5, 0.5)
    assert (sglang(3, 20, 23) - before).useless
    assert not (sglang(3, 20, 24) - before).useless


def test_the_verify_counter_appears_with_the_first_verification() -> None:
    before = text(sglang__generation_tokens_total=1, sglang__num_requests_total=1)
    after = text(
        sglang__generation_tokens_total=12,
        sglang__num_requests_total=2,
        sglang__spec_verify_calls_total=5,
        sglang__spec_num_draft_tokens=3,
    )
    assert before.source == "none"
    assert ((after - before).accept_length, (after - before).accept_rate) == (2.0, 0.5)


def test_the_width_of_a_draft_may_come_from_the_spec() -> None:
    samples = parse_metrics(
        "sglang:generation_tokens_total 21\nsglang:num_requests_total 1\nsglang:spec_verify_calls_total 10\n"
    )
    assert read(samples).accept_rate is None
    assert read(samples, 4).accept_rate == 0.25
    assert read(samples).accept_length == 2.0


def test_gauges_of_sglang_0_5_12_as_recorded() -> None:
    found = recorded("sglang-0.5.12-eagle3.txt")
    assert (found.source, found.accept_length) == ("gauges", 1.025)
    assert found.accept_rate == pytest.approx(0.00833, abs=1e-5)
    assert (found - found).accept_rate is None  # no token between them
    assert (found - SpecDecode("gauges", generated=70.0)).accept_rate == found.accept_rate


@pytest.mark.parametrize("name", ["sglang-0.5.23-base.txt", "vllm-0.32-base.txt"])
def test_a_base_server_has_no_figures_and_that_is_no_error(name: str) -> None:
    found = recorded(name)
    assert (found.accept_rate, found.accept_length, found.useless) == (None, None, False)
    assert str(found - found) == "no figures of speculative decoding"


def test_server_info_without_metrics() -> None:
    info = {"internal_states": [{"avg_spec_accept_length": 2.5}], "speculative_num_draft_tokens": 4}
    found = from_server_info(info)
    assert (found.accept_length, found.accept_rate) == (2.5, 0.5)
    for strange in (None, [], {}, {"internal_states": [{"avg_spec_accept_length": None}]}, {"internal_states": {}}):
        assert from_server_info(strange).source == "none"


# ---- parity, pure


def answer(words: str, gap: float = 2.0, prompt: str = "p", second: str = " zz") -> Greedy:
    tokens = tuple(re.findall(r" \S+", words))
    return Greedy(prompt, words, tokens, tuple({t: -0.1, second: -0.1 - gap, " qq": -9.0} for t in tokens))


def test_equal_texts_have_parity() -> None:
    assert greedy.check([answer(" a b")], [Greedy("p", " a b")], "srv") == []


def test_a_difference_where_the_base_was_sure_fails_with_its_place() -> None:
    with pytest.raises(
        DegradedError, match=r"after 2 equal tokens of 'p' the base says ' c' \(top-2 logprob gap 2\.000"
    ) as e:
        greedy.check([answer(" a b c d")], [answer(" a b zz d")], "srv")
    assert "' zz'" in str(e.value)
    assert "srv does not say what its base says" in str(e.value)


def test_a_tie_is_noted() -> None:
    (noted,) = greedy.check([answer(" a b c", gap=0.05)], [Greedy("p", " a zz e")], "srv")
    assert (noted.position, noted.expected, noted.got, noted.tie) == (1, " b", " zz", True)
    with pytest.raises(DegradedError, match=r"epsilon 0\.01"):
        greedy.check([answer(" a b c", gap=0.05)], [Greedy("p", " a zz e")], "srv", epsilon=0.01)


def test_a_token_that_was_third_is_no_tie_of_the_first_two() -> None:
    with pytest.raises(DegradedError, match=r"gap 8\.900"):
        greedy.check([answer(" a b", gap=0.05)], [Greedy("p", " a qq")], "srv")


def test_an_end_that_comes_early_is_judged_by_the_two_most_likely() -> None:
    assert greedy.check([answer(" a b", gap=0.05)], [Greedy("p", " a")], "srv")[0].got == ""
    with pytest.raises(DegradedError, match="after 1 equal tokens"):
        greedy.check([answer(" a b")], [Greedy("p", " a")], "srv")


def test_without_logprobs_a_difference_cannot_be_excused() -> None:
    with pytest.raises(DegradedError, match=r"no logprobs to tell.*So do 1 more of 3 prompts"):
        greedy.check(
            [Greedy("p", "ab"), Greedy("q", "ab"), Greedy("r", "x")],
            [Greedy("p", "ac"), Greedy("q", "b"), Greedy("r", "x")],
            "srv",
        )


def test_prompts_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="same prompts"):
        greedy.check([Greedy("p", "a")], [Greedy("q", "a")], "srv")


def test_outputs_survive_a_file() -> None:
    one = answer(" a b")
    assert Greedy.from_json(json.loads(json.dumps(one.to_json()))) == one


# ---- live, with the embedded engine


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def flavor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sim(flavor: str) -> Iterator[Callable[..., Server]]:
    """Starts the embedded engine; keywords are those of a spec."""
    servers: list[Server] = []

    def launch(**values: Any) -> Server:
        args = {"flavor": flavor, "quiet": True, **values.pop("args", {})}
        servers.append(
            start(
                ServerSpec.from_mapping({"engine": "sim", "args": args, **values}),
                get_engine("sim"),
                parent=session_directory(),
                limits=Limits(startup=60, grace=0.5, dump=10),
                incident=lambda directory, reason: [],
            )
        )
        return servers[-1]

    yield launch
    for server in servers:
        server.stop(0.0)


def test_figures_of_a_server_that_speculates(sim: Callable[..., Server]) -> None:
    server = sim(tp=2, spec_decode={"eagle3": {"accept_rate": 0.25, "num_steps": 4}}, args={"step_seconds": 0.002})
    before = server.spec_decode
    found = server.throughput(concurrency=3, seconds=0.5, max_tokens=101)
    assert found.spec_decode.accept_rate == pytest.approx(0.25, abs=0.03)
    assert found.spec_decode.accept_length == pytest.approx(2.0, abs=0.1)
    assert (server.spec_decode - before).accept_length == pytest.approx(2.0, abs=0.1)
    assert found.tokens == 101 * found.requests
    assert found.requests >= 3
    assert found.seconds >= 0.5
    assert found.tokens_per_s == pytest.approx(found.tokens / found.seconds)
    assert re.match(r"\d+ tok/s with 3 clients \(\d+ tokens in .* s\); accept rate 0\.2", str(found))
    phases = server.assert_phase("weight_load", max_s=60)
    assert sorted(phases) == ["TP0", "TP1"]
    with pytest.raises(DegradedError, match=r"weight_load of sim-tp2-eagle3 took .* \(limit -1 s\)"):
        server.assert_phase("weight_load", max_s=-1)


def test_parity_of_base_and_speculation_and_of_another_model(sim: Callable[..., Server]) -> None:
    base, spec = sim(), sim(spec_decode={"eagle3": {"accept_rate": 0.0}})
    outputs = base.greedy(["a", "the second prompt"], max_tokens=12)
    assert [len(one.tokens) for one in outputs] == [12, 12]
    assert all("".join(one.tokens) == one.text for one in outputs)
    assert all(
        max(top.values()) == top[token] for one in outputs for token, top in zip(one.tokens, one.top, strict=True)
    )
    measured = spec.throughput(concurrency=1, seconds=0.1, max_tokens=20)
    assert measured.spec_decode.useless
    assert measured.spec_decode.accept_rate == 0.0
    assert spec.assert_parity(outputs, max_tokens=12) == []
    assert base.spec_decode.source == "none"
    other = sim(args={"model_path": "sim/other", "served_model_name": base.model})
    gaps = [d.gap for d in greedy.differences(outputs, other.greedy([one.prompt for one in outputs], 12))]
    assert all(gap is not None and gap > 0 for gap in gaps)
    assert len(gaps) == 2
    assert len(other.assert_parity(outputs, max_tokens=12, epsilon=100)) == 2
    with pytest.raises(DegradedError, match="So do 1 more of 2 prompts"):
        other.assert_parity(outputs, max_tokens=12, epsilon=0)


def test_what_cannot_be_measured_is_said(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.spec_decode == SpecDecode()
    with pytest.raises(ServerError, match="throughput cannot be measured"):
        server.throughput(seconds=0.1)
    with pytest.raises(ServerError, match="without a text"):
        server.greedy(["a"])
    with pytest.raises(SpecError, match="concurrency=0"):
        throughput.measure(server, concurrency=0)
