"""Where incidents are written: whole files, no way out, nothing through links."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.report.files import MARKER, Store, incident_name, open_stores, put_line, safe_name


@pytest.fixture
def redactor():
    return Redactor(["known-value-17"], home="/home/alice", hosts=[])


@pytest.mark.parametrize(
    ("raw", "safe"),
    [
        ("TP3", "TP3"),
        ("DP1 TP3", "DP1_TP3"),
        ("../../etc/x", "_.._etc_x"),
        ("", "_"),
        ("...", "_"),
        (".hidden", "hidden"),
        ("a\x00b/ü", "a_b_"),
    ],
)
def test_names(raw, safe):
    assert safe_name(raw) == safe


@given(st.text(max_size=300))
def test_any_name_is_one_plain_component(text):
    name = safe_name(text)
    assert name
    assert len(name) <= 80
    assert not name.startswith(".")
    assert os.path.basename(name) == name  # noqa: PTH119
    assert "\0" not in incident_name(text, text)
    assert "/" not in incident_name(text, text)
    assert len(incident_name(text, text)) < 255


def test_store_writes_whole_files_and_redacts(tmp_path, redactor):
    store = Store(tmp_path, redactor, 0o600)
    store.write("a.txt", "x known-value-17 \udc80")
    store.write("a.txt", "y known-value-17")
    store.write("clean.txt", "known-value-17", clean=True)
    store.write_json("stacks/b.json", {"token": "anything-here", "k": ["/home/alice/x", 3]})
    assert (tmp_path / "a.txt").read_text() == "y <secret-1>"
    assert (tmp_path / "clean.txt").read_text() == "known-value-17"
    assert json.loads((tmp_path / "stacks" / "b.json").read_text()) == {"token": "<secret-2>", "k": ["~/x", 3]}
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "stacks").stat().st_mode) == 0o700
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "clean.txt", "stacks"]


def test_nothing_is_written_through_links(tmp_path, redactor):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "victim").write_text("old")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "stacks").symlink_to(elsewhere)
    (inside / "a.txt").symlink_to(elsewhere / "victim")
    (inside / ".b.txt.new").symlink_to(elsewhere / "victim")
    store = Store(inside, redactor, 0o600)
    with pytest.raises(OSError):
        store.write("stacks/x.json", "new")
    store.write("a.txt", "new")
    store.write("b.txt", "new")
    assert (elsewhere / "victim").read_text() == "old"
    assert list(elsewhere.iterdir()) == [elsewhere / "victim"]
    assert not (inside / "a.txt").is_symlink()
    (tmp_path / "link").symlink_to(elsewhere)
    with pytest.raises(OSError):
        Store(tmp_path / "link", redactor, 0o600).write("x", "new")


def test_a_full_disk_costs_no_more_than_the_file(tmp_path, redactor, monkeypatch):
    server = tmp_path / "server"
    server.mkdir()
    stores = open_stores(server, tmp_path / "artifacts", "name", redactor)
    stores.publish()
    real = os.fsync

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    stores.write("a.txt", "x")
    monkeypatch.setattr(os, "fsync", real)
    stores.write("b.txt", "x")
    assert "No space left" in stores.problem
    assert (stores.path / "b.txt").read_text() == "x"
    assert not (stores.path / "a.txt").exists()


def test_directories_marker_and_collisions(tmp_path, redactor):
    server = tmp_path / "server"
    server.mkdir()
    artifacts = tmp_path / "deep" / "artifacts"
    one = open_stores(server, artifacts, "n", redactor)
    two = open_stores(server, artifacts, "n", redactor)
    assert all(name.startswith(".") for name in os.listdir(artifacts))  # drafts, until they say what they are
    for stores in (one, two):
        stores.publish()
        stores.publish()
    assert [one.path, two.path] == [artifacts / "n", artifacts / "n-2"]
    assert two.raw.path == server / "incidents" / "n-2"
    assert stat.S_IMODE(one.raw.path.stat().st_mode) == 0o700
    for directory in (artifacts, one.path, two.path):
        assert (directory / MARKER).is_file()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "report.html").write_text("x")
    assert open_stores(server, theirs, "n", redactor).path.parent == theirs
    assert not (theirs / MARKER).exists()  # a directory that is not ours is never pruned
    assert open_stores(server, None, "n", redactor).shared is None
    broken = open_stores(server, theirs / "report.html" / "x", "n", redactor)
    assert broken.shared is None
    assert "cannot be written" in broken.problem


def test_a_name_that_is_taken_is_never_written_into(tmp_path, redactor):
    server = tmp_path / "server"
    server.mkdir()
    artifacts, elsewhere = tmp_path / "artifacts", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (artifacts / "n-2").mkdir(parents=True)
    (artifacts / "n-2" / "theirs").write_text("x")
    (artifacts / "n").symlink_to(elsewhere)
    stores = open_stores(server, artifacts, "n", redactor)
    stores.publish()
    stores.write("a.txt", "x")
    assert stores.path == artifacts / "n-3"
    assert (artifacts / "n-3" / "a.txt").read_text() == "x"
    assert not any(elsewhere.iterdir())
    assert os.listdir(artifacts / "n-2") == ["theirs"]


def test_text_that_is_too_long_is_cut_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_gpuserve.report.files.MOST_TEXT", 100)
    store = Store(tmp_path, None, 0o600)
    store.write("a.txt", "x" * 5000)
    assert (tmp_path / "a.txt").read_text().startswith("x" * 100 + "\n<cut here: 5000 characters")


def test_lines_are_appended_or_replaced_in_one_step(tmp_path):
    path = tmp_path / "incidents.jsonl"
    put_line(path, {"incident": "a", "verdict": "undecided"})
    put_line(path, {"incident": "a", "verdict": "hang"})
    put_line(path, {"incident": "b", "verdict": "undecided"})
    put_line(path, {"incident": "b", "verdict": "crash"})
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(f["incident"], f["verdict"]) for f in found] == [("a", "hang"), ("b", "crash")]
    with path.open("a") as file:
        file.write("{broken")
    put_line(path, {"incident": "b", "verdict": "hang"})
    *_, broken, last = path.read_text().splitlines()
    assert (broken, json.loads(last)["verdict"]) == ("{broken", "hang")
