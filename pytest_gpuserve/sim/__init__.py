"""The embedded engine: a real multi-process inference server without torch and without a GPU.

``python -m pytest_gpuserve.sim --help``. Newcomers learn on it and every fault test uses it, so it behaves as SGLang
and vLLM do where that matters to a person who looks at a sick server: the same process tree and titles, the same log
lines, the same phases in the same order, ranks that block in real system calls, a ``/health`` that says 200 while no
token moves.

============== ==========================================================================================
module         what it holds
============== ==========================================================================================
options        the command line; config holds the values that every process gets
launch         the first process: starts the others, watches them, serves HTTP, ends them
frontend       HTTP: openai (requests and answers), metrics (Prometheus text)
scheduler      batching; engine_core and workers are vLLM's processes, schedulers and detokenizer SGLang's
runner         one rank's phases and forward passes; device is where its work happens and faults strike
collective     all-reduce, broadcast and barrier over a ring of sockets
stalls         the calls in which a struck rank blocks
script         the log lines of each engine
============== ==========================================================================================

A rank imports as little as it can: eight interpreters start in well under a second on two cores.
"""
