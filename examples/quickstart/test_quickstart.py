"""A served model under test, without a GPU: one server with eight ranks, started once for both tests."""

import pytest


@pytest.mark.gpuserve(engine="sim", tp=8)
class TestCompletions:
    def ask(self, server, prompt):
        body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        return server.post("/v1/completions", json=body).json()["choices"][0]["text"]

    def test_answers(self, server):
        assert self.ask(server, "2+2=")

    def test_greedy_is_repeatable(self, server):
        assert self.ask(server, "Once upon a time") == self.ask(server, "Once upon a time")
