"""The page of one incident: what stands on it, and that nothing foreign can act in it."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil

import pytest

from pytest_gpuserve.cli import main
from pytest_gpuserve.report.html import PageError, write_incident_page

HOSTILE = (
    "</script><script>alert(1)</script><!--\"' onload=alert(2) <img src=x> \x1b[2J\x00\u202eevil\u2066 {{ 7*7 }} &lt;"
)


def percent(text):
    assert text.endswith("%"), text
    return float(text[:-1])


@pytest.fixture
def page(scene, tmp_path, read):
    return read(write_incident_page(scene().write(tmp_path / "incident")))


def test_all_incidents_are_linked_to_where_their_page_is(scene, tmp_path, read):
    alone = scene().write(tmp_path / "incident")
    assert "all incidents" not in read(write_incident_page(alone)).words()
    (tmp_path / "index.html").write_text("the session's")
    assert "all incidents" in read(write_incident_page(alone)).words()
    assert "all incidents" not in read(write_incident_page(alone, tmp_path / "out.html")).words()


def test_the_verdict_is_on_top(page):
    said = page.words("verdict")
    assert said == "hang in cuda_graph after 40 s without progress: TP3 waits for its GPU."
    before = page.html[: page.html.index(said)]
    assert "<h2" not in before
    assert page.all("h1")
    assert "hang" in page.words()[:120]
    for words in ("to blame TP3", "what became of it ended: it was not ready", "confidence 85%"):
        assert words in page.words()
    assert "the start-up budget was over" in page.words()
    assert "out of memory: 33 of 128 GB resident" in page.words("why")


def test_phases_are_bars_and_what_has_not_ended_goes_on_to_the_end(page):
    (picture,) = page.all("svg", class_="bars")
    assert "To blame: TP3" in picture["aria-label"]
    bars = [
        (a["class"].split()[0], percent(a["x"]), percent(a["width"]))
        for a in page.all("rect")
        if "p-" in a["class"] and "x" in a
    ]
    weight = [bar for bar in bars if bar[0] == "p-weight_load" and bar[2] > 1]
    assert len(weight) == 8
    assert weight[0][1] == pytest.approx(100 * 4 / 60, abs=0.01)
    assert weight[0][2] == pytest.approx(100 * 11 / 60, abs=0.01)
    graphs = page.all("rect", class_="open")
    assert len(graphs) == 8
    assert percent(graphs[0]["x"]) + percent(graphs[0]["width"]) == pytest.approx(100, abs=0.01)
    assert len(page.all("rect", class_="guilty")) == 1
    assert len(page.all("rect", class_="row-guilty")) == 1
    assert "TP3: cuda_graph, not ended after 45 s, 3 of 24" in page.words("timeline")


def test_silence_and_the_incident_are_marked(page):
    still = page.all("rect", class_="still-mark")
    assert len(still) == 1
    assert percent(still[0]["x"]) == pytest.approx(100 * 20 / 60, abs=0.1)
    assert percent(still[0]["width"]) == pytest.approx(100 * 39 / 60, abs=0.1)
    assert "nothing moved for 39 s" in page.words("timeline")
    quiet = page.all("rect", class_="quiet")
    begins = [percent(q["x"]) for q in quiet if "%" in str(q.get("x"))]
    assert begins == pytest.approx([100 * 20 / 60] * 8, abs=0.1)
    assert {line["x1"] for line in page.all("line", class_="now")} >= {"100%"}


def test_the_same_in_words(page):
    rows = page.words("timeline")
    assert "cuda_graph not ended after 45 s, 3 of 24" in rows
    assert "+0.0 s launched" in rows


def test_curves(page):
    names = {a["id"] for a in page.all("figure", class_="chart")}
    assert names == {"gpu-memory", "gpu-busy", "gpu-power", "cpu", "host-memory"}
    assert len(page.all("path", data_name="GPU 7")) == 3
    (memory,) = [a for a in page.all("figure") if a.get("id") == "gpu-memory"]
    assert float(memory["data-scale"]) == 98 << 30
    assert "GPU 0 0 B to 75.0 GiB, at last 75.0 GiB" in page.html
    points = re.findall(r"(\d+) (\d+)", page.all("path", data_name="GPU 0")[0]["d"])
    assert points[0] == ("0", "1000")
    assert int(points[-1][1]) == 1000 - round(1000 * 75 / 98)


def test_the_tree_forks_where_ranks_part(page):
    nodes = [a["data-ranks"].split("|") for a in page.all("li", class_="node")]
    assert nodes == [
        [f"TP{n}" for n in range(8)],
        ["TP0", "TP1", "TP2", "TP4", "TP5", "TP6", "TP7"],
        ["TP3"],
    ]
    kinds = [a["class"] for a in page.all("details") if "k-" in str(a.get("class"))]
    assert kinds == ["k-waits", "k-cause"]
    said = page.words("stacks")
    shared = said.index("run_scheduler srt/scheduler.py:164")
    assert shared < said.index("all_reduce srt/comm.py:54") < said.index("synchronize torch/cuda.py:21")
    assert said.count("run_scheduler srt") == 1
    assert "waits in a collective" in said
    assert len(page.all("button", class_="stack")) == 2
    assert "TP0-2,4-7 7 ranks" in said


def test_benign_lines_are_folded_and_ranks_can_be_picked(scene, tmp_path, read):
    made = scene()
    beat = '[2026-11-29 22:29:21] INFO: 127.0.0.1:53842 - "GET /metrics HTTP/1.1" 200 OK'
    made.log += [beat, beat, "[2026-11-29 22:29:30 TP3] ERROR: it went wrong", "bare words"]
    page = read(write_incident_page(made.write(tmp_path / "incident")))
    assert len(page.all("details", class_="fold")) == 1
    assert "2 lines folded: " in page.words("log")
    assert "44 lines, 2 of them folded" in page.words("log-count")
    ranks = [a["data-r"] for a in page.all("li") if "data-r" in a]
    assert ranks.count("TP3") == 6
    assert ranks[-1] == ""
    assert list(page.all("li", class_="l-E")) == [{"data-r": "TP3", "class": "l-E"}]


def test_of_a_progress_bar_the_last_state_is_shown(scene, tmp_path, read):
    made = scene()
    made.log = ["before", "\\x0dLoading: 0/4\\x0dLoading: 3/4\\x0dLoading: 4/4", "after"]
    page = read(write_incident_page(made.write(tmp_path / "incident")))
    assert page.words("log").endswith("log_tail.txt before Loading: 4/4 after")


def test_only_our_style_and_script_are_obeyed(page):
    (policy,) = [a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for kind in ("style", "script"):
        (source,) = page.raw[kind]
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
        assert "http" not in source.replace("http-equiv", "")


def spoiled(value):
    """Every text in a JSON value, keys included, replaced by one that would do harm."""
    if isinstance(value, dict):
        return {f"{key}{HOSTILE}" if key.startswith("TP") else key: spoiled(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [spoiled(entry) for entry in value]
    return HOSTILE + value if isinstance(value, str) else value


def test_hostile_texts_show_and_do_nothing(scene, tmp_path, read):
    made = scene()
    kinds = [line["kind"] for line in made.timeline]
    made.incident = spoiled(made.incident)
    made.timeline = [{**spoiled(line), "kind": kind} for line, kind in zip(made.timeline, kinds, strict=True)]
    made.stacks = {name: spoiled(content) for name, content in made.stacks.items()}
    made.log = [HOSTILE, *(HOSTILE + line for line in made.log), "x" * 5000]
    page = read(write_incident_page(made.write(tmp_path / "in cident<b>")))
    page.assert_harmless()
    assert "alert(1)" in page.words("verdict")
    assert "\\x1b[2J\\x00\\u202eevil\\u2066 {{ 7*7 }} &lt;" in page.words("verdict")
    assert "alert(1)" in page.words("stacks")
    assert "alert(1)" in page.words("log")
    assert "alert(1)" in page.words("timeline")
    assert "3800 more characters" in page.words("log")


def test_a_file_of_somebody_else_is_not_replaced(scene, tmp_path):
    directory = scene().write(tmp_path / "incident")
    mine = directory / "index.html"
    mine.write_text("<h1>my own page</h1>")
    with pytest.raises(PageError, match="not a page of ours"):
        write_incident_page(directory)
    assert mine.read_text() == "<h1>my own page</h1>"
    elsewhere = write_incident_page(directory, tmp_path / "out.html")
    assert elsewhere.stat().st_size > 10_000
    mine.unlink()
    target = tmp_path / "target"
    target.write_text("precious")
    mine.symlink_to(target)
    with pytest.raises(PageError, match="not a page of ours"):
        write_incident_page(directory)
    assert target.read_text() == "precious"
    mine.unlink()
    write_incident_page(directory)
    write_incident_page(directory)  # its own it replaces


def test_nothing_is_read_through_links_nor_from_pipes(scene, tmp_path, read):
    secret = tmp_path / "secret.txt"
    secret.write_text("the private key\n")
    made = scene()
    directory = made.write(tmp_path / "incident")
    (directory / "log_head.txt").symlink_to(secret)
    os.mkfifo(directory / "log_pipe.txt")
    pipe = os.open(directory / "log_pipe.txt", os.O_RDWR)
    os.write(pipe, b"what is in the pipe\n")
    (directory / "stacks" / "TP9.9.json").symlink_to(secret)
    (directory / "timeline.jsonl").unlink()
    (directory / "timeline.jsonl").symlink_to(secret)
    page = read(write_incident_page(directory))
    os.close(pipe)
    assert "private key" not in page.html
    assert "in the pipe" not in page.html
    assert "TP3" in page.words("stacks")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"x"', '{"complete": false, "verdict": 7, "classes": {"a": 1}}', "[" * 9999]
)
def test_a_torn_incident_still_has_a_page(scene, tmp_path, read, content):
    directory = scene().write(tmp_path / "incident")
    (directory / "incident.json").write_text(content)
    page = read(write_incident_page(directory))
    assert len(page.all("p", class_="warning")) >= 1
    assert len(page.all("svg", class_="bars")) == 1


def test_start_up_has_a_picture_of_its_own_when_life_was_long(scene, tmp_path, read):
    made = scene(seconds=60)
    made.timeline = [line for line in made.timeline if line["kind"] != "sample"]
    for line in list(made.timeline):
        if line["kind"] == "phase" and line["end"] is None:
            line["end"] = line["t"] + 3
            made.timeline.append({**line, "t": line["end"], "phase": "ready", "end": None, "done": None, "total": None})
    made.timeline.append({"t": made.timeline[0]["t"] + 18, "kind": "event", "text": "handed to a test"})
    for line in made.timeline:
        if line["kind"] == "event" and line["text"].startswith("incident"):
            line["t"] += 600
    page = read(write_incident_page(made.write(tmp_path / "incident")))
    titles = [a["aria-label"].partition(".")[0] for a in page.all("svg", class_="bars")]
    assert titles == ["Start-up, 18 s", "Whole life, 11 min 00 s"]


def test_a_rank_that_is_missing_has_a_row(scene, tmp_path, read):
    made = scene()
    made.incident["missing"] = ["TP9"]
    page = read(write_incident_page(made.write(tmp_path / "incident")))
    assert len(page.all("text", class_="absent")) == 1
    assert "TP9" in page.words("timeline")


def test_a_page_stays_small_whatever_is_behind_it(scene, tmp_path, read):
    made = scene(ranks=64, seconds=600, hang=300, gpus=64)
    made.log = ["<&>\"'" * 200 for _ in range(8000)]
    for n, line in enumerate(made.timeline):
        if line["kind"] == "sample":
            line["gpus"] = [[(n * 7919 * (g + 1)) % (98 << 30), n * g % 100, n * g % 700] for g in range(64)]
    directory = made.write(tmp_path / "incident")
    with (directory / "log_whole.txt").open("wb") as log:
        log.write(b"[2026-11-29 22:29:01 TP1] the first line\n")
        log.truncate(200_000_000)  # a hole
        log.seek(0, os.SEEK_END)
        log.write(b"\n[2026-11-29 22:59:01 TP1] the last line\n")
    written = write_incident_page(directory)
    assert written.stat().st_size < 3_000_000
    page = read(written)
    assert "MiB left out" in page.words("log")
    assert "the first line" in page.words("log")
    assert "the last line" in page.words("log")
    assert len(page.all("path")) == 3 * 64 + 2


@pytest.mark.parametrize(("line", "lines", "characters"), [("x", 2500, 420_000), ("<" * 300, 2500, 420_000)])
def test_a_long_log_is_cut_in_the_middle(scene, tmp_path, read, line, lines, characters):
    made = scene(ranks=1, culprit=0, seconds=30, gpus=0)
    made.log = ["first", *[line] * 20_000, "last"]
    page = read(write_incident_page(made.write(tmp_path / "incident")))
    shown = page.words("log").partition("log_tail.txt ")[2]
    assert shown.startswith("first")
    assert shown.endswith("last")
    assert "left out" in shown
    assert len([a for a in page.all("li") if "data-r" in a]) <= lines
    assert len(shown) <= characters


def test_a_peak_is_never_lost(scene, tmp_path, read):
    made = scene(seconds=1500, hang=1400, gpus=1)
    samples = [line for line in made.timeline if line["kind"] == "sample"]
    for line in samples:
        line["gpus"] = [[0, 1, 88]]
    samples[777]["gpus"] = [[0, 97, 88]]
    page = read(write_incident_page(made.write(tmp_path / "incident")))
    path = page.all("path", data_name="GPU 0")[1]["d"]
    heights = [int(y) for _, y in re.findall(r"(\d+) (\d+)", path)]
    assert min(heights) == 30
    assert len(heights) < 700


def test_public_reports_are_links_and_nothing_else_is(scene, tmp_path, read):
    made = scene()
    good = "https://github.com/sgl-project/sglang/issues/3#issuecomment-7"
    made.incident["known"] = [good, "javascript:alert(1)", "https://x/<b>", "http://127.0.0.1/", f"{good} x", 7]
    page = read(write_incident_page(made.write(tmp_path / "incident")))
    page.assert_harmless()
    assert [a["href"] for a in page.all("a") if a["href"].startswith(("http", "java"))] == [good]


def test_a_whole_log_is_shown_once(scene, tmp_path, read):
    directory = scene().write(tmp_path / "incident")
    (directory / "log.txt").write_text("the whole log\n")
    (directory / "log_cause.txt").write_text("> 7: the cause\n")
    page = read(write_incident_page(directory))
    assert page.words("log").endswith("log.txt the whole log log_cause.txt > 7: the cause")


def test_a_page_from_a_zip_is_the_page_of_the_directory(scene, tmp_path, read, capsys):
    directory = scene().write(tmp_path / "20261129T222908-sglang-tp8-startup_budget")
    with (directory / "log_head.txt").open("w") as log:
        log.writelines(f"line {n}\n" for n in range(200_000))
    here = read(write_incident_page(directory, tmp_path / "here.html"))
    packed = shutil.make_archive(str(tmp_path / directory.name), "zip", tmp_path, directory.name)
    assert main(["explain", packed, "--html", str(tmp_path / "zip.html")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'zip.html'}\n"
    there = read(tmp_path / "zip.html")
    for part in ("timeline", "curves", "stacks", "log", "processes"):
        assert there.words(part) == here.words(part)
    assert "MiB left out" in there.words("log")


def test_the_files_beside_it_are_linked(page):
    links = [a["href"] for a in page.all("a") if not a["href"].startswith(("#", ".."))]
    assert links == ["incident.json", "verdict.md", "timeline.jsonl", "log_tail.txt"]
