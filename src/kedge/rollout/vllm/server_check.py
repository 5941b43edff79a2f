"""Checks that a running vLLM server was started with flags that make it sample the policy."""

from __future__ import annotations

import httpx
from packaging.version import Version

from kedge.errors import ConfigError
from kedge.rollout.vllm.remote import Remote, read_json
from kedge.rollout.vllm.service import check_version, scale_out_flags


def check_server(remote: Remote, *, tied: bool, precision: str, adapter: bool = False) -> None:
    """Check that the server's flags make it sample from the policy.

    Args:
        remote: client of the server.
        tied: whether the policy's output head and embedding are one weight.
        adapter: whether a LoRA adapter is trained and sent.
        precision: precision of the learner, e.g. "float32".
    """
    if not remote.healthy():
        raise ConfigError(f"no vLLM server responds at {remote.url}; start one, or check the URL")
    try:
        version = remote._get("/version")["version"]
        check_version(version, f"the vLLM server at {remote.url}")
        if Version(version).release < (0, 32):
            raise ConfigError(
                f"the vLLM server at {remote.url} has version {version}: before 0.32, a server does"
                " not report which weights it has, so that lost weights would not be noticed;"
                " upgrade it, or use rollout_engine='vllm_server', which starts and watches one"
            )
        missing = _missing(remote, tied=tied, precision=precision, adapter=adapter)
        if _unknown(remote, "/inference/v1/generate"):
            missing += scale_out_flags(version)
    except httpx.TransportError as error:
        raise ConfigError(
            f"the vLLM server at {remote.url} did not report its configuration: {error!r}"
        ) from error
    if missing:
        raise ConfigError(
            f"the vLLM server at {remote.url} must be started with {' '.join(missing)};"
            " otherwise it would not sample from the policy"
        )


def _missing(remote: Remote, *, tied: bool, precision: str, adapter: bool) -> list[str]:
    """Required flags that the server was not started with."""
    missing = []
    info = remote._server_info()
    if info.status_code == 404:
        raise ConfigError(
            f"the vLLM server at {remote.url} cannot load new weights; start it with"
            " VLLM_SERVER_DEV_MODE=1 in its environment"
        )
    model = read_json(info)["vllm_config"]["model_config"]
    if model["logprobs_mode"] != "processed_logprobs":
        missing.append("--logprobs-mode processed_logprobs")
    if precision not in str(model["dtype"]):
        missing.append(f"--dtype {precision}")
    hf_config = model.get("hf_config") or {}
    if tied and (not isinstance(hf_config, dict) or hf_config.get("tie_word_embeddings", True)):
        missing.append("""--hf-overrides '{"tie_word_embeddings": false}'""")
    if adapter and _unknown(remote, "/v1/load_lora_adapter"):
        missing.append("--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1")
    return missing


def _unknown(remote: Remote, path: str) -> bool:
    """Whether the server lacks an endpoint, or (vLLM 0.32) forbids it without its flag."""
    response = remote._client.post(path, json={}, timeout=remote._slow)
    return response.status_code in (403, 404)
