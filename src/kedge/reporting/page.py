"""Renders a run as one self-contained HTML file that loads nothing from the network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

STYLES = ("page.css",)
SCRIPTS = (
    *("core.js", "list.js", "charts.js", "overview.js", "curves.js"),
    *("completions.js", "tokens.js", "main.js"),
)


def page(data: Mapping[str, Any]) -> str:
    """The HTML page for the result of ``gather``.

    The data are compressed JSON in base64, so that generated text cannot end the script or become
    markup; a content security policy blocks all connections.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    packed = gzip.compress(text.encode(errors="backslashreplace"), compresslevel=5, mtime=0)
    body = _asset("page.html")
    for name, text in {
        "title": escape(str(data["name"])),
        "style": "\n".join(map(_asset, STYLES)),
        "script": "\n".join(map(_asset, SCRIPTS)),
        "data": base64.b64encode(packed).decode(),
    }.items():
        body = body.replace(f"<!--{name}-->", text)
    return body


def unpack(html: str) -> dict[str, Any]:
    """The data embedded in a page."""
    begin = html.index('<script id="data"')
    packed = html[html.index(">", begin) + 1 : html.index("</script>", begin)]
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return data


def _asset(name: str) -> str:
    return (files("kedge.reporting") / "assets" / name).read_text(encoding="utf-8")
