"""One HTML file that shows a run: data, script and style inside, nothing from the network."""

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
    """The page of what ``gather`` found.

    The data are compressed JSON in base64, so no text of a model can end the script or become
    markup; a content security policy forbids the page every connection.
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
    """The data of a page, for programs that would rather read them."""
    begin = html.index('<script id="data"')
    packed = html[html.index(">", begin) + 1 : html.index("</script>", begin)]
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return found


def _asset(name: str) -> str:
    return (files("kedge.insight") / "assets" / name).read_text(encoding="utf-8")
