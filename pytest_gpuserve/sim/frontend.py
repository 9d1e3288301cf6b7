"""The HTTP front end. ``/health`` says 200 once the server is up, whatever the ranks do."""

from __future__ import annotations

import hmac
import json
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import board, openai
from .client import PROBE, Choice, EngineClient, EngineDead
from .config import Options
from .metrics import Metrics
from .script import emit

BODY_LIMIT = 16 << 20
HEALTH_TIMEOUT = 20.0
"""SGLANG_HEALTH_CHECK_TIMEOUT's default, seconds."""


class ClientGone(Exception):
    """Nobody reads the answer."""


class FrontEnd(ThreadingHTTPServer):
    """Serves on a socket that is bound already."""

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, options: Options, bound: socket.socket, client: EngineClient, metrics: Metrics) -> None:
        super().__init__(bound.getsockname()[:2], Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.options = options
        self.client = client
        self.metrics = metrics
        self.up = False
        self.completions = 0
        self.began = time.time()
        self._count = threading.Lock()
        self._deaf = threading.Event()
        self._deaf_after = min(
            (f.requests for f in options.faults if (f.kind, f.phase) == ("deaf", "serving")), default=-1
        )

    def serve(self) -> None:
        """Answer from now on."""
        self.socket.listen(128)
        threading.Thread(target=self.serve_forever, args=(3600.0,), name="http", daemon=True).start()

    def admit(self, *, completion: bool) -> None:
        """Count completions; block for ever from the one on at which the server goes deaf."""
        with self._count:
            self.completions += completion
            if 0 <= self._deaf_after < self.completions:
                self._deaf.set()
        if self._deaf.is_set():
            threading.Event().wait()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that broke its connection is no trouble of ours; what else there is goes to the log."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            import traceback

            emit(f"ERROR:    Exception in ASGI application\n{traceback.format_exc()}")


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: FrontEnd
    timeout = 75
    looked = 0.0

    def do_GET(self) -> None:
        self.dispatch(GET)

    def do_POST(self) -> None:
        self.dispatch(POST)

    def dispatch(self, routes: dict[str, Callable[[Handler], None]]) -> None:
        path = self.path.partition("?")[0]
        self.server.admit(completion=routes is POST and path in POST)
        body = self.read_body()
        if body is None:
            return
        self.body = body
        route = routes.get(path)
        try:
            if not self.authorised(path):
                self.reply(401, {"error": "Unauthorized"})
            elif route:
                route(self)
            elif path in GET or path in POST:
                self.reply(405, {"detail": "Method Not Allowed"})
            else:
                self.reply(404, {"detail": "Not Found"})
        except openai.BadRequest as error:
            self.fail(error.status, str(error), error.kind)
        except EngineDead:
            why = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            self.fail(500, why, "InternalServerError")
        except (ClientGone, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def authorised(self, path: str) -> bool:
        """Bearer token where the engine asks for one: vLLM below /v1, SGLang everywhere but /health and /metrics."""
        key = self.server.options.api_key
        vllm = self.server.options.flavor == "vllm"
        if not key or (not path.startswith("/v1") if vllm else path.startswith(("/health", "/metrics"))):
            return True
        given = self.headers.get("Authorization") or ""
        return hmac.compare_digest(given.encode(), f"Bearer {key}".encode())

    def read_body(self) -> bytes | None:
        """The request's body; None after an answer that says what is wrong with its length."""
        given = self.headers.get("Content-Length", "0")
        if not given.isascii() or not given.isdigit() or self.headers.get("Transfer-Encoding"):
            self.close_connection = True
            self.fail(400, "a body needs a Content-Length", "BadRequestError")
            return None
        if int(given) > BODY_LIMIT:
            self.close_connection = True
            self.fail(413, f"the body is larger than {BODY_LIMIT} bytes", "BadRequestError")
            return None
        return self.rfile.read(int(given))

    # -- answers ------------------------------------------------------------------------------------------------------

    def reply(self, status: int, body: object = None) -> None:
        """JSON, text as it is, or nothing."""
        text = isinstance(body, str)
        data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8" if text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def fail(self, status: int, message: str, kind: str) -> None:
        error = {"message": message, "type": kind, "param": None, "code": status}
        vllm = self.server.options.flavor == "vllm"
        self.reply(status, {"error": error} if vllm else {"object": "error", **error})

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """uvicorn's access log."""
        if self.server.options.quiet:
            return
        host, port = self.client_address[:2]
        stamp = time.strftime("[%Y-%m-%d %H:%M:%S] ") if self.server.options.flavor == "sglang" else ""
        status = int(code)
        what = self.responses[status][0] if status in self.responses else ""
        line = self.requestline.encode("unicode_escape").decode()
        emit(f'{stamp}INFO:     {host}:{port} - "{line}" {status} {what}\n', 1)

    def log_error(self, format: str, *args: Any) -> None:
        """Errors of http.server itself, as uvicorn words them; a connection that was idle for long is none."""
        if format.startswith("code"):
            emit("WARNING:  Invalid HTTP request received.\n")

    # -- routes -------------------------------------------------------------------------------------------------------

    def health(self) -> None:
        self.reply(200 if self.server.up and not self.server.client.dead else 503)

    def health_generate(self) -> None:
        """One token through all ranks, as SGLang's; vLLM has no such page."""
        if not self.server.up:
            self.reply(503)
            return
        generation = self.server.client.submit(PROBE, 1, counted=False)
        end = time.monotonic() + HEALTH_TIMEOUT
        try:
            while time.monotonic() < end:
                if generation.get(1.0):
                    self.reply(200)
                    return
                self.check_client()
        finally:
            generation.close("abort")
        emit(
            f"Health check failed. Server couldn't get a response from detokenizer for last "
            f"{HEALTH_TIMEOUT:.0f} seconds.\n"
        )
        self.reply(503)

    def models(self) -> None:
        o = self.server.options
        owner = {"owned_by": o.flavor, "root": o.model, "parent": None, "max_model_len": o.context_length}
        model = {"id": o.served_model_name, "object": "model", "created": int(self.server.began), **owner}
        self.reply(200, {"object": "list", "data": [model]})

    def metrics(self) -> None:
        self.reply(200, self.server.metrics.text())

    def server_info(self) -> None:
        o = self.server.options
        length, rate = self.server.metrics.spec()
        states = [
            {"tp_rank": rank, "forward_ct": steps, "avg_spec_accept_length": length or None, "spec_accept_rate": rate}
            for rank, steps in enumerate(board.read(o.board, o.tp))
        ]
        hidden = {"api_key": "***"} if o.api_key else {}
        self.reply(200, {**dict(o.arguments), **hidden, "version": "0.5.12.post1", "internal_states": states})

    def model_info(self) -> None:
        o = self.server.options
        self.reply(200, {"model_path": o.model, "served_model_name": o.served_model_name, "is_generation": True})

    def version(self) -> None:
        self.reply(200, {"version": "0.24.0"})

    def chat_completions(self) -> None:
        self.complete(chat=True)

    def completions(self) -> None:
        self.complete(chat=False)

    def complete(self, *, chat: bool) -> None:
        server, o = self.server, self.server.options
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            raise openai.BadRequest("the body is not JSON") from None
        request = openai.parse(
            body,
            chat=chat,
            model=o.model,
            served=o.served_model_name,
            known=(o.served_model_name,) if o.flavor == "vllm" else None,
            context_length=o.context_length,
            salt=(o.seed or 0) * 1_000_003 + server.completions if o.seed is not None else time.time_ns(),
        )
        if not server.up:
            raise openai.BadRequest("the server is not ready", 503, "ServiceUnavailableError")
        server.metrics.admitted(request.prompt_tokens)
        choices: list[Choice] = []
        try:
            for prompt in request.prompts:
                choices.append(Choice(server.client.submit(prompt, request.max_tokens), request.stop))
            if request.stream:
                self.stream(request, choices)
            else:
                for choice in choices:
                    while not choice.reason:
                        self.step(choice)
                    choice.close(server.metrics)  # as in the engines, who has the answer finds it counted
                texts = [(choice.text, choice.reason) for choice in choices]
                self.reply(200, openai.answer(request, texts, sum(s.tokens for s in choices)))
        finally:
            for choice in choices:
                choice.close(server.metrics)

    def stream(self, request: openai.Completion, choices: list[Choice]) -> None:
        """Server-sent events, choice after choice in the order in which they make progress."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if request.chat:
                for index in range(len(choices)):
                    self.event(json.dumps(openai.chunk(request, index, None, None, role=True)))
            while running := [(i, s) for i, s in enumerate(choices) if not s.reason]:
                for index, choice in running:
                    text = self.step(choice)
                    if choice.reason:
                        choice.close(self.server.metrics)
                    if text or choice.reason:
                        self.event(json.dumps(openai.chunk(request, index, text, choice.reason or None)))
            if request.usage_in_stream:
                last = openai.chunk(request, 0, None, None)
                used = openai.usage(request, sum(s.tokens for s in choices))
                self.event(json.dumps({**last, "choices": [], "usage": used}))
        except EngineDead:
            error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
            self.event(json.dumps({"error": error}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data: str) -> None:
        text = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def step(self, choice: Choice) -> str:
        """The choice's next piece of text; looks after the client while there is none."""
        while True:
            if time.monotonic() - self.looked >= 1.0:
                self.looked = time.monotonic()
                self.check_client()
            if step := choice.generation.get(1.0):
                return choice.take(*step)

    def check_client(self) -> None:
        """Raises:
        ClientGone: it has closed the connection.
        """
        if select.select([self.connection], [], [], 0)[0]:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            try:
                if not self.connection.recv(1, flags):
                    raise ClientGone
            except OSError:
                raise ClientGone from None


GET: dict[str, Callable[[Handler], None]] = {
    "/health": Handler.health,
    "/health_generate": Handler.health_generate,
    "/v1/models": Handler.models,
    "/metrics": Handler.metrics,
    "/get_server_info": Handler.server_info,
    "/server_info": Handler.server_info,
    "/model_info": Handler.model_info,
    "/version": Handler.version,
}
POST: dict[str, Callable[[Handler], None]] = {
    "/v1/completions": Handler.completions,
    "/v1/chat/completions": Handler.chat_completions,
}
