"""A vLLM server over HTTP: tokens in, tokens out."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from kedge.backends.vllm.service import GenerationRequest, GenerationResult, parse_version
from kedge.backends.vllm.weight_payload import WeightPayload
from kedge.errors import ConfigError, RolloutError, SyncError

_SHARED_MEMORY = Path("/dev/shm")


class LostServerError(RolloutError):
    """The server does not answer any more; the rows that it did answer are in ``answers``."""

    def __init__(self, message: str, answers: Sequence[GenerationResult | None] = ()) -> None:
        super().__init__(message)
        self.answers = answers


class Remote:
    """A vLLM server that somebody else runs.

    It has to be started with ``VLLM_SERVER_DEV_MODE=1`` in its environment (weights are exchanged
    through endpoints that vLLM offers then) and with ``--enable-scale-out`` (tokens in and out)
    and ``--logprobs-mode processed_logprobs``.

    Args:
        url: where it is, e.g. ``http://host:8000``.
        uds: a Unix socket that it listens on instead of the address.
        folder: weights travel through a folder below it, which the server has to see under the same
            name; None is this machine's shared memory, or its temporary folder.
        heartbeat: seconds between two signs of life asked of it while it generates.
        patience: seconds without one after which it counts as lost.
        slow: most seconds that exchanging weights may take.
    """

    def __init__(
        self,
        url: str,
        *,
        uds: str | None = None,
        folder: str | None = None,
        heartbeat: float = 5.0,
        patience: float = 60.0,
        slow: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._uds = uds
        self._heartbeat, self._patience, self._slow = heartbeat, patience, slow
        self._folder = Path(tempfile.mkdtemp(prefix="kedge-weights-", dir=folder or _memory()))
        # Also where nobody closes it: shared memory outlives a process.
        self._clean = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._loads = 0
        self._adapter: str | None = None  # the name under which vLLM knows the newest
        transport = httpx.HTTPTransport(uds=uds)
        self._client = httpx.Client(base_url=self.url, transport=transport, timeout=patience)

    # -- what a service does --------------------------------------------------------------------

    def generate(self, asks: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """The answers, in the order of the asks.

        Raises:
            LostServerError: the server went away or hangs; it holds what was answered before.
            RolloutError: the server refuses the request.
        """
        answers: list[GenerationResult | None] = [None] * len(asks)

        async def one(client: httpx.AsyncClient, i: int) -> None:
            body = self._body(asks[i].prompt, asks[i].params)
            found = await client.post("/inference/v1/generate", json=body)
            answers[i] = _answer(_json(found)["choices"][0])

        try:
            asyncio.run(self._watched(lambda c: [one(c, i) for i in range(len(asks))]))
        except LostServerError as error:
            error.answers = answers
            raise
        return [a for a in answers if a is not None]

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probability of each token of each row but its first."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": False}
        found = []
        for row in rows:
            body = self._body(row, params)
            said = self._post("/inference/v1/generate", json=body)["prompt_logprobs"]
            found.append([at[str(t)]["logprob"] for at, t in zip(said[1:], row[1:], strict=True)])
        return found

    def load(self, parcel: WeightPayload, version: int) -> None:
        """Exchange the weights, or the adapter, and drop the cache of prefixes.

        Raises:
            SyncError: vLLM refused.
        """
        self._loads += 1
        parcel.write(self._folder / str(self._loads))
        before, self._adapter = self._adapter, None
        if parcel.adapter is not None:
            self._adapter = f"kedge-{self._loads}"
        self.reload(version)
        if before is not None:
            self._post("/v1/unload_lora_adapter", json={"lora_name": before})
        shutil.rmtree(self._folder / str(self._loads - 1), ignore_errors=True)

    def reload(self, version: int) -> None:
        """Load the newest weights that were written, as after a restart.

        Raises:
            SyncError: vLLM refused.
        """
        place = str(self._folder / str(self._loads))
        path = "/collective_rpc"
        body: dict[str, Any] = {"method": "reload_weights", "kwargs": {"weights_path": place}}
        if self._adapter is not None:
            path, body = "/v1/load_lora_adapter", {"lora_name": self._adapter, "lora_path": place}
        try:
            with self._paused():
                self._post(path, json=body, timeout=self._slow)
                if not self._post("/reset_prefix_cache")["success"]:
                    raise SyncError("vLLM did not drop its cache of prefixes: requests are running")
                self.name_version(version)
        except LostServerError:
            raise
        except RolloutError as error:
            raise SyncError(f"vLLM refused the weights of version {version}: {error}") from error

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """What others asked of the server is answered first; what they ask meanwhile waits."""
        self._post("/pause?mode=wait", timeout=self._slow)
        try:
            yield
        except LostServerError:
            raise  # there is nobody to tell
        except BaseException:
            self._post("/resume")
            raise
        self._post("/resume")

    def version(self) -> int:
        """The version of the weights, as vLLM says."""
        return parse_version(self._get("/weight_info")["weight_version"])

    def sleep(self) -> None:
        """Free the cache; the weights wait in the host's memory."""
        self._post("/sleep?level=1")

    def wake(self) -> None:
        """Undo ``sleep``."""
        self._post("/wake_up")

    def close(self) -> None:
        """Close connections and remove the folder of weights; the server runs on."""
        self._client.close()
        self._clean()

    def name_version(self, version: int) -> None:
        """Tell vLLM the name of the weights it holds."""
        self._post("/update_weight_version", json={"new_version": str(version)})

    # -- what else is known of a server ----------------------------------------------------------

    def healthy(self) -> bool:
        """Whether it answers at all."""
        if self._uds is not None and not _listened_to(self._uds):
            return False
        try:
            return self._client.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def check(self, *, tied: bool, precision: str, adapter: bool = False) -> None:
        """Refuse a server that would sample from something else than the policy.

        Args:
            tied: the policy's output head is its embedding.
            adapter: a LoRA adapter trains, and is sent as one.
            precision: what the learner computes in, e.g. "float32".

        Raises:
            ConfigError: naming what to start it with.
        """
        if not self.healthy():
            raise ConfigError(f"no vLLM server answers at {self.url}; start one, or check the URL")
        try:
            missing = self._missing(tied=tied, precision=precision, adapter=adapter)
        except httpx.TransportError as error:
            raise ConfigError(
                f"the vLLM server at {self.url} did not say how it was started: {error!r}"
            ) from error
        if missing:
            raise ConfigError(
                f"the vLLM server at {self.url} must be started with {' '.join(missing)}, or it"
                " would sample from something else than the policy"
            )

    def _missing(self, *, tied: bool, precision: str, adapter: bool) -> list[str]:
        """The flags that it was not started with."""
        missing = []
        info = self._client.get(
            "/server_info", params={"config_format": "json"}, timeout=self._slow
        )
        if info.status_code == 404:
            raise ConfigError(
                f"the vLLM server at {self.url} was started without VLLM_SERVER_DEV_MODE=1 in its"
                " environment, so its weights cannot be exchanged; start it again with that"
            )
        model = _json(info)["vllm_config"]["model_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            missing.append("--logprobs-mode processed_logprobs")
        if precision not in str(model["dtype"]):
            missing.append(f"--dtype {precision}")
        held = model.get("hf_config") or {}
        if tied and (not isinstance(held, dict) or held.get("tie_word_embeddings", True)):
            missing.append("""--hf-overrides '{"tie_word_embeddings": false}'""")

        def unknown(path: str) -> bool:
            return self._client.post(path, json={}, timeout=self._slow).status_code == 404

        if adapter and unknown("/v1/load_lora_adapter"):
            missing.append("--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
        if unknown("/inference/v1/generate"):
            missing.append("--enable-scale-out")
        return missing

    # -- below ----------------------------------------------------------------------------------

    def _body(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        model = {} if self._adapter is None else {"model": self._adapter}
        return {"token_ids": prompt, "sampling_params": params} | model

    async def _watched(self, work: Any) -> None:
        """Run ``work(client)``'s coroutines until done, or until the server shows no life."""
        transport = httpx.AsyncHTTPTransport(
            uds=self._uds, limits=httpx.Limits(max_connections=None)
        )
        client = httpx.AsyncClient(base_url=self.url, transport=transport, timeout=None)
        async with client:
            pulse = asyncio.create_task(self._pulse(client))
            jobs: list[asyncio.Task[None]] = [asyncio.create_task(each) for each in work(client)]
            try:
                await _first_error([pulse], jobs)
            except httpx.TransportError as error:
                raise LostServerError(
                    f"the vLLM server at {self.url} is gone: {error!r}"
                ) from error
            finally:
                for task in (pulse, *jobs):
                    task.cancel()
                await asyncio.gather(pulse, *jobs, return_exceptions=True)

    async def _pulse(self, client: httpx.AsyncClient) -> None:
        """Ask for a sign of life from the engine's own loop, again and again."""
        while True:
            await asyncio.sleep(self._heartbeat)
            try:
                _json(await client.get("/weight_info", timeout=self._patience))
            except httpx.TimeoutException:
                raise LostServerError(
                    f"the vLLM server at {self.url} gave no sign of life for {self._patience:g} s"
                ) from None

    def _get(self, path: str) -> Any:
        return self._asked(lambda: self._client.get(path))

    def _post(self, path: str, **about: Any) -> Any:
        return self._asked(lambda: self._client.post(path, **about))

    def _asked(self, ask: Any) -> Any:
        try:
            return _json(ask())
        except httpx.TransportError as error:
            raise LostServerError(f"the vLLM server at {self.url} is gone: {error!r}") from error


async def _first_error(watchers: list[asyncio.Task[None]], jobs: list[asyncio.Task[None]]) -> None:
    """Wait for all jobs; the first error of a job or a watcher ends the wait."""
    waiting = set(jobs)
    while waiting:
        done, _ = await asyncio.wait(waiting | set(watchers), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        waiting -= done


def _json(response: httpx.Response) -> Any:
    """The body of a good answer.

    Raises:
        LostServerError: the server failed.
        RolloutError: it refused.
    """
    where, said = response.request.url.path, response.text[:500]
    if response.status_code >= 500:
        raise LostServerError(f"the vLLM server failed at {where}: {said}")
    if response.status_code >= 400:
        raise RolloutError(f"the vLLM server refused {where}: {said}")
    with contextlib.suppress(ValueError):
        return response.json()
    return None


def _answer(choice: dict[str, Any]) -> GenerationResult:
    versions = [parse_version(span["version"]) for span in choice["weight_versions"] or ()]
    return GenerationResult(
        tokens=choice["token_ids"],
        logprobs=[at["logprob"] for at in choice["logprobs"]["content"]],
        stopped=choice["finish_reason"] == "stop",
        version=min(versions, default=-1),
    )


def _listened_to(path: str) -> bool:
    """Whether a process listens on a Unix socket; httpx leaks a socket where none does."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _memory() -> str | None:
    return str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
