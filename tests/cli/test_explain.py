"""``gpuserve explain``: exit codes, the report, JSON, and text that a terminal would obey."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_gpuserve.cli import main
from pytest_gpuserve.diagnose import logfile

BEGIN = "[2031-02-11 10:00:00] server_args=ServerArgs(model_path='/m', tp_size=2)\n"
READY = "[2031-02-11 10:00:57] The server is fired up and ready to roll!\n"
RANKS = "".join(f"[2031-02-11 10:00:14 TP{n}] Init torch distributed begin.\n" for n in (0, 1))
FAILED = (
    "[2031-02-11 10:00:44 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/x.py", line 431, in load_model\n'
    "    model = make(\n"
    "{}\n"
    "\n"
    "[2031-02-11 10:00:44] Received sigquit from a child process. It usually means the child failed.\n"
)
BATCH = (
    "[2031-02-11 10:05:{:02d} TP0] Decode batch, #running-req: 3, #token: 300, token usage: 0.00, accept len: 1.02, "
    "accept rate: 0.01, cuda graph: True, gen throughput (token/s): 40.1, #queue-req: 0\n"
)
LOGS = {
    "ready": (0, BEGIN + READY),
    "crash": (1, BEGIN + FAILED.format("RuntimeError: it broke")),
    "oom": (1, BEGIN + FAILED.format("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB.")),
    "config": (1, BEGIN + "launch_server.py: error: unrecognized arguments: --cuda-graph-max-batch 8\n"),
    "unsupported_arch": (1, BEGIN + FAILED.format("RuntimeError: CUDA error: no kernel image is available")),
    "port": (1, BEGIN + FAILED.format("OSError: [Errno 98] Address already in use")),
    "infra": (1, BEGIN + FAILED.format("OSError: [Errno 28] No space left on device")),
    "leak": (1, BEGIN + FAILED.format("ValueError: The memory capacity is unbalanced. Some GPUs may be occupied.")),
    "stalled": (3, BEGIN + RANKS),
    "degraded": (4, BEGIN + READY + "".join(BATCH.format(n) for n in range(60))),
    "undecided": (5, '10.0.0.1 - - "GET /index.html HTTP/1.1" 200\n'),
}


@pytest.fixture
def told(tmp_path, capsys):
    """Exit code, output and errors of ``gpuserve explain`` of a log with this text."""

    def told(text: str | bytes, *options: str, name: str = "server.log"):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        code = main(["explain", str(path), *options])
        return code, *capsys.readouterr()

    return told


@pytest.mark.parametrize("verdict", LOGS)
def test_exit_codes(told, verdict):
    expected, text = LOGS[verdict]
    code, out, err = told(text)
    assert out.split()[:2] == ["verdict", verdict]
    assert (code, err) == (expected, "")
    code, out, _ = told(text, "--json")
    assert code == expected
    assert json.loads(out)["verdict"] == verdict


def test_exit_codes_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    shown = capsys.readouterr().out
    for code in (0, 1, 2, 3, 4, 5):
        assert re.search(rf"^  {code}  \w", shown, re.MULTILINE)
    for verdict in LOGS:
        assert verdict in shown


def test_the_report(told, tmp_path):
    _, out, _ = told(
        BEGIN
        + RANKS
        + "[2031-02-11 10:00:18 TP0] Init torch distributed ends. mem usage=1 GB\n"
        + "[2031-02-11 10:00:19] Ignore import error when loading sglang.srt.models.grok: No module named 'x'\n" * 3
        + FAILED.format("RuntimeError: Rank 1 scheduler died during initialization (exit code: -9).")
    )
    lines = out.splitlines()
    assert lines[0].startswith("verdict   crash (sglang, in distributed_init)")
    assert lines[1].startswith(
        f"cause     {tmp_path / 'server.log'}:11 TP1 [killed] RuntimeError: Rank 1 scheduler died"
    )
    assert any(line.startswith("ranks     TP0: distributed_init") for line in lines)
    assert any(line.startswith("behind    TP1: distributed_init, last line:") for line in lines)
    folded = next(n for n, line in enumerate(lines) if line.startswith("folded    3 lines"))
    assert re.match(r" +3 import_ignored: ", lines[folded + 1])
    assert any(line.startswith("hint") and "oom_kill" in line for line in lines)
    assert not any("grok" in line for line in lines)


def test_degraded_says_how_much(told):
    _, out, _ = told(LOGS["degraded"][1])
    assert re.search(r"^degraded  .*accept rate.* 0\.01", out, re.MULTILINE)


def test_json_of_a_failure(told):
    code, out, _ = told(LOGS["oom"][1], "--json")
    found = json.loads(out)
    assert code == 1
    assert found["schema"] == "gpuserve.triage/1"
    assert found["engine"] == "sglang"
    assert found["cause"] == {
        "line": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB.",
        "lineno": 5,
        "rank": "TP1",
        "class": "gpu_out_of_memory",
    }
    assert set(found["ranks"]["TP1"]) == {"phase", "last_line", "last_time"}


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u200b\x00\x08\ud800\u2028"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_nothing_that_a_terminal_obeys_is_printed(told, options):
    hostile = HOSTILE.encode("utf-8", "surrogatepass")
    text = (BEGIN + RANKS + FAILED.format("RuntimeError: it broke X")).encode().replace(b"X", hostile)
    text = text.replace(b"begin.", b"begin. " + hostile)
    code, out, _ = told(text, *options)
    assert code == 1
    assert "it broke" in out
    assert all(character.isprintable() or character == "\n" for character in out)
    if options:
        assert out.isascii()


def test_a_hostile_file_name(told):
    _, out, _ = told(LOGS["oom"][1], name="a\x1b[2J\nb.log")
    assert "\x1b" not in out
    assert r"\x1b[2J b.log:5" in out


def test_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LOGS["oom"][1].encode())))
    assert main(["explain", "-"]) == 1
    assert "cause     -:5 TP1" in capsys.readouterr().out


STACKS = Path(__file__).parent.parent / "data" / "stacks"
DUMPS = ("recorded_vllm_filelock.txt", "pystack.txt", "gdb_bt.txt", "pyspy_json_pretty.json")


def explained(*arguments: str, piped: bool = False, **options: object) -> tuple[int, str]:
    """Exit code and output, of a process with a standard input of its own."""
    command = [sys.executable, "-m", "pytest_gpuserve.cli", "explain", *arguments]
    if piped:
        command = ["bash", "-c", 'exec "${@:2}" <(exec cat "$1")', "bash", arguments[-1], *command[:-1]]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False, **options)
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("name", DUMPS)
def test_stacks_are_known_however_they_come(name, tmp_path):
    path = STACKS / name
    expected, text = explained(str(path))
    assert text.startswith(("hang", "undecided", "slow"))
    said = text.replace(name, "")
    packs = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    for ending, packed in {**packs, "utf16": lambda data: data.decode().encode("utf-16")}.items():
        packet = tmp_path / f"{name}.{ending}"
        packet.write_bytes(packed(path.read_bytes()))
        code, text = explained(str(packet))
        assert (code, text.replace(packet.name, "")) == (expected, said), ending
        code, text = explained("-", input=packet.read_bytes())
        assert code == expected, ending
        assert text.splitlines()[0] == said.splitlines()[0], ending
    code, text = explained(str(path), piped=True)
    assert (code, text.splitlines()[0]) == (expected, said.splitlines()[0])


def test_stacks_from_standard_input_are_merged_with_others():
    _, alone = explained(str(STACKS / DUMPS[0]), "--json")
    _, both = explained(str(STACKS / DUMPS[0]), "-", "--json", input=(STACKS / DUMPS[1]).read_bytes())
    count = [sum(len(c["ranks"]) for c in json.loads(text)["classes"]) for text in (alone, both)]
    assert count[1] > count[0]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lambda data: data.decode().encode("utf-16")])
def test_a_log_from_a_pipe(pack, tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(pack(LOGS["oom"][1].encode()))
    for code, text in (explained("-", input=path.read_bytes()), explained(str(path), piped=True)):
        assert (code, text.splitlines()[0]) == (1, "verdict   oom (sglang, in spawn)"), text


def test_closed_standard_input():
    code, text = explained("-", preexec_fn=lambda: os.close(0))
    assert code == 2
    assert text.startswith("gpuserve: standard input is closed")
    assert len(text.splitlines()) == 1


def test_a_pipe_without_end_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr(logfile, "PATIENCE", 0.01)
    reader, writer = os.pipe()
    try:
        assert main(["explain", f"/dev/fd/{reader}"]) == 2
    finally:
        os.close(reader)
        os.close(writer)
    assert "did not end within" in capsys.readouterr().err


def test_a_kernel_file_that_has_nothing_now(monkeypatch, tmp_path, capsys):
    """As /proc/kmsg: a read without waiting gives None."""

    class Nothing(io.BufferedReader):
        def read(self, size=-1, /):
            return None

    path = tmp_path / "kmsg"
    path.write_bytes(b"")
    monkeypatch.setattr(logfile.foreign, "opened", lambda name: Nothing(io.FileIO(name)))
    assert main(["explain", str(path)]) == 5
    assert capsys.readouterr().err == ""


def test_several_logs_of_one_server(tmp_path, capsys):
    (tmp_path / "a.log").write_text(BEGIN + RANKS)
    (tmp_path / "b.log").write_text(FAILED.format("RuntimeError: it broke"))
    assert main(["explain", str(tmp_path / "a.log"), str(tmp_path / "b.log"), "--json"]) == 1
    cause = json.loads(capsys.readouterr().out)["cause"]
    assert cause["log"] == str(tmp_path / "b.log")
    assert cause["lineno"] == 4


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (None, [], "there is no such file"),
        (None, ["--check"], "there is no such file"),
        (None, ["--zip", "x.zip"], "there is no such file"),
        ("file", ["--check"], "thing is neither a directory nor a zip. Name"),
        ("directory", [], "holds no incident"),
        ("file", ["--engine", "nosuch\x1b[2J"], "--engine takes one of"),
    ],
)
def test_what_cannot_be_read(tmp_path, capsys, make, options, says):
    path = tmp_path / "thing"
    if make == "directory":
        path.mkdir()
    elif make == "file":
        path.write_text(READY)
    assert main(["explain", str(path), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "\x1b" not in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def crowd(place: Path) -> Path:
    (place / "thing" / "stacks").mkdir(parents=True)
    for name in ("incident.json", "bundle.json", "stacks/TP0.1.json", "dump.json"):
        os.mkfifo(place / "thing" / name)
    (place / "thing" / "log.txt").symlink_to("/dev/zero")
    return place / "thing"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("pipe", "it is no regular file"),
        ("socket", "it is no regular file"),
        ("device", "it is no regular file"),
        ("directory", "holds no incident"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--check",), ("--json",)])
def test_what_would_block_or_never_end(kind, says, options, tmp_path, odd_file):
    """In a process of its own: the test must end even where explain does not."""
    path = crowd(tmp_path) if kind == "directory" else odd_file(kind)
    command = [sys.executable, "-m", "pytest_gpuserve.cli", "explain", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr or (options == ("--check",) and "--check is for incidents" in done.stderr)


LONG = (BEGIN + RANKS + ("x" * 99 + "\n") * 20_000 + FAILED.format("RuntimeError: it broke")).encode()


@pytest.mark.parametrize("packed", [gzip.compress, lzma.compress, bz2.compress])
def test_a_packed_log_without_end_is_cut_and_says_so(told, monkeypatch, packed):
    monkeypatch.setattr(logfile, "MOST", 1 << 20)
    code, out, _ = told(packed(LONG))
    assert code == 3  # the failure stands behind what was read
    assert re.search(r"hint .*is longer than .*only its beginning was read", out)
    code, out, _ = told(packed(LONG[: 1 << 20]))
    assert "is longer than" not in out


def test_a_log_that_is_too_long_is_read_at_both_ends_or_refused(told, monkeypatch):
    monkeypatch.setattr(logfile, "MOST", 1 << 20)
    code, out, _ = told(LONG)
    assert code == 1
    assert f":{LONG.count(bytes([10]), 0, LONG.index(b'RuntimeError: it broke')) + 1} TP1" in out
    assert re.search(r"hint .*is longer than .*its beginning and its end were read", out)
    monkeypatch.setattr(logfile, "LARGEST", 1 << 20)
    code, out, err = told(LONG)
    assert (code, out) == (2, "")
    assert "give what matters alone" in err


def test_what_is_written_while_it_is_read_is_not_read(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(LONG)
    size = 0
    for chunk in logfile.LogFile(str(path)).chunks():
        size += len(chunk)
        assert size <= len(LONG)
        with path.open("ab") as other:
            other.write(b"y" * (1 << 19))
    assert size == len(LONG)


def test_a_log_that_asks_for_more_memory_than_anybody_has(told):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30, "preset": 0}]
    _, out, _ = told(lzma.compress(BEGIN.encode(), filters=filters), name="x.xz")
    assert "Memory usage limit" in out


def test_two_streams_of_xz_in_one_file(told):
    code, out, _ = told(lzma.compress(BEGIN.encode()) + bytes(4) + lzma.compress(READY.encode()))
    assert (code, "damaged" in out) == (0, False)
    code, out, _ = told(lzma.compress((BEGIN + READY).encode() * 99)[:-9])
    assert "damaged or incomplete" in out


def test_a_dump_too_large_to_be_one(told):
    code, out, err = told(b'[{"pid": 1, "frames": []},\n' + b" " * (17 << 20))
    assert (code, out) == (2, "")
    assert "looks like a stack dump, and it is larger than 16 MiB" in err


def test_a_log_with_words_of_a_dump_is_a_log_however_long(told):
    line = "frame #1: <unknown function> + 0x1f3a" + "." * 1000 + "\n"
    _, out, err = told("Exception raised from f at a.cpp:1 (most recent call first):\n" + line * (17 << 10))
    assert out.startswith("verdict")
    assert err == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_log_of_somebody_else(told, tmp_path, capsys):
    (tmp_path / "x.log").write_text(READY)
    (tmp_path / "x.log").chmod(0)
    assert main(["explain", str(tmp_path / "x.log")]) == 2
    assert "Permission denied" in capsys.readouterr().err


ZSTANDARD = b"\x28\xb5\x2f\xfd garbage"


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 5000, b"\x1f\x8b garbage", ZSTANDARD])
def test_garbage_is_undecided(told, content):
    code, out, err = told(content)
    if content is ZSTANDARD and "unpack it first" in err:
        pytest.skip("nothing here unpacks zstandard")
    assert (code, err) == (5, "")
    assert out.startswith("verdict   undecided")


def test_a_pipe_that_is_closed_early():
    """``gpuserve explain LOG | head -0``."""
    with subprocess.Popen(
        [sys.executable, "-m", "pytest_gpuserve.cli", "explain", "-", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        process.stdin.write(LOGS["oom"][1].encode())
        process.stdin.close()
        assert b"Traceback" not in process.stderr.read()
        process.wait(timeout=60)


@pytest.mark.parametrize("flavor", ["sglang", "vllm"])
def test_a_server_that_ran_out_of_memory(flavor, tmp_path, capsys):
    """The embedded engine's own log: the other rank complains too, and everybody is shut down."""
    path = tmp_path / "server.log"
    command = [sys.executable, "-m", "pytest_gpuserve.sim", "--flavor", flavor, "--tp", "2", "--port", "0"]
    with path.open("wb") as log:
        server = subprocess.Popen(
            [*command, "--model-path", "m", "--fault", "oom@kv_cache:rank=1"],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            start_new_session=True,
        )
        try:
            server.wait(timeout=60)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
    for options in ([], ["--engine", "sim"]):
        assert main(["explain", str(path), "--json", *options]) == 1
        found = json.loads(capsys.readouterr().out)
        assert (found["verdict"], found["cause"]["rank"], found["engine"]) == (
            "oom",
            "TP1",
            "sim" if options else flavor,
        )
        assert found["cause"]["line"].startswith("torch.OutOfMemoryError: CUDA out of memory")


STACKS = Path(__file__).parents[1] / "data" / "stacks"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("recorded_sglang_cpu_idle.txt", 0, "ready: every process is idle"),
        ("recorded_vllm_cpu_tree.txt", 0, "ready: every process is idle"),
        ("recorded_vllm_filelock.txt", 4, "slow: TP0 waits for the FlashInfer build lock"),
        ("pyspy_locals.txt", 5, "undecided: nothing in the evidence decides; pid 26351 is in inner"),
    ],
)
def test_stacks_alone_do_not_say_that_anybody_waited(name, code, text, capsys):
    """``gpuserve dump`` of a healthy server, explained elsewhere, is no hang."""
    assert main(["explain", str(STACKS / name)]) == code
    assert capsys.readouterr().out.startswith(text)


WATCHDOG = """\
[2026-08-20 09:00:01 TP{rank}] Decode batch. #running-req: 1, #token: 90, gen throughput (token/s): 40.1
[2026-08-20 09:06:55 TP{rank}] {sign}
[2026-08-20 09:06:55 TP{rank}] Pyspy dump for PID 70{rank}:
Process 70{rank}: sglang::scheduler_TP{rank}
Python v3.12.3 (/usr/bin/python3.12)

Thread 70{rank} (idle): "MainThread"
{frames}
    event_loop_overlap (scheduler.py:1100)
"""
SYNC = "    synchronize (torch/cuda/streams.py:231)\n    process_batch_result_decode (scheduler.py:350)"


def test_a_log_that_quotes_stacks_is_judged_by_them(tmp_path, capsys):
    """SGLang's watchdog prints every rank's stack into the log before it ends the server."""
    sign = "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"
    path = tmp_path / "server.log"
    path.write_text("".join(WATCHDOG.format(rank=rank, sign=sign, frames=SYNC) for rank in range(4)))
    assert main(["explain", str(path)]) == 3
    shown = capsys.readouterr().out
    assert shown.startswith("hang: TP0-3 wait for the overlapped batch on the GPU")
    assert main(["explain", str(path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["culprits"]) == ("gpuserve.verdict/1", [])
    assert any("watchdog timeout" in fact["claim"] for fact in found["facts"])


def test_a_log_keeps_its_verdict_where_quoted_stacks_decide_nothing(tmp_path, capsys):
    path = tmp_path / "server.log"
    path.write_text(WATCHDOG.format(rank=0, sign="Pyspy failed to dump PID 701.", frames="    own (my/own.py:3)"))
    main(["explain", str(path), "--json"])
    assert json.loads(capsys.readouterr().out)["schema"] == "gpuserve.triage/1"


CRASHED = """\
Fatal Python error: {how}

Thread 0x00007f{rank} (most recent call first):
  File "/x/zmq/sugar/socket.py", line 975 in recv_pyobj
  File "/x/sglang/srt/managers/scheduler.py", line 1075 in recv_requests
  File "/x/sglang/srt/managers/scheduler.py", line 2640 in event_loop_overlap
"""


@pytest.mark.parametrize(
    ("how", "ranks", "culprits"),
    [
        ("Segmentation fault", (3,), ["TP3"]),
        ("Segmentation fault", (3, 1), []),
        ("Aborted", (3,), []),
    ],
)
def test_a_stack_that_an_interpreter_prints_at_its_end_is_no_hang(how, ranks, culprits, tmp_path, capsys):
    path = tmp_path / "crash.txt"
    dumps = (f"rank {rank}:\n{CRASHED.format(how=how, rank=rank)}" for rank in ranks)
    path.write_text("\n".join(dumps))
    assert main(["explain", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["culprits"]) == ("crash", culprits)
    assert f"Fatal Python error: {how}" in found["text"]


def test_the_verdict_is_shown_whole(capsys):
    """One paragraph to paste: only the classes below it are cut to the width of a page."""
    main(["explain", str(STACKS / "sglang_tp0_eagle_tree_sampling.txt")])
    verdict = capsys.readouterr().out.splitlines()[0]
    assert len(verdict) > 200
    assert not verdict.endswith("…")


@pytest.mark.parametrize(
    "prefix", ["engine-1  | ", "> ", "        ", "(EngineCore pid=70) ", "Dec 19 02:07:16 h b[1]: "]
)
def test_a_dump_is_known_behind_prefixes(prefix, tmp_path, capsys):
    lines = (STACKS / "sglang_tp0_eagle_tree_sampling.txt").read_text().splitlines()[1:]
    path = tmp_path / "paste.txt"
    path.write_text("\n".join(prefix + line for line in lines))
    main(["explain", str(path)])
    assert capsys.readouterr().out.startswith("hang: look at the GPU")
