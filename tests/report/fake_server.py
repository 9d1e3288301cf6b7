"""A server as an incident meets it: a front end, ranks with an engine's titles, and one that is in the wrong place.

    fake_server.py PORT RANKS ANSWER [RANK=FAULT ...]

ANSWER: yes (200), no (accepts, never answers), 503. FAULT: late (is in another place than the others), die (ends with
exit code 7, never collected).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from setproctitle import setproctitle


def all_reduce() -> None:
    a, _b = socket.socketpair()
    a.recv(1)


def load_extension() -> None:
    time.sleep(600)


def rank(number: int, fault: str) -> None:
    setproctitle(f"sglang::scheduler_TP{number}")
    print(f"[2026-11-29 10:00:0{number % 10} TP{number}] Load weight begin. avail mem=75.00 GB", flush=True)
    if fault == "late":
        load_extension()
    if fault == "die":
        sys.exit(7)
    all_reduce()


class Handler(BaseHTTPRequestHandler):
    answer = "yes"

    def do_GET(self) -> None:
        if self.answer == "no":
            time.sleep(600)
        self.send_response(200 if self.answer == "yes" else 503)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    port, count, Handler.answer = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    faults = dict(entry.split("=") for entry in sys.argv[4:])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    ranks = [subprocess.Popen([sys.executable, __file__, "rank", str(n), faults.get(str(n), "")]) for n in range(count)]
    print("api_key='never-to-be-seen-17' prompt: 'my private words'", flush=True)
    print(f"fake server up on {port} with {len(ranks)} ranks", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        rank(int(sys.argv[2]), sys.argv[3])
    else:
        main()
