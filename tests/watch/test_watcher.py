"""Hangs that the watcher calls, and what it leaves alone: servers with real processes, up to the supervisor."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from pytest_gpuserve.watch.budgets import key, learned


def test_a_hung_start_is_handed_to_the_supervisor_which_ends_the_server(scene, scenes):
    scene.watch()
    scene.serve(fault="sleep@cuda_graph:rank=1", background=True)
    (told,) = scenes.until(scene.incidents)
    directory, reason, after = told
    assert Path(directory).parent == scene.session
    assert reason == "no_progress"
    assert 3.0 <= float(after) < 15.0
    seen = scenes.read(Path(directory) / "progress.json")
    assert (seen["state"], seen["phase"]) == ("hung", "cuda_graph")
    assert seen["still"] >= seen["window"] == 3.0
    assert len(seen["history"]) > 5
    kept = [json.loads(line) for line in (Path(directory) / "samples.jsonl").read_text().splitlines()]
    assert {"moving", "suspect", "hung"} <= {entry["state"] for entry in kept}
    assert any({"TP0", "TP1"} <= set(entry["cpu"]) for entry in kept)
    scene.threads[0].join(60)
    assert not scene.threads[0].is_alive(), "the start ends when its server is ended"
    assert "hung: nothing moved" in (scene.session / "watcher.log").read_text()


def test_a_healthy_server_is_spared_and_looked_at_again(scene, scenes):
    scene.watch(exit_code=75, window=2.0)
    scene.serve(fault="sleep@cuda_graph:rank=1", background=True)
    scenes.until(lambda: len(scene.incidents()) >= 2)
    first, second = (float(told[2]) for told in scene.incidents()[:2])
    assert second >= first * 1.8, "after it was spared it has twice the time"
    (directory,) = {told[0] for told in scene.incidents()}
    events = (Path(directory) / "events.jsonl").read_text()
    assert '"spared"' in events
    assert '"killing"' not in events


def test_a_slow_start_and_an_idle_server_are_left_alone_and_taught_from(scene, scenes):
    scene.watch(window=2.0)
    server = scene.serve(cold_compile=3.0, jit_cache="cold", load_seconds=2.0)
    scenes.until(lambda: any(p.get("state") == "idle" for p in scene.progress()))
    time.sleep(3)
    assert scene.incidents() == []
    assert server.post("/v1/completions", json={"model": server.model, "prompt": "x", "max_tokens": 4}).ok
    assert learned(scene.cache, key("sim", server.record.spec.model, 2))


def test_a_hang_while_serving_is_caught_though_health_says_200(scene, scenes):
    scene.watch(window=3.0)
    server = scene.serve(fault="wedge@serving")
    results = []
    thread = threading.Thread(target=scenes.post, args=(server, results))
    thread.start()
    scene.threads.append(thread)
    assert server.get("/health").status_code == 200
    (told,) = scenes.until(scene.incidents)
    assert told[1] == "no_progress"
    kept = [json.loads(line) for line in (Path(told[0]) / "samples.jsonl").read_text().splitlines()]
    assert "requests began" in [entry.get("text") for entry in kept]
    thread.join(60)
    assert "ServerHungError" in type(results[0]).__name__


def test_new_servers_are_noticed_and_every_one_is_watched(scene, scenes):
    scene.watch(window=3.0)
    scene.serve()
    scene.serve(fault="sleep@kv_cache:rank=0", background=True)
    scenes.until(scene.incidents)
    time.sleep(1)
    (told,) = scene.incidents()
    assert scenes.read(Path(told[0]) / "progress.json")["state"] == "hung"
    assert len(scene.progress()) == 2
