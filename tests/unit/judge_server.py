"""An endpoint for judges that does what a script says, and counts what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kedge.ext.judge.judges import Endpoint

PROMPTS = [f"prompt {i}" for i in range(40)]
GOOD, BAD = [f"good {i}" for i in range(40)], [f"bad {i}" for i in range(40)]


class Server:
    """An OpenAI-compatible endpoint that does what a script says; counts what it was asked."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paid = 0
        outer, turn = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with turn:
                    number = len(outer.asked)
                    outer.asked.append(body)
                    outer.headers.append(dict(self.headers))
                found = script(number, body)
                status, extra, reply = found if isinstance(found, tuple) else (200, {}, found)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                outer.paid += status == 200
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


def serving() -> Iterator[Callable[..., Server]]:
    """Starts servers and closes them all; for ``pytest.fixture``."""
    made: list[Server] = []

    def start(script: Callable[[int, dict[str, Any]], Any]) -> Server:
        made.append(Server(script))
        return made[-1]

    try:
        yield start
    finally:
        for server in made:
            server.close()


def reply(text: str) -> dict[str, Any]:
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    return {"choices": [{"message": {"content": text}}], "usage": usage}


def honest(number: int, body: dict[str, Any]) -> dict[str, Any]:
    """Prefers the answer that says good."""
    text = body["messages"][0]["content"]
    first = text.split("<response_A>\n")[1].split("\n")[0]
    return reply(f"It is better.\nWinner: {'A' if first.startswith('good') else 'B'}")


def endpoint(server: Server, **options: Any) -> tuple[Endpoint, list[float]]:
    waits: list[float] = []
    return Endpoint(server.url, "judge-1", sleep=waits.append, **options), waits
