"""Rollout engines: embedded, vLLM, one for several ranks; and the order of sampling."""
