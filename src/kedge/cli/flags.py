"""Flags of the commands that do not train."""

from __future__ import annotations

import argparse
from typing import NoReturn

from kedge.errors import ConfigError


class Flags(argparse.ArgumentParser):
    """``ArgumentParser`` that raises instead of leaving: there is one way that errors are shown."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(message)
