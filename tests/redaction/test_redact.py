"""A corpus of secrets in odd places; what must stay; streams cut anywhere."""

from __future__ import annotations

import json
import re
import time
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.redaction.redact import Redactor
from pytest_gpuserve.redaction.sensitive import is_secret_name, known_secrets
from pytest_gpuserve.redaction.stream import RedactingWriter

KEY = "k9-Wq7!pZ"  # matches no known shape: only its name gives it away


def redactor(known=()):
    return Redactor(known, home="/home/alice", hosts=["gpubox17", "gpubox17.lab.example.net"])


NAMED = [
    f"--api-key {KEY} --tp 8",
    f"--api-key={KEY} --tp 8",
    f"ServerArgs(model_path='/m', api_key='{KEY}', admin_api_key=None, tp_size=8)",
    f'{{"api_key": "{KEY}", "tp": 8}}',
    '{"args": "{\\"api_key\\": \\"' + KEY + '\\"}"}',
    f"argv=['python', '--api-key', '{KEY}', '--tp', '8']",
    f"HF_TOKEN={KEY} VLLM_API_KEY={KEY}",
    f"export OPENAI_KEY='{KEY}'",
    f"Authorization: Bearer {KEY}",
    f"Authorization: Basic {KEY}=",
    f'"authorization": "Bearer {KEY}"',
    f"headers=[(b'authorization', b'Bearer {KEY}')]",
    f"curl -H 'X-Api-Key: {KEY}' http://localhost:8000/v1",
    f"curl -u bob:{KEY} localhost",
    f"https://bob:{KEY}@huggingface.co/model",
    f"https://s3.example.com/x?X-Amz-Signature={KEY}&y=1",
    f"password: {KEY}",
    f"db_password='{KEY}'",
    f"Cookie: session={KEY}; x=y",
    f"{{'password': '{KEY}'}}",
    f"--hf-token\n{KEY}\n--tp\n8",
    f"--api-key \\\n  {KEY} \\\n --tp 8",
    f'"api_key":\n    "{KEY}"',
    f" 50%|#####     | 4/8 api_key='{KEY}'\r 60%|######    | 5/8",
    f"wandb_api_key => {KEY}",
    f"api_keys=['{KEY}', 'other']",
    f"config.auth_token = {KEY}",
    f"login with password {KEY} now",
    f"the password is {KEY}.",
    f"API key: {KEY}, they say",
    f"pwd={KEY}",
    f'{{"pwd": "{KEY}"}}',
    f"redirected to /login%3Ftoken%3D{KEY}%26next%3D1",
    f"GET /v1?config=%7B%22api_key%22%3A%22{quote(KEY)}%22%7D",
    f"X-Amz-Signature={KEY}",
    f"x-goog-signature: {KEY}",
    f"wandb login {KEY}",
    f"$ wandb login --relogin --host=x {KEY}",
]
SHAPED = [
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "sk-proj-abc123DEF456ghi789",
    "sk-ant-api03-abcdefgh12345",
    "ghp_abcdefghijklmnopqrst1234",
    "github_pat_11ABCDEFG0abcdefghij_kl",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-1234567890-abcdefghij",
    "nvapi-abcdefghijklmnop1234",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
    "AIzaSyA-abcdefghijklmnopqrstuvwxyz12345",
]


@pytest.mark.parametrize("text", NAMED)
def test_named_secrets(text):
    shown = redactor().redact(text)
    assert KEY not in shown
    assert "<secret-" in shown
    assert redactor().redact(shown) == shown


@pytest.mark.parametrize("secret", SHAPED)
@pytest.mark.parametrize("frame", ["{}", "x={}, y", "'{}'", '{{"k":"{}"}}', "a {}\r b", "pulling with {}: 401", "{}{{"])
def test_shaped_secrets(secret, frame):
    assert secret not in redactor().redact(frame.format(secret))


def test_private_key():
    body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n" * 5
    text = f"a\n-----BEGIN RSA PRIVATE KEY-----\n{body}-----END RSA PRIVATE KEY-----\nb"
    assert redactor().redact(text) == "a\n<secret-1>\nb"
    assert "MIIE" not in redactor().redact(text[:80])


def test_known_values_are_found_anywhere_and_in_any_writing():
    known = 'pa/ss "wörd" 1'
    r = redactor([known])
    for form in (known, json.dumps(known), json.dumps({"x": known}), "pa%2Fss%20%22w%C3%B6rd%22%201", repr(known)):
        shown = r.redact(f"url?q={form}&x")
        assert "ss" not in shown
        assert "<secret-1>" in shown
    assert r.redact('pa/ss\n "wörd" 1') == 'pa/ss\n "wörd" 1'  # not the value: a break takes no characters away
    wrapped = redactor(["s3cr3t-value-of-note"]).redact("x s3cr3t-va\n    lue-of\r-note y")
    assert wrapped == "x <secret-1> y"


def test_known_secrets_come_from_environments_and_command_lines():
    environment = {
        "HF_TOKEN": "abcdefgh",
        "MY_PASSWORD": "hunter2hunter2",
        "TOKENIZERS_PARALLELISM": "false",
        "EOS_TOKEN": "endoftext",
        "PWD": "/some/where/long",
        "SSH_KEY_PATH": "/some/path/key",
        "API_KEY": "12345",
        "SOME_SECRET": "true",
        "OPENAI_API_KEY": "sglang",
        "POSTGRES_PASSWORD": "scheduler",
        "CI_JOB_TOKEN": "127.0.0.1",
        "PATH": "/usr/bin:/bin",
    }
    argv = ["server", "--api-key", "zyxwvut", "--tp", "8", "--admin-api-key=qwertyui", "--max-new-tokens", "100000"]
    assert known_secrets([environment], argv) == {"abcdefgh", "hunter2hunter2", "zyxwvut", "qwertyui"}
    shown = Redactor.of(environment, argv=argv).redact("it is abcdefgh, not zyxwvut")
    assert shown == "it is <secret-1>, not <secret-2>"


@pytest.mark.parametrize(
    "word",
    ['{"x": {"api_key": "zyx1wvut"}}', "--config={'password': 'zyx1wvut'}", "HF_TOKEN=zyx1wvut", "X-Api-Key: zyx1wvut"],
)
def test_a_secret_inside_a_word_of_the_command_line_is_known_as_well(word):
    for known in (Redactor.of(argv=["env", word]), Redactor.of({"ARGS": word})):
        assert known.redact("it is zyx1wvut") == "it is <secret-1>"
    plain = Redactor.of(argv=[word.replace("zyx1wvut", "default")])
    assert plain.redact("the default model") == "the default model", "a plain word would stain everything"


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=16, prompt_tokens: 5, tokens/s: 81.2, #cached-token: 0, token usage: 0.01, eos_token='</s>'",
        "max_total_num_tokens=16384, chunked_prefill_size=8192, tokenizer_path='/models/x', skip_tokenizer_init=False",
        "api_key=None admin_api_key=null password= token=5 auth=True",
        "cache_key='abc' sort_key=len public_key=x keyboard: us monkey=3",
        "[2026-11-20 10:22:31 TP0] Load weight begin. avail mem=75.10 GB",
        "INFO 11-20 10:22:31 [core.py:60] Initializing a V1 LLM engine (v0.24.0) with config: model='tiny'",
        "127.0.0.1:30000 0.0.0.0:8000 [::1]:30000 http://localhost:8000/health http://127.0.0.1:8/v1",
        "nvidia-cublas-cu12==12.4.5.8 driver version: 570.86.10.1 torch 2.11.0+cu130",
        "https://github.com/sgl-project/sglang/issues/11275 https://docs.vllm.ai/en/latest/",
        "0000:dc:00.0 c10d::ProcessGroupGloo std::a::b 10:22:31,123 pthread_cond_wait@GLIBC_2.2.5 a@b",
        'Thread 131810 (idle): "MainThread"\n    wait (threading.py:355)',
        "hf_hub_download hf_overrides sk-learn threading.local asyncio.runners.run torch.cuda.streams",
        "--host 0.0.0.0 --port 30000 --dist-init-addr 127.0.0.1:5000 host='127.0.0.1' addr=0x7f00aa",
        "/models/home-made/x /srv/data/root/y /rootless /usr/lib/python3.12/threading.py",
        "text ended; content-length: 12; prompt: None, text='' input_ids=[] messages=[]",
        "max_tokens 4 tokens=128 password_file=/etc/x1y2 --password-file x1y2z3 password_file x1y2z3 token usage: 0.00",
        "docker run -u 1000:1000 --user 1000:1000 nccl 2.21.5.1 cuDNN 9.1.0.70 NCCL [TP0]:12 cache[layer]:1000",
        "password authentication v2 failed (3 of 5), wrong password at 10:22:31, no password for node7, password: ****",
        "PWD=/srv/x9y8z7 pwd: ~/a1b2c3 pwd=$HOME1 signature=3a4b5c node-3 login at 10:22:31 wandb login again",
        "GET /metrics?match%5B%5D=up%3D1&max_tokens%3D16 50%3D 100%",
        "[rank0]:[E1120 ProcessGroupNCCL.cpp:632] [Rank 0] NCCL version 2.27.3+cuda12.9 socket [TP0]: x<1024>",
        "localhost:2093:2210 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct comm 0x55 rank 0",
        "basic usage of the bearer authentication; the secret is out; key: value; author=someone",
    ],
)
def test_evidence_stays(text):
    assert redactor().redact(text) == text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("--model /home/alice/models/x", "--model ~/models/x"),
        ("File \"/home/bob/a.py\"", "File \"/home/<user-1>/a.py\""),
        ("/nfs/home/carol/x /Users/dave/y /root/.cache/z", "/nfs/home/<user-1>/x /Users/<user-2>/y /root/.cache/z"),
        ("connect to 10.1.2.3:5000 and 10.1.2.3", "connect to <address-1>:5000 and <address-1>"),
        ("tcp://192.168.1.17:29500", "tcp://<address-1>:29500"),
        ("fe80::1ff:fe23:4567:890a%eth0 [2001:db8::17]:80", "<address-1>%eth0 [<address-2>]:80"),
        ("mac 0a:1b:2c:3d:4e:5f", "mac <address-1>"),
        ("on gpubox17 and GPUBOX17.lab.example.net.", "on <host-1> and <host-2>."),
        ("http://internal-llm.corp.net:80/v1", "http://<host-1>:80/v1"),
        ("ip-10-0-3-17.ec2.internal says", "<host-1> says"),
        ("node-7.cluster.local", "<host-1>"),
        ("host='gpu12' --host gpu12 MASTER_ADDR=gpu12", "host='<host-1>' --host <host-1> MASTER_ADDR=<host-1>"),
        ("gpu-b7:2093:2210 [1] NCCL INFO x", "<host-1>:2093:2210 [1] NCCL INFO x"),
        ("(TP1) gpu_b7:20:21 [-1] misc/socket.cc:50 NCCL W", "(TP1) <host-1>:20:21 [-1] misc/socket.cc:50 NCCL W"),
        ("NCCL WARN Connect to gpu-b7<41235> failed", "NCCL WARN Connect to <host-1><41235> failed"),
        ("The client socket cannot reach [gpu-b7]:29500", "The client socket cannot reach [<host-1>]:29500"),
        ("from alice.smith@example.org to", "from <address-1> to"),
    ],
)  # fmt: skip
def test_places_and_names(raw, shown):
    assert redactor().redact(raw) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Received request 1: prompt: 'My name is Al\\'s', params: SamplingParams(n=1), prompt_token_ids: [1, 3926]",
        "Receive: obj=GenerateReqInput(rid='7', text='My name is Al', input_ids=[1, 3926, 5], sampling_params={})",
        "Finish: out={'text': 'My name is Al', 'output_ids': [1, 3926], 'meta_info': {'id': '7'}}",
        '{"messages": [{"role": "user", "content": "My name is Al] 3926"}], "max_tokens": 3}',
        '{"body": "{\\"prompt\\": \\"My name is \\\\\\"Al\\\\\\" 3926\\", \\"n\\": 1}"}',
        "input_ids=tensor([[1, 3926],\n        [3926, 4]], device='cuda:0')",
        '"input_ids": [\n   1,\n   3926\n ],\n "n": 2',
        "prompt='My name is Al and the line is cut",
        "origin_input_ids=[3926, 3926, 3926\n[2026-11-20 10:00:00 TP0] next line",
    ],
)
def test_prompts_and_token_ids(text):
    shown = redactor().redact(text)
    assert "name is" not in shown
    assert "3926" not in shown
    assert "<prompt-1: " in shown
    for kept in ("SamplingParams(n=1)", "meta_info", "max_tokens", 'n\\": 1', "sampling_params", "next line", '"n": 2'):
        assert (kept in shown) == (kept in text)


def test_same_value_same_placeholder_over_calls_and_writings():
    r = redactor()
    first = r.redact(f"--api-key {KEY}")
    assert r.redact(f'"api_key": "{KEY}", "password": "other-1"') == '"api_key": "<secret-1>", "password": "<secret-2>"'
    assert first == "--api-key <secret-1>"
    one, two = (r.redact(f"prompt: 'hello {n}'") for n in "aa")
    assert one == two != r.redact("prompt: 'hello b'")


def test_environment_is_an_allow_list():
    shown = redactor().environment(
        {
            "CUDA_VISIBLE_DEVICES": "0,1",
            "NCCL_DEBUG": "INFO",
            "VLLM_API_KEY": KEY,
            "HF_TOKEN": KEY,
            "HOME": "/home/alice",
            "PYTHONPATH": "/home/alice/lib",
            "SECRET_PROJECT": "x",
            "GPUSERVE_COOKIE": "1:2:3",
        }
    )
    assert shown == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "~/lib",
        "VLLM_API_KEY": "<secret-1>",
    }


def test_json_values():
    value = {
        "args": {"api_key": KEY, "tp": 8, "none": None},
        "argv": ["--x", "/home/alice/m", "--api-key", KEY, f"--hf-token={KEY}"],
        "n": [1, {"token": KEY}],
    }
    assert redactor().value(value) == {
        "args": {"api_key": "<secret-1>", "tp": 8, "none": None},
        "argv": ["--x", "~/m", "--api-key", "<secret-1>", "--hf-token=<secret-1>"],
        "n": [1, {"token": "<secret-1>"}],
    }


def stream(chunks, known=(), limit=1 << 16):
    out = []
    with RedactingWriter(redactor(known), out.append, limit) as writer:
        for chunk in chunks:
            writer.feed(chunk)
    return "".join(out)


CORPUS = "\n".join([*NAMED, *SHAPED, "x known-value-17 y", "wrapped known-va\nlue-17", "end"])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_stream_cut_anywhere(size):
    shown = stream([CORPUS[i : i + size] for i in range(0, len(CORPUS), size)], ["known-value-17"])
    for secret in (KEY, *SHAPED, "known-va"):
        assert secret not in shown
    assert shown.endswith("end")
    assert "60%|######" in shown


def test_stream_of_plain_text_is_unchanged():
    text = "a line\n\n 10%|#  |\r 20%|## |\rINFO x=1\r\nlast without end"
    for size in (1, 5, 100):
        assert stream([text[i : i + size] for i in range(0, len(text), size)]) == text


def test_stream_private_key_and_long_lists():
    body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n" * 30
    text = f"a\n-----BEGIN PRIVATE KEY-----\n{body}-----END PRIVATE KEY-----\nb\n"
    assert stream(text.splitlines(True)) == "a\n<secret-1>\nb\n"
    ids = '"input_ids": [\n' + "  3926,\n" * 5000 + "  3926\n],\nafter the list\n"
    shown = stream(ids.splitlines(True), limit=2000)
    assert "3926" not in shown
    assert "after the list" in shown


def test_stream_of_one_endless_line_takes_constant_memory():
    biggest = 0
    out = []
    writer = RedactingWriter(redactor(["known-value-17"]), out.append, limit=10_000)
    for n in range(3000):
        writer.feed(f"x api_key={KEY} known-value-17 " + "y" * 500)
        biggest = max(biggest, sum(map(len, writer._pending)) + len(writer._held))
        assert n < 40 or len(out) <= 1
    writer.feed("\nnext\n")
    writer.close()
    shown = "".join(out)
    assert biggest < 12_000
    assert KEY not in shown
    assert "known-va" not in shown
    assert len(shown) < 12_000
    assert re.search(r"<the rest of a line of 1\d{6} characters left out>\nnext\n$", shown)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*NAMED, *SHAPED, " ", "\n", "\r", "'", '"', "\\", "[", "prompt='", "x"]), max_size=12),
    st.data(),
)
def test_no_secret_survives_any_company(pieces, data):
    """Whatever stands around them, and wherever the stream is cut."""
    text = " \n".join(pieces)
    whole = redactor([KEY]).redact(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, max(len(text), 1)), max_size=5)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for shown in (whole, stream(chunks, [KEY])):
        for secret in (KEY, *SHAPED):
            assert secret not in shown


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_taken_and_redacting_twice_changes_nothing(text):
    r = redactor(["known-value-17"])
    once = r.redact(text)
    assert r.redact(once) == once


def test_names():
    for name in (
        "api_key",
        "--api-key",
        "X-Api-Key",
        "apiKey",
        "HF_TOKEN",
        "token",
        "OPENAI_KEY",
        "db.password",
        "client_secret",
    ):
        assert is_secret_name(name), name
    for name in (
        "key",
        "max_tokens",
        "eos_token",
        "tokenizer",
        "ssl_keyfile",
        "KEY_PATH",
        "auth_url",
        "PWD",
        "cache_key",
        "compass",
    ):
        assert not is_secret_name(name), name


HOSTILE = ["a" * 50_000, "key=" * 10_000, "'" * 30_000, "[" * 30_000, "prompt=[" * 5000, "--api-key " * 5000]
HOSTILE += [":" * 30_000, "1." * 20_000, "/home" * 8000, "a@" * 20_000, "\\" * 30_000, "a-" * 20_000, "http://" * 8000]
HOSTILE += [
    "prompt='" * 5000,
    "\\'" * 20_000,
    "password=" * 7000,
    "a:b:" * 16_000,
    "%3D" * 20_000,
    "password%3Da1" * 5000,
    "password a1" * 6000,
    "NCCL socket [a" * 5000,
    "NCCL " + "a" * 50_000,
    "wandb login --a " * 4000,
    "-----BEGIN PRIVATE KEY-----" * 2000,
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: line[:12])
def test_hostile_lines_cost_little_time(line):
    began = time.monotonic()
    redactor(["known-value-17"]).redact(line)
    redactor(["known-value-17"]).unfinished(line)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "address",
    [
        "hooks.slack.com/services/" + "T012AB/B034CD/x9Y8z7W6v5",
        "hooks.slack.com/workflows/" + "T012AB/A034CD/x9Y8z7W6v5",
        "discord.com/api/webhooks/" + "1234567890/x9Y8z7W6v5",
    ],
)
def test_an_address_that_anybody_may_post_to_is_a_secret(address):
    shown = Redactor(hosts=()).redact(f"alerts go to https://{address}, it says")
    assert shown == "alerts go to https://<secret-1>, it says"
    assert Redactor(hosts=()).redact(shown) == shown
