"""What can go wrong, as a person is told it: one paragraph, what happened, which option or mark to change."""

from __future__ import annotations


class GpuserveError(Exception):
    """Base of every error this package raises on purpose; ``str(error)`` is the paragraph to show."""


class SpecError(GpuserveError):
    """A mark, an option or a configuration file describes a server that cannot exist."""


class EngineError(GpuserveError):
    """The engine is unknown, not installed, or cannot express what the spec asks for."""


class ServerError(GpuserveError):
    """A server did not do its job. ``verdict`` is one of :data:`pytest_gpuserve.vocabulary.Verdict`.

    ``incident`` is the directory of the evidence, or None when there is none.
    """

    def __init__(self, message: str, *, verdict: str = "undecided", incident: str | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.incident = incident


class ServerStartError(ServerError):
    """The server never became ready: it exited, hung, or ran out of its start-up budget."""


class ServerHungError(ServerError):
    """A ready server stopped answering; its stacks were taken, then it was ended.

    A test that goes on after it, with ``pytest.raises``, ``except`` or ``pytest.skip``, fails with it all the same:
    its server was ended. A hang that is known is told with ``pytest.mark.xfail(raises=ServerHungError)``.
    """


class ServerExitedError(ServerError):
    """A ready server's process ended by itself (exit code 0 is no excuse: vLLM 0.32 exits 0 after a worker's death)."""


class DegradedError(ServerError, AssertionError):
    """A server works, worse than a test asked for. The message has both numbers: what was asked and what was found."""

    def __init__(self, message: str, *, verdict: str = "degraded", incident: str | None = None) -> None:
        super().__init__(message, verdict=verdict, incident=incident)
