"""Lines that say nothing are passed over in one search of a block: nothing may be told otherwise for that."""

from __future__ import annotations

import random

import pytest

from pytest_gpuserve.diagnose import triage_shapes
from pytest_gpuserve.diagnose.literals import Words
from pytest_gpuserve.diagnose.triage import Triage, explain
from pytest_gpuserve.diagnose.triage_lines import pieces
from pytest_gpuserve.diagnose.triage_rules import load

HEAD = "[2031-01-05 11:26:53] server_args=ServerArgs(model_path='/m', tp_size=4)\n"
READY = "[2031-01-05 11:27:53] The server is fired up and ready to roll!\n"


def prose(number: int, chance: random.Random, tag: str = "") -> str:
    words = " ".join("".join(chance.choices("ghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(14))
    return f"[2031-01-05 12:{number // 60 % 60:02d}:{number % 60:02d}{tag}] {words}"


def log(chance: random.Random) -> str:
    """Prose of four ranks; a traceback of one without prefixes between lines of the others; a bar; then a death."""
    lines = [prose(n, chance, f" TP{n % 4}") for n in range(300)]
    lines += [
        "[2031-01-05 13:00:00 TP2] Scheduler hit an exception: Traceback (most recent call last):",
        *(f'  File "/opt/engine/module_{n}/{"gh" * 20}.py", line {n}, in run_{"k" * n}' for n in range(40)),
        "    " + "queue.transfer_" + "hijk" * 20,
        "torch.ops.Gone: " + "jump moon " * 10,
        "",
        "hij klm\r" + prose(1, chance),
    ]
    lines += [prose(n, chance, f" TP{n % 3}") for n in range(200)]
    lines += ["[2031-01-05 13:09:00] Received sigquit from a child process. It usually means the child failed."]
    return HEAD + READY + "\n".join(lines) + "\n"


def told(text: str, path, many: int, monkeypatch: pytest.MonkeyPatch) -> Triage:
    monkeypatch.setattr(triage_shapes, "_MANY", many)
    path.write_text(text)
    return explain([str(path)])


@pytest.mark.parametrize("seed", range(3))
def test_the_same_is_told_as_line_by_line(tmp_path, monkeypatch, seed):
    text = log(random.Random(seed))
    quick, slow = (told(text, tmp_path / "server.log", many, monkeypatch) for many in (1, 1 << 30))
    assert quick == slow
    assert quick.verdict == "crash"
    assert quick.cause is not None
    assert (quick.cause.line[:15], quick.cause.rank) == ("torch.ops.Gone:", "TP2")
    assert {label: rank.last_time for label, rank in quick.ranks.items()} == {
        "TP0": "2031-01-05 12:03:18",
        "TP1": "2031-01-05 12:03:19",
        "TP2": "2031-01-05 12:03:17",
        "TP3": "2031-01-05 12:04:59",
    }


def test_a_shape_that_speaks_once_is_none_that_says_nothing(tmp_path):
    """Two lines alike but for the letters of numbers: "dead" is left out of a shape."""
    shapes = triage_shapes.Shapes(load())
    lines = [b"x" * 70 + bytes([0x67 + n % 20]) * (n // 20 + 1) for n in range(200)]
    lines += [b"y" * 70 + b" the scheduler of rank 3 is dead", b"y" * 70 + b" the scheduler of rank 3 is "]
    names = [line.translate(None, triage_shapes.VARYING) for line in lines]
    assert names[-1] == names[-2]
    assert shapes.dull(lines, names) == set(names[:200])


def test_words_are_found_in_the_lines_that_hold_them():
    words = Words(load().gate.words)
    chance = random.Random(7)
    lines = [prose(n, chance).lower().encode() for n in range(400)]
    with_word = sorted(chance.sample(range(400), 50))
    for number, word in zip(with_word, chance.sample(sorted(words.words), 50), strict=True):
        lines[number] = lines[number][:40] + word.encode() + lines[number][40:]
    rough = words.rough_lines(b"\n".join(lines))
    assert set(with_word) <= rough
    assert len(rough) < 150
    assert [n for n in sorted(rough) if words.any_in(lines[n])] == [n for n, x in enumerate(lines) if words.any_in(x)]
    assert not words.rough_lines(b"")


def test_every_text_is_searched_by_an_end_of_its_own():
    for word in load().gate.words:
        assert Words([word, "never"]).any_in(f"zz{word}zz".encode()), word
        assert Words(load().gate.words).any_in(f"zz{word}zz".encode()), word


def test_records_behind_a_bar_are_cut_off():
    line = b"Loading: 100%|#| 1/1 [00:00<00:00, 1it/s](Worker_TP0 pid=7) INFO x[2031-01-05 11:26:53 TP1] y[rank2]:[E1 z"
    assert [piece[:12] for piece in pieces(line)] == [b"Loading: 100", b"(Worker_TP0 ", b"[rank2]:[E1 "]
    line = line.replace(b"INFO x[", b"INFO s[")
    assert [piece[:12] for piece in pieces(line)][2] == b"[2031-01-05 "
