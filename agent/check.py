"""What a check of ``dsprobe doctor`` finds."""

from __future__ import annotations

from dataclasses import dataclass

OK, LIMITED, FAILED = "ok", "limited", "failed"


@dataclass(frozen=True)
class Check:
    """``status`` is ok, limited (something is missing that the rest can do without) or failed.

    ``fix`` says what to do; ``privilege`` tells that root would help.
    """

    name: str
    status: str
    detail: str
    fix: str = ""
    privilege: bool = False
