"""The pool: starts by hand, who holds a server and how long, and when a server serves no other test."""

from __future__ import annotations

import json

HEAD = """
import json, os, pathlib, time
import pytest
from pytest import fixture, mark
from pytest_gpuserve import procfs
from pytest_gpuserve.errors import ServerStartError, SpecError
from pytest_gpuserve.spec import ServerSpec

def alive(server): return procfs.same(server.record.root)
"""


def test_starts_by_hand(project):
    project.write(
        conftest="""
        def pytest_gpuserve_server_started(server):
            print("STARTED", server.spec.id)
        """,
        test_it=HEAD
        + """
def test_every_way_to_ask(gpuserve_pool):
    one = gpuserve_pool.get(engine="sim", tp=1)
    assert gpuserve_pool.get({"engine": "sim"}, tp=1) is one
    assert gpuserve_pool.get(ServerSpec("sim")) is one
    two = gpuserve_pool.get(engine="sim", tp=1, cuda_graph="off")
    assert two is not one
    assert alive(one) and alive(two)

@fixture(scope="module")
def wide(gpuserve_pool):
    server = gpuserve_pool.get(engine="sim", tp=1, model="wide")
    yield server
    assert alive(server)  # until the fixture itself is torn down

@fixture
def narrow(gpuserve_pool):
    return gpuserve_pool.get(engine="sim", tp=1, model="narrow")

seen = {}

def test_held_by_a_module(wide, narrow):
    seen.update(wide=wide, narrow=narrow)

def test_still_held(wide):
    assert wide is seen["wide"] and alive(wide)
    assert not alive(seen["narrow"])  # no later test is known to want it

def test_let_go_early(gpuserve_pool):
    server = gpuserve_pool.get(engine="sim", tp=1, model="early", startup_timeout=30)
    gpuserve_pool.release(server)
    gpuserve_pool.release(server)
    assert alive(server)

@mark.gpuserve(engine="sim", tp=2)
def test_marks_of_the_test(gpuserve_pool):
    assert gpuserve_pool.get().spec.tp == 2

@mark.gpuserve(engine="sim", tp=2)
def test_dynamic(request):
    server = request.getfixturevalue("server")
    assert server.spec.tp == 2
""",
    )
    result = project.run("-rP")
    result.assert_outcomes(passed=5, errors=1)  # a mark on a test that seems to use no server
    result.stdout.fnmatch_lines(["*test_dynamic*", "*the gpuserve mark has no effect*"])
    assert result.stdout.str().count("STARTED sim-tp1") == 5
    project.assert_nothing_left()


def test_errors_of_starts_by_hand_can_be_caught_and_end_in_the_tests_own_code(project):
    project.write(
        test_it=HEAD
        + """
def test_caught(gpuserve_pool):
    with pytest.raises(ServerStartError, match="exited with code 3") as caught:
        gpuserve_pool.get(engine="command", command=["sh", "-c", "exit 3", "{port}"])
    assert caught.value.verdict == "crash"
    with pytest.raises(SpecError, match="gpuserve_pool.get: unknown option 'tpp'"):
        gpuserve_pool.get(engine="sim", tpp=2)

def test_not_caught(gpuserve_pool):
    gpuserve_pool.get(engine="command", command=["sh", "-c", "exit 4", "{port}"])

def test_a_mistake(gpuserve_pool):
    gpuserve_pool.get(engine="sim", tpp=2)
"""
    )
    result = project.run()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines([">   *gpuserve_pool.get(engine=*", "E *SpecError: gpuserve_pool.get: unknown option*"])
    result.stdout.fnmatch_lines(
        [">   *gpuserve_pool.get(engine=*", "E *ServerStartError: server command-tp1-* exited with code 4*"]
    )
    assert "pool.py" not in result.stdout.str()
    assert "spec.py" not in result.stdout.str()
    project.assert_nothing_left()


def test_what_is_secret_of_a_server_that_fails_is_told_to_nobody(project):
    project.write(
        test_it=HEAD
        + """
    def words(*more):
        return ["sh", "-c", 'echo api_key=$1; echo see https://$1@git.example.com/x; echo it was $1; exit 3', *more]

    ARGS = {"api-key": "S3cr3t" + "Word"}

    @mark.gpuserve(engine="command", command=words("sh", "S3cr3t" + "Word", "{port}"), args=ARGS)
    def test_start(server): ...

    @mark.gpuserve(engine="command", command=words("--api-key", "S3cr3t" + "Word"), args=ARGS)
    def test_no_port(server): ...

    def test_dies(gpuserve_pool):
        from pytest_gpuserve.errors import ServerError
        code = (
            "import http.server as h, os, sys\\n"
            "class H(h.BaseHTTPRequestHandler):\\n"
            "    def do_GET(self):\\n"
            "        if 'die' in self.path: print('api_key=' + sys.argv[-1], flush=True); os._exit(5)\\n"
            "        self.send_response(200); self.end_headers()\\n"
            "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
        )
        server = gpuserve_pool.get(engine="command", command=["{python}", "-c", code, "{port}"], args=ARGS)
        server.get("/die")
""".replace("\n    ", "\n")
    )
    result = project.run("--junitxml=junit.xml")
    result.assert_outcomes(failed=1, errors=2)
    text = result.stdout.str()
    assert all(what in text for what in ("exited with code 3", "never says {port}", "exited with code 5"))
    for told in (text, project.output("junit.xml"), project.output("gpuserve-artifacts/results.jsonl")):
        assert "S3cr3tWord" not in told
    assert "--api-key <secret-" in text


def test_a_server_that_failed_a_test_serves_no_other(project):
    project.write(
        test_it=HEAD
        + """
pytestmark = mark.gpuserve(engine="sim", tp=1)
seen = []

def test_one(server):
    seen.append(server)

def test_fails(server):
    assert server is seen[0]
    assert 0

def test_fresh(server):
    assert server is not seen[0] and not alive(seen[0])
    seen.append(server)

@mark.xfail
def test_expected(server):
    assert 0

def test_skipped(server):
    pytest.skip("no")

def test_same(server):
    assert server is seen[1]
    os.kill(server.record.root.pid, 9)

def test_died_between_tests(server):
    assert server is not seen[1] and alive(server)
"""
    )
    result = project.run()
    result.assert_outcomes(passed=4, failed=1, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["3 server starts for 1 configuration, reused 4 times"])
    project.assert_nothing_left()


def test_the_test_in_progress_is_on_record(project):
    project.write(
        test_it=HEAD
        + """
@mark.timeout(30)
@mark.gpuserve(engine="sim", tp=1)
def test_it(server):
    path = server.directory / "current_test.json"
    found = json.loads(path.read_text())
    assert (found["test"], found["timeout"]) == ("test_it.py::test_it", 30)
    assert 0 < found["deadline"] - time.monotonic() < 30

@mark.gpuserve(engine="sim", tp=1)
def test_without_timeout(server):
    found = json.loads((server.directory / "current_test.json").read_text())
    assert found["test"] == "test_it.py::test_without_timeout"

@fixture(scope="module")
def wide(gpuserve_pool):
    return gpuserve_pool.get(engine="sim", tp=2)

@mark.parametrize("n", (1, 2))
def test_wide(wide, n):
    assert json.loads((wide.directory / "current_test.json").read_text())["test"] == f"test_it.py::test_wide[{n}]"
"""
    )
    project.run().assert_outcomes(passed=4)
    for server in project.servers():
        assert json.loads((server / "current_test.json").read_text())["test"] is None


def test_incident_hook_and_manual_dump(project):
    project.write(
        conftest="""
        def pytest_gpuserve_incident(server, incident):
            print("INCIDENT", server.spec.id, incident["reason"], incident["incident"])
        """,
        test_it=HEAD
        + """
@mark.gpuserve(engine="sim", tp=1)
def test_it(server):
    assert (server.dump() / "incident.json").exists()
    assert alive(server)
""",
    )
    result = project.run("-s", "--gpuserve-dump-timeout=20")
    result.assert_outcomes(passed=1)
    (incident,) = project.incidents()
    result.stdout.fnmatch_lines([f"*INCIDENT sim-tp1 manual {incident}"])
    project.assert_nothing_left()


def test_a_dump_that_the_test_asks_for_is_no_alarm(project):
    project.write(
        test_it=HEAD
        + """
@mark.gpuserve(engine="sim", tp=1)
def test_it(server):
    assert server.dump("by hand").is_dir()
"""
    )
    result = project.run("-rP")
    result.assert_outcomes(passed=1)
    assert "went off" not in result.stdout.str()
    assert "stuck in its own code" not in result.stdout.str()
    result.stdout.fnmatch_lines(["*(by hand): *"])
