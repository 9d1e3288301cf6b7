"""What a caught hang looks like: ``pytest examples/hang``. Two of these four tests fail, on purpose."""

import pytest


def ask(server, prompt="2+2="):
    body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return server.post("/v1/completions", json=body).json()["choices"][0]["text"]


@pytest.mark.gpuserve(engine="sim", tp=8, startup_timeout=8, args={"fault": "sleep@cuda_graph:rank=3"})
def test_start_up_hangs(server):
    """Rank 3 never leaves CUDA graph capture: dumped and ended when the start-up budget is over."""
    assert ask(server)


@pytest.mark.gpuserve(engine="sim", tp=8, args={"fault": "flock@serving:rank=3:requests=1"})
class TestServing:
    """Rank 3 waits for a lock from the second request on."""

    @pytest.mark.timeout(30)
    def test_first_request(self, server):
        assert ask(server)

    @pytest.mark.timeout(5)
    def test_second_request_hangs(self, server):
        """Dumped and ended at 5 s, so that the request fails by itself and pytest goes on."""
        assert ask(server)

    @pytest.mark.timeout(30)
    def test_next_test_gets_a_fresh_server(self, server):
        assert ask(server)
