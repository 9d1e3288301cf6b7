"""SGLang's launcher: a scheduler a rank and a detokenizer; whatever goes wrong in one of them ends all by SIGKILL."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from .collective import ring_links
from .config import Options
from .launch import Server
from .link import Link, pair
from .scheduler import run_detokenizer_process, run_scheduler_process
from .script import emit

if TYPE_CHECKING:
    from .frontend import FrontEnd


class SglangServer(Server):
    """``sglang serve``."""

    def line(self, text: str) -> None:
        emit(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}\n")

    def start(self) -> tuple[Link, Link]:
        o = self.options
        self.line(f"server_args=ServerArgs({', '.join(f'{name}={value!r}' for name, value in server_args(o).items())})")
        requests, rank0_requests = pair()
        rank0_outputs, detokenizer_inbox = pair()
        detokenizer_outbox, outputs = pair()
        rings = ring_links(o.tp)
        me = os.getpid()
        for rank, ring in enumerate(rings):
            ends = (rank0_requests, rank0_outputs) if not rank else (None, None)
            self.spawn(run_scheduler_process, rank, o, me, ring, *ends, name=f"scheduler_{rank}")
        self.spawn(run_detokenizer_process, o, me, detokenizer_inbox, detokenizer_outbox, name="detokenizer")
        theirs = [rank0_requests, rank0_outputs, detokenizer_inbox, detokenizer_outbox]
        for link in (*theirs, *(link for ring in rings for link in ring)):
            if link:
                link.close()
        return requests, outputs

    def open(self, front: FrontEnd) -> None:
        self.serve(front)
        self.line(f"INFO:     Started server process [{os.getpid()}]")
        self.line("INFO:     Waiting for application startup.")
        self.line("INFO:     Application startup complete.")
        self.line(f"INFO:     Uvicorn running on {self.address} (Press CTRL+C to quit)")
        threading.Thread(target=self.warm_up, args=(front,), name="_wait_and_warmup", daemon=True).start()

    def warm_up(self, front: FrontEnd) -> None:
        """A first request, before which /health says 503."""
        from .client import PROBE, EngineDead

        try:
            generation = front.client.submit(PROBE, 1, counted=False, phase="warmup")
            while not generation.get(60.0):
                pass
        except EngineDead:
            return
        emit(f'[{time.strftime("%Y-%m-%d %H:%M:%S")}] INFO:     127.0.0.1:0 - "POST /generate HTTP/1.1" 200 OK\n', 1)
        front.up = True
        self.line("The server is fired up and ready to roll!")

    def stop(self) -> None:
        self.line("INFO:     Shutting down")
        if self.ready:
            self.tell(("shutdown",))
            self.join_children()
        self.kill_children()
        self.line("INFO:     Application shutdown complete.")
        self.line(f"INFO:     Finished server process [{os.getpid()}]")

    def fail(self, child: BaseProcess | None) -> int:
        if child is None and not self.ready:
            self.line("Received sigquit from a child process. It usually means the child failed.")
        elif child is None:
            self.line("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
        elif self.ready:
            self.line(
                f"Subprocess {child.name} (pid={child.pid}) crashed with exit code {child.exitcode}. "
                f"Triggering SIGQUIT for cleanup..."
            )
        else:
            self.die_in_start(child)
        self.line(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
        self.kill_children()
        return -signal.SIGKILL

    def die_in_start(self, child: BaseProcess) -> None:
        try:
            raise RuntimeError(
                f"Rank {child.name.rpartition('_')[2]} scheduler died during initialization (exit code: "
                f"{child.exitcode}). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
                f"Run `dmesg -T | grep -i oom` to check."
            ) from None
        except RuntimeError:
            emit(traceback.format_exc())


def server_args(o: Options) -> dict[str, object]:
    """The arguments under SGLang's names, as its first log line and /get_server_info show them."""
    method = {"base": None, "mtp": "NEXTN"}.get(o.spec_decode, o.spec_decode.upper())
    return {
        "model_path": o.model,
        "tokenizer_path": o.model,
        "load_format": "auto",
        "host": o.host,
        "port": o.port,
        "context_length": o.context_length,
        "max_running_requests": o.max_running,
        "tp_size": o.tp,
        "random_seed": o.seed,
        "watchdog_timeout": o.watchdog_timeout or None,
        "soft_watchdog_timeout": None,
        "enable_metrics": True,
        "api_key": o.api_key or None,
        "served_model_name": o.served_model_name,
        "attention_backend": o.attention_backend,
        "speculative_algorithm": method,
        "speculative_draft_model_path": o.draft_model if o.has_draft else None,
        "speculative_num_steps": o.spec_steps if o.speculative else None,
        "speculative_eagle_topk": o.spec_topk if o.speculative else None,
        "speculative_num_draft_tokens": o.draft_length + 1 if o.speculative else None,
        "disable_cuda_graph": not o.cuda_graph,
        **dict(o.axes),
    }
