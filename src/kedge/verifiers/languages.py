"""Language identification with py3langid (``pip install 'kedge-rl[ifeval]'``)."""

from __future__ import annotations

import functools
from typing import Any

from kedge.errors import ConfigError, install_command

MIN_CONFIDENCE = 0.5  # below, a text is too short or too mixed to tell
MAX_LETTERS = 20_000  # read from a text
_CODES = (
    "ar bg bn cs da de el en es fa fi fr gu he hi hu hy id it ja ka kn ko ml mr ne nl no pa pl pt"
    " ro ru sv sw ta te th tr uk ur vi zh"
)
KNOWN = frozenset(_CODES.split())  # fewer candidates make short texts more certain


@functools.cache
def load_identifier() -> Any:
    """The language identifier.

    Raises:
        ConfigError: py3langid is not installed.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            f"checking the language of a response needs py3langid; run {install_command('ifeval')}"
        ) from error
    identifier = LanguageIdentifier.from_model_file(
        MODEL_FILE, norm_probs=True, min_confidence=MIN_CONFIDENCE
    )
    identifier.set_languages([*KNOWN, "zxx"])  # zxx: text that is not language
    return identifier


def detect_language(text: str) -> str | None:
    """The two-letter code of the language, or None if the text is too short or mixed."""
    code, _ = load_identifier().classify(text[:MAX_LETTERS])
    return code if code in KNOWN else None
