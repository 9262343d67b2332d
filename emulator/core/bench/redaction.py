"""What must not be told: keys, passwords and header values, wherever a server or a library repeats them."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
SHORTEST_HEADER = 8
_SCHEMES = ("", "http", "https", "tcp")


class Redaction:
    """Replaces secrets in text by ***."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        longest_first = sorted({secret for secret in secrets if secret}, key=lambda secret: (-len(secret), secret))
        self._secrets = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """The text without them."""
        return text if self._secrets is None else self._secrets.sub(HIDDEN, text)


NOTHING_HIDDEN = Redaction()


def shown_url(url: str) -> str:
    """A URL, or what was meant as one, as it may be told: without a name, a password or a query."""
    before, colon, rest = url.partition("://")
    scheme = before if colon else ""
    rest = rest if colon else url
    credentials, at, host = rest.rpartition("@")
    if "@" in scheme or "?" in credentials or (at and scheme not in _SCHEMES):  # a name may stand where a scheme would
        return HIDDEN
    return f"{scheme}{colon}{HIDDEN + at if at else ''}{host.partition('?')[0]}"
