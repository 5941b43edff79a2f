"""``kedge serve-reward``: serves reward functions over HTTP to trainers on other machines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from kedge.cli.flags import Flags
from kedge.records.errors import ConfigError
from kedge.verifiers import Verifier, by_column, known_verifiers
from kedge.verifiers.remote import TOKEN_ENV

EPILOG = f"""\
REWARD is module:function, file.py:function, by_column or another verifier:
{", ".join(known_verifiers())}.
Train with it:  RemoteReward("http://127.0.0.1:8421/score") among the reward_funcs.
The token is read from the environment variable {TOKEN_ENV}; without one, the server listens on
localhost only.  Verifiers that execute code do so on this machine."""


def load(name: str) -> tuple[str, Callable[..., Any]]:
    """Load a reward function; returns the name that it is served under, too."""
    if name in known_verifiers() or name == "by_column":
        return name, known_verifiers()[name] if name in known_verifiers() else by_column()
    if ":" not in name:
        raise ConfigError(
            f"reward {name!r} must be one of {', '.join(known_verifiers())}, by_column, or"
            " module:function or file.py:function"
        )
    from kedge.rewards.build import load_function

    return name.rpartition(":")[2], load_function(name)


def main(argv: Sequence[str]) -> None:
    """Serve reward functions over HTTP to trainers on other machines."""
    flags = Flags("kedge serve-reward", "Serve reward functions over HTTP.", EPILOG)
    flags.add_argument("rewards", nargs="+", metavar="REWARD", help="reward functions to serve")
    flags.add_argument("--host", default="127.0.0.1", help="address to listen on")
    flags.add_argument("--port", type=int, default=8421, help="port; 0 is any free port")
    flags.add_argument("--workers", type=int, default=1, help="number of concurrent calls")
    flags.add_argument("--max_mb", type=int, default=64, help="largest request, in MiB")
    flags.add_argument("--token_env", default=TOKEN_ENV, help="variable with the token")
    options = flags.parse_args(list(argv))
    functions = dict(load(name) for name in options.rewards)
    if len(functions) < len(options.rewards):
        raise ConfigError(f"reward names must be unique, got {', '.join(options.rewards)}")
    for function in functions.values():
        if isinstance(function, Verifier):
            function.prepare()
    from kedge.ext.serve.server import RewardServer  # needs the extra `serve`

    token = os.environ.get(options.token_env)
    server = RewardServer(
        functions,
        host=options.host,
        port=options.port,
        token=token,
        workers=options.workers,
        max_mb=options.max_mb,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [f"{server.url}/{name}" for name in functions]
    guarded = "with a token" if token else "without a token, localhost only"
    print(f"kedge: serving {', '.join(names)} ({guarded})", flush=True)
    server.serve_forever()
