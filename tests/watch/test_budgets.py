"""Windows: by phase, by what a person sets, by what was learned, never above half of the engine's own timeout."""

from __future__ import annotations

import json
import threading

import pytest

from pytest_gpuserve.vocabulary import PHASES
from pytest_gpuserve.watch import budgets
from pytest_gpuserve.watch.budgets import BUSY, FACTOR, FIRST_REQUEST, WINDOWS, Budgets, learn, learned


def test_every_phase_has_a_window():
    assert set(WINDOWS) == set(PHASES)
    assert all(Budgets().window(phase) == WINDOWS[phase] for phase in PHASES)
    assert Budgets().window(None) == WINDOWS["spawn"]


def test_a_person_sets_all_or_single_phases():
    found = Budgets.from_settings({"window": 12, "phases": {"weight_load": 300}})
    assert (found.window("serving"), found.window("weight_load")) == (12.0, 300.0)
    assert Budgets.from_settings({"phases": {"compile": 5}}).window("kv_cache") == WINDOWS["kv_cache"]


def test_the_first_request_and_spinning_have_more_time():
    found = Budgets()
    assert found.window("serving", first_request=True) == FIRST_REQUEST > found.window("serving")
    assert found.window("kv_cache", busy=True) == WINDOWS["kv_cache"] * BUSY
    assert Budgets.from_settings({"window": 10}).window("serving", first_request=True) == 20.0
    assert Budgets.from_settings({"window": 10, "first_request": 90}).window("serving", first_request=True) == 90.0
    assert Budgets.from_settings({"window": 10, "busy": 3}).window("serving", busy=True) == 30.0


def test_half_of_the_engines_own_timeout_is_the_most():
    found = Budgets.from_settings({"window": 500}, own_timeout=300.0)
    assert found.window("serving") == found.window("serving", busy=True, first_request=True) == 150.0
    assert Budgets.from_settings({"window": 500}).window("serving") == 500.0


@pytest.mark.parametrize(
    "settings",
    [{"window": 0}, {"window": -1}, {"window": "x"}, {"phases": {"lunch": 5}}, {"size": 3}, {"busy": float("inf")}],
)
def test_what_cannot_be_is_refused(settings):
    with pytest.raises(ValueError, match=r"budget|phase|could not convert"):
        Budgets.from_settings(settings)


def test_learned_stillness_moves_the_window_but_not_a_fixed_one():
    slow, quick = {"weight_load": 60.0}, {"weight_load": 2.0}
    usual = WINDOWS["weight_load"]
    assert Budgets(seen=slow).window("weight_load") == 60.0 * FACTOR
    assert Budgets(seen=quick).window("weight_load") == usual / 2, "never below half of the usual window"
    fixed = Budgets.from_settings({"phases": {"weight_load": 40}}, seen=slow)
    assert fixed.window("weight_load") == 40.0


def test_what_is_learned_is_kept_and_fades(tmp_path):
    learn(tmp_path, "k", {"compile": 40.0, "spawn": 3.0})
    assert learned(tmp_path, "k") == {"compile": 40.0, "spawn": 3.0}
    learn(tmp_path, "k", {"compile": 10.0})
    assert learned(tmp_path, "k")["compile"] == pytest.approx(36.0)
    learn(tmp_path, "other", {"spawn": 1.0})
    assert learned(tmp_path, "k")["spawn"] == pytest.approx(2.7)
    assert learned(tmp_path, "nobody") == {}


def test_a_damaged_cache_is_no_error(tmp_path):
    for text in ("", "{", "[]", '{"schema": "x"}', json.dumps({"schema": "gpuserve.stillness/1", "servers": {"k": 5}})):
        (tmp_path / "stillness.json").write_text(text)
        assert learned(tmp_path, "k") == {}
    learn(tmp_path, "k", {"spawn": 1.0})
    assert learned(tmp_path, "k") == {"spawn": 1.0}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    learn(tmp_path / "file" / "below", "k", {"spawn": 1.0})


def test_many_may_learn_at_once(tmp_path):
    threads = [threading.Thread(target=learn, args=(tmp_path, f"k{n}", {"spawn": float(n + 1)})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [learned(tmp_path, f"k{n}")["spawn"] for n in range(8)] == [float(n + 1) for n in range(8)]


def test_the_key_depends_on_what_decides_the_time():
    one = budgets.key("sglang", "/m/a", 8)
    assert one == budgets.key("sglang", "/m/a", 8)
    assert (
        len({one, budgets.key("vllm", "/m/a", 8), budgets.key("sglang", "/m/b", 8), budgets.key("sglang", "/m/a", 4)})
        == 4
    )
    assert "/m/a" not in one


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("GPUSERVE_CACHE", str(tmp_path / "c"))
    assert budgets.cache_directory() == tmp_path / "c"
    monkeypatch.delenv("GPUSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert budgets.cache_directory() == tmp_path / "gpuserve"
