"""Bundles: whole or not, from anywhere, however hostile; zipped, pruned."""

from __future__ import annotations

import io
import json
import os
import stat
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.cli import main
from pytest_gpuserve.report import bundle, bundle_check, bundle_reader
from pytest_gpuserve.report.bundle_check import check
from pytest_gpuserve.report.bundle_reader import (
    MOST_LISTED,
    Bundle,
    BundleError,
    Directory,
    Zip,
    open_bundles,
    unsafe_name,
)
from pytest_gpuserve.report.bundle_zip import write_zip
from pytest_gpuserve.report.files import MARKER, Store

NAME = "20261129T101112-sim-tp2-no_progress"


def make(parent: Path, name: str = NAME, *, complete: bool = True) -> Path:
    """A bundle as an incident leaves it."""
    path = parent / name
    path.mkdir(parents=True)
    store = Store(path, None, 0o644)
    store.write(MARKER, "gpuserve\n")
    store.write_json("bundle.json", bundle.manifest(store, complete=False, left_out={}))
    ranks = {"TP0": {"problem": None}, "TP1": {"problem": None}, "api": {"problem": None}}
    incident = {
        "verdict": "hang",
        "id": "sim-tp2",
        "ranks": ranks,
        "missing": [],
        "complete": complete,
        "text": "hang.",
    }
    for part in bundle.PARTS:
        if part == "incident.json":
            store.write_json(part, incident)
        elif part.endswith(".json"):
            store.write_json(part, {"schema": "x"})
        else:
            store.write(part, '{"t": 1}\n')
    for label in ("TP0.7", "TP1.8", "api.6"):
        store.write_json(f"stacks/{label}.json", {"rounds": []})
    if complete:
        store.write_json("bundle.json", bundle.manifest(store, complete=True, left_out={"versions.json": "no answer"}))
    return path


def opened(path: Path) -> Bundle:
    (found,) = open_bundles(path)
    return found


def told(path: Path) -> list[str]:
    return list(check(opened(path)).lines())


def test_a_whole_one_is_whole(tmp_path: Path) -> None:
    found = check(opened(make(tmp_path)))
    assert found.whole
    assert list(found.lines()) == ["left out: versions.json: no answer", "whole"]


@pytest.mark.parametrize("part", [*bundle.PARTS, "bundle.json", "stacks/TP1.8.json"])
def test_every_part_that_is_gone_is_named(tmp_path: Path, part: str) -> None:
    path = make(tmp_path)
    (path / part).unlink()
    found = check(opened(path))
    assert not found.whole
    wanted = "stacks of TP1" if "/" in part else part
    assert wanted in {name for name, _ in found.missing}


def test_killed_half_way(tmp_path: Path) -> None:
    path = make(tmp_path, complete=False)
    (path / "evidence.json").unlink()
    (path / "stacks" / ".TP1.8.json.new").write_text('{"rou')
    (path / "stacks" / "TP1.8.json").unlink()
    lines = told(path)
    assert lines[0].startswith("incomplete:")
    assert "torn: stacks/TP1.8.json: being written when its writer was killed" in lines
    assert "missing: evidence.json: what was judged, so that it can be judged again" in lines
    assert "missing: stacks of TP1: they were not taken" in lines
    assert "whole" not in lines


@pytest.mark.parametrize("left", [[], [MARKER], [MARKER, "bundle.json"]])
def test_killed_at_once(tmp_path: Path, left: list[str]) -> None:
    path = make(tmp_path, complete=False)
    for file in sorted(path.rglob("*"), reverse=True):
        if file.name not in left:
            file.rmdir() if file.is_dir() else file.unlink()
    if not left:
        with pytest.raises(BundleError, match="holds no incident"):
            open_bundles(path)
        return
    assert "missing: stacks/: no stacks of any process were taken" in told(path)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("verdict.md", '{"t": 2}\n', "changed since it was written"),
        ("issue.md", "x", "1 bytes, of 9"),
        ("incident.json", '{"verdict": ', "torn: incident.json"),
        ("timeline.jsonl", '{"t": 1}\n{"t"', "torn: timeline.jsonl"),
        ("bundle.json", '{"schema": "gpuserve.bundle/9"}', "made by another version"),
        ("bundle.json", "[" * 100_000, "no JSON: RecursionError"),
        ("results.jsonl", '{"t": 1}\n{"t"', "its last line was cut off"),
    ],
)
def test_torn_files_are_named(tmp_path: Path, file: str, text: str, says: str) -> None:
    path = make(tmp_path)
    (path / file).write_text(text)
    assert any(says in line for line in told(path)), told(path)
    assert "whole" not in told(path)


def test_what_else_lies_in_a_bundle_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    path = make(tmp_path)
    (path / "verdict.md").unlink()
    (path / "verdict.md").symlink_to(secret)
    (path / "extra").symlink_to(tmp_path)
    os.mkfifo(path / "pipe")
    found = opened(path)
    assert found.text("verdict.md") is None
    assert found.text("extra/secret") is None
    assert dict(check(found).odd) == {"verdict.md": "a link", "extra": "a link", "pipe": "no plain file"}
    out = tmp_path / "x.zip"
    write_zip(found, out, tmp_path)
    with zipfile.ZipFile(out) as archive:
        assert not any(b"not yours" in archive.read(name) for name in archive.namelist())


def test_a_file_that_becomes_a_link_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("not yours")
    path = make(tmp_path)
    found = opened(path)
    (path / "verdict.md").unlink()
    (path / "verdict.md").symlink_to(tmp_path / "secret")
    (path / "stacks").rename(tmp_path / "elsewhere")
    (path / "stacks").symlink_to(tmp_path / "elsewhere")
    assert found.text("verdict.md") is None
    assert found.text("stacks/TP0.7.json") is None


def test_zip_and_back(tmp_path: Path) -> None:
    path = make(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"nodeid": "theirs"}\n')
    (tmp_path / "results-2.jsonl").write_text('{"schema": "gpuserve.results/1", "nodeid": "x"}\n')
    (tmp_path / "matrix.json").symlink_to(tmp_path / "results-2.jsonl")
    assert write_zip(opened(path), tmp_path / "out.zip", tmp_path) == []
    found = opened(tmp_path / "out.zip")
    assert found.name == NAME
    assert check(found).whole
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert "results-2.jsonl" in archive.namelist()
        assert not {"results.jsonl", "matrix.json"} & set(archive.namelist()), "what is none of ours, or a link"
        assert archive.testzip() is None
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]


def test_one_of_many(tmp_path: Path) -> None:
    make(tmp_path)
    make(tmp_path, "20261130T101112-sim-tp2-manual")
    (tmp_path / "results.jsonl").write_text("")
    names = [NAME, "20261130T101112-sim-tp2-manual"]
    assert [found.name for found in open_bundles(tmp_path)] == names
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in tmp_path.rglob("2026*/**/*"):
            if file.is_file():
                archive.write(file, f"artifact/{file.relative_to(tmp_path)}")
    assert [found.name for found in open_bundles(tmp_path / "all.zip")] == names
    assert all(check(found).whole for found in open_bundles(tmp_path / "all.zip"))


def test_artifacts_without_an_incident(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text("gpuserve\n")
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(BundleError, match="holds no incident"):
        open_bundles(tmp_path)


def hostile(path: Path, entries: dict[str, Any]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"b/incident.json": "{}", **entries}.items():
            info = zipfile.ZipInfo("x")
            info.filename = name
            data = content
            if isinstance(content, tuple):
                mode, data = content
                info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return path


def test_zip_slip_links_and_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hostile(
        tmp_path / "x.zip",
        {
            "b/../../evil": "x",
            "/etc/evil": "x",
            "b/link": (stat.S_IFLNK | 0o777, "/etc/passwd"),
            "b/fifo": (stat.S_IFIFO | 0o777, ""),
            "C:/evil": "x",
            "b\\..\\evil": "x",
            "b//evil": "x",
            f"b/{'x' * 5000}": "x",
            "b/bomb.json": "0" * (1 << 20),
        },
    )
    files = Zip(path)
    assert set(files.names) == {"b/incident.json", "b/bomb.json"}
    assert set(files.odd.values()) >= {"a link", "no plain file", "an absolute path", "a path that leads out"}
    assert len(files.read("b/bomb.json", 1000)) == 1000
    before = sorted(tmp_path.rglob("*"))
    found = opened(path)
    assert not check(found).whole
    assert sorted(tmp_path.rglob("*")) == before  # nothing is ever unpacked


@pytest.mark.parametrize(
    "name", ["a\0b", "../x", "a/../x", "/x", "\\x", "a\\b", "c:x", "a//b", "./a", "", "x" * 2000, "a/" * 9]
)
def test_names_that_are_not_taken(name: str) -> None:
    assert unsafe_name(name) is not None


def test_a_nul_in_a_name_is_seen_in_the_file_itself(tmp_path: Path) -> None:
    path = hostile(tmp_path / "x.zip", {"b/okXtail": "x"})
    path.write_bytes(path.read_bytes().replace(b"b/okXtail", b"b/ok\0tail"))
    assert "a NUL in its name" in Zip(path).odd.values()


def test_what_is_not_packed_as_ours_are_is_not_unpacked(tmp_path: Path) -> None:
    """Other methods take as much memory as the file asks for."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b/incident.json", "{}", zipfile.ZIP_LZMA)
        archive.writestr("b/log.txt", "{}", zipfile.ZIP_BZIP2)
        archive.writestr("b/stored.txt", "{}", zipfile.ZIP_STORED)
    files = Zip(path)
    assert set(files.names) == {"b/stored.txt"}
    assert set(files.odd.values()) == {"packed in another way than by deflate"}
    with pytest.raises(OSError):
        files.read("b/log.txt")


def test_what_cannot_be_unpacked_is_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = hostile(tmp_path / "x.zip", {"b/log.txt": "x" * 5000})
    raw = path.read_bytes()
    at = raw.index(b"log.txt") + len("log.txt")
    path.write_bytes(raw[:at] + b"\xff" * 8 + raw[at + 8 :])
    with pytest.raises(OSError, match="cannot be unpacked"):
        Zip(path).read("b/log.txt")


def test_a_zip_that_lists_more_than_memory_holds(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("incident.json", "{}")
        for number in range(MOST_LISTED // 400 + 1):
            archive.writestr(f"{number:0400}", b"")
    with pytest.raises(BundleError, match="its list of files is longer than 8 MiB"):
        open_bundles(tmp_path / "x.zip")


@pytest.mark.parametrize("packed", [True, False])
def test_what_comes_after_a_gigabyte_is_not_looked_at(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_reader, "MOST_TOTAL", 10_000)
    monkeypatch.setattr(bundle_reader, "MOST_FILES", 40)
    path = make(tmp_path)
    for number in range(5):
        (path / "stacks" / f"TP{number}.9.json").write_text(" " * 4000)
    (path / "z").write_text("small")
    if packed:
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            for file in sorted(path.rglob("*")):
                archive.write(file, f"{NAME}/{file.relative_to(path)}")
    found = opened(tmp_path / "x.zip" if packed else path)
    assert "stacks/TP0.9.json" in found.files.names
    late = [f"stacks/TP{number}.9.json" for number in (3, 4)]
    for name in late:
        assert found.text(name) is None
        assert "in all" in found.files.odd[name]
    assert not check(found).whole
    for number in range(60):
        (path / f"many{number}").mkdir()
    assert any("more than 40 files" in why for why in opened(path).files.odd.values())


def explained(*words: object) -> int:
    return main(["explain", *map(str, words)])


def test_one_large_file_hides_no_other_and_a_zip_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path)
    for name in ("aa.txt", "evidence.json"):
        with (path / name).open("wb") as file:
            file.truncate(5 << 30)  # a hole: takes no place
    found = opened(path)
    assert dict(found.files.odd) == dict.fromkeys(("aa.txt", "evidence.json"), "larger than 64 MiB: not read")
    assert found.json("incident.json")["verdict"] == "hang"
    assert explained(path, "--zip", tmp_path / "x.zip") == 1
    told = capsys.readouterr().out
    assert "left out, too big or not readable: evidence.json" in told
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert len(archive.namelist()) == len(found.files.names) > 10
    for name in ("aa.txt", "evidence.json"):
        (path / name).unlink()
    assert explained(path, "--zip", tmp_path / "x.zip") == 0


@pytest.mark.parametrize("sign", [".gpuserve", "bundle.json", "incident.json"])
def test_a_bundle_is_never_rendered_over_one(sign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path)
    there = tmp_path / "there"
    there.mkdir()
    (there / sign).write_text("{}")
    before = (path / "verdict.md").read_bytes()
    for place in (path, there):
        assert explained(path, "--render", place) == 2
        assert "Choose another directory with --render" in capsys.readouterr().err
    assert (path / "verdict.md").read_bytes() == before
    assert os.listdir(there) == [sign]


def test_what_cannot_be_read_is_not_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path)
    (path / "incident.json").write_text("{")
    assert explained(path, "--render", tmp_path / "new") == 2
    assert "nothing to write" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    for options in (["--issue"], ["--html", tmp_path / "new"]):
        assert explained(path, *options) == 2
        said = capsys.readouterr()
        assert (said.out, "nothing to write" in said.err) == ("", True)
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["[]", "{}", '{"name": "x", "files": []}', "{"])
def test_a_bundle_json_of_somebody_else_makes_no_incident(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "bundle.json").write_text(content)
    assert explained(tmp_path, "--check") == 2
    assert "no bundle.json of pytest-gpuserve's. Give the directory" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "why"), [("[]", "it is JSON, but not what pytest-gpuserve"), ("{", "no JSON: ")])
@pytest.mark.parametrize("file", ["bundle.json", "incident.json"])
def test_a_file_that_holds_something_else_is_torn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, why: str
) -> None:
    path = make(tmp_path)
    (path / file).write_text(content)
    (path / "bundle.json").write_text("{}" if file == "incident.json" else content)
    assert explained(path, "--check") == 1
    assert f"torn: {file}: {why}" in capsys.readouterr().out


def test_two_that_are_named_are_not_one_that_holds_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make(tmp_path), make(tmp_path / "more")
    assert explained(one, two, "--issue") == 2
    assert "the 2 paths named hold 2 incidents" in capsys.readouterr().err


def test_json_is_parsed_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile one takes 25 times its size in memory."""
    monkeypatch.setattr(bundle_reader, "MOST_JSON", 1000)
    monkeypatch.setattr(bundle_check, "MOST_JSON", 1000)
    path = make(tmp_path)
    (path / "incident.json").write_text(json.dumps({"verdict": "hang", "pad": "x" * 1000}))
    assert opened(path).json("incident.json") == {}
    (path / "bundle.json").unlink()
    assert any(line.startswith("torn: incident.json: larger than") for line in told(path))


def test_no_zip_at_all(tmp_path: Path) -> None:
    for data in (b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), os.urandom(100)):
        (tmp_path / "x.zip").write_bytes(data)
        with pytest.raises(BundleError):
            open_bundles(tmp_path / "x.zip")


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]),
    st.binary(max_size=60),
    st.integers(0, 900),
    st.integers(1, 60),
)
def test_a_damaged_zip_never_raises_anything_else(
    tmp_path_factory: Any, method: int, noise: bytes, at: int, size: int
) -> None:
    place = tmp_path_factory.getbasetemp() / "fuzz.zip"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        archive.writestr("b/incident.json", json.dumps({"ranks": {}, "text": "x" * 300}))
        archive.writestr("b/bundle.json", json.dumps({"files": {}}))
        archive.writestr("b/timeline.jsonl", '{"t": 1}\n' * 50)
    raw = bytearray(data.getvalue())
    raw[at : at + size] = noise
    place.write_bytes(raw)
    try:
        for found in open_bundles(place):
            list(check(found).lines())
    except BundleError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["schema", "complete", "files", "left_out", "beside"]), JSON),
    st.dictionaries(st.sampled_from(["ranks", "missing", "complete", "verdict", "text"]), JSON),
)
def test_any_json_in_a_manifest_is_checked(tmp_path_factory: Any, manifest: Any, incident: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.mkdir(exist_ok=True)
    (path / "bundle.json").write_text(json.dumps(manifest))
    (path / "incident.json").write_text(json.dumps(incident))
    assert not check(opened(path)).whole


class TestPrune:
    def test_the_oldest_go(self, tmp_path: Path) -> None:
        names = [f"2026112{n}T101112-sim-tp2-manual" for n in range(6)]
        for name in names:
            make(tmp_path, name)
        assert bundle.prune(tmp_path, 2) == names[:4]
        assert sorted(os.listdir(tmp_path)) == names[4:]

    def test_only_what_is_ours(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        old = make(outside, "20250101T000000-sim-tp2-manual")
        artifacts = tmp_path / "artifacts"
        unmarked = make(artifacts, "20250102T000000-sim-tp2-manual")
        (unmarked / MARKER).unlink()
        linked = make(artifacts, "20250103T000000-sim-tp2-manual")
        (linked / MARKER).unlink()
        (linked / MARKER).symlink_to(outside / old.name / MARKER)
        (artifacts / "20250104T000000-sim-tp2-manual").symlink_to(old)
        (artifacts / "theirs").mkdir()
        (artifacts / "20250105T000000-file").write_text("x")
        there = sorted(os.listdir(artifacts))
        assert bundle.prune(artifacts, 0) == []
        assert sorted(os.listdir(artifacts)) == there
        assert (old / "incident.json").exists()

    def test_links_inside_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "keep").mkdir()
        (tmp_path / "keep" / "file").write_text("x")
        artifacts = tmp_path / "artifacts"
        (make(artifacts) / "extra").symlink_to(tmp_path / "keep")
        assert bundle.prune(artifacts, 0) == [NAME]
        assert (tmp_path / "keep" / "file").exists()

    def test_what_is_being_written_stays(self, tmp_path: Path) -> None:
        path = make(tmp_path, complete=False)
        spare = make(tmp_path, "20261128T101112-sim-tp2-manual")
        draft = tmp_path / f".{NAME}.77.new"
        draft.mkdir()
        assert bundle.prune(tmp_path, 0, spare=spare) == []
        for old in (path, draft):
            os.utime(old, (time.time() - 3600,) * 2)
        assert set(bundle.prune(tmp_path, 0, spare=spare)) == {path.name, draft.name}

    def test_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        assert bundle.prune(tmp_path / "no", 3) == []


def test_more_files_than_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_gpuserve.report.bundle_reader.MOST_FILES", 5)
    assert any("more than 5 files" in why for why in Directory(make(tmp_path)).odd.values())
