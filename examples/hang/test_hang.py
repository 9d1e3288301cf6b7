"""What a caught hang looks like: ``pytest examples/hang``. Two of these three tests fail, on purpose."""

import pytest


def ask(server, prompt="2+2="):
    body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return server.post("/v1/completions", json=body).json()["choices"][0]["text"]


@pytest.mark.gpuserve(engine="sim", tp=8, startup_timeout=8, args={"fault": "sleep@cuda_graph:rank=3"})
def test_start_up_hangs(server):
    """Rank 3 never leaves CUDA graph capture: dumped and ended when the start-up budget is over."""
    assert ask(server)


@pytest.mark.timeout(6)
@pytest.mark.gpuserve(engine="sim", tp=8, args={"fault": "sleep@serving:rank=3"})
def test_request_hangs(server):
    """Rank 3 sleeps in the first forward pass: dumped and ended at 6 s, so that the request fails by itself."""
    assert ask(server)


@pytest.mark.timeout(6)
@pytest.mark.gpuserve(engine="sim", tp=8)
def test_the_session_goes_on(server):
    assert ask(server)
