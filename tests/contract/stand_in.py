"""A stand-in for a vLLM server: its endpoints over a real model, with faults on request."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file


class StandIn:
    """Serves ``model`` as vLLM 0.32 would, without vLLM.

    ``faults`` are applied to the next requests for samples, one each: a status, a body, a function
    that changes a choice, or "lost" (never answered, and not counted among its requests).  Paths in
    ``busy`` are answered with 503 once.  A second request on a connection is lost, as when a server
    closes an idle connection at the moment of a request.
    """

    def __init__(self, model):
        self.model, self.faults, self.posts, self.scores = model, [], 0, True
        self.busy = set()
        self.version, self.working, self.lock = "0", 0, threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def handler(self):
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            requests = 0  # on this connection

            def parse_request(self):
                self.requests += 1
                self.close_connection = self.requests > 1
                return self.requests == 1 and super().parse_request()

            def log_message(self, *args):
                pass

            def answer(self, status, body):
                if (path := self.path.split("?")[0]) in stand_in.busy:
                    stand_in.busy.remove(path)
                    status, body = 503, "overloaded"
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer(*stand_in.get(self.path.split("?")[0]))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
                self.answer(*stand_in.post(self.path.split("?")[0], body))

        return Handler

    def get(self, path):
        config = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}
        config |= {"hf_config": {"tie_word_embeddings": False}}
        bodies = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/weight_info": {"weight_version": self.version},
            "/v1/models": {"data": [{"max_model_len": 64}]},
            "/metrics": f'vllm:num_requests_running{{engine="0"}} {self.working}.0\n',
            "/server_info": {
                "vllm_config": {"model_config": config, "scheduler_config": {"max_num_seqs": 16}}
            },
        }
        return (200, bodies[path]) if path in bodies else (404, {})

    def post(self, path, body):
        if path == "/inference/v1/generate" and "token_ids" in body:
            self.working += 1
            try:
                return self.generate(body["token_ids"], body["sampling_params"])
            finally:
                self.working -= 1
        if path == "/collective_rpc":
            for file in Path(body["kwargs"]["weights_path"]).glob("*.safetensors"):
                self.model.load_state_dict(load_file(file), strict=False)
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return (400 if path == "/inference/v1/generate" else 200), {"success": True}

    @torch.no_grad()
    def generate(self, ids, params):
        if params.get("prompt_logprobs") is not None:
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            pairs = [
                {str(t): {"logprob": float(x[t])}} for x, t in zip(logprobs, ids[1:], strict=False)
            ]
            params = {**params, "seed": 0, "stop_token_ids": []}
            choice = self.sample(ids, params)
            scores = {"prompt_logprobs": [None, *pairs]} if self.scores else {}
            return 200, {"choices": [choice], **scores}
        with self.lock:
            self.posts += 1
            fault = self.faults.pop(0) if self.faults else None
            if fault == "lost":
                self.lock.release()
                self.working -= 1
                time.sleep(20)
                self.working += 1
                self.lock.acquire()
            if isinstance(fault, tuple):
                return fault
            choice = self.sample(ids, params)
            if callable(fault):
                fault(choice)
            return 200, {"choices": [choice]}

    def sample(self, ids, params):
        generator = torch.Generator().manual_seed(params["seed"])
        tokens, content = list(ids), []
        while len(content) < params["max_tokens"]:
            logprobs = (self.model(torch.tensor([tokens])).logits[0, -1]).log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            about = {"token_id": token, "logprob": float(logprobs[token])}
            content.append({**about, "top_logprobs": [about]})
            tokens.append(token)
            if token in params["stop_token_ids"]:
                break
        stopped = tokens[-1] in params["stop_token_ids"]
        sampled = tokens[len(ids) :]
        span = {"version": self.version, "start": 0, "end": len(sampled)}
        return {
            "token_ids": sampled,
            "logprobs": {"content": content},
            "finish_reason": "stop" if stopped else "length",
            "weight_versions": [span],
        }
