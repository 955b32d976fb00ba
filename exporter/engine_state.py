"""Whether the engine lives, told from its log, its ``/metrics`` and silence together.

No one of them is enough: the log of a killed process just stops, ``/metrics`` is refused in
start-up as after a death, and an engine that waits for a dead rank answers both for 300 s.
"""

from __future__ import annotations

from dataclasses import dataclass

HUNG_SECONDS = 30.0
GONE_SECONDS = 10.0
_STALE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known at one moment; times are seconds ago, None where it never happened.

    ``logged``: the state of the life by its log, None without a life. ``up``: vLLM answers
    ``/metrics``; None where it was not asked. ``gone``: since when it refuses connections after it
    had answered in this life. ``unresolved``: an out-of-memory failure was logged, and not how it
    ended. ``line``: the last line but heartbeats. ``token``: the last token read or written.
    """

    logged: str | None
    up: bool | None = None
    healthy: bool = False
    gone: float | None = None
    unresolved: bool = False
    line: float | None = None
    token: float | None = None


def engine_state(signs: Signs) -> str:
    """One of ``status.ENGINE_STATES``."""
    if signs.logged in ("dead", "stopped"):
        # the API server outlives its engine by a moment; later it can only be one we have no log of
        answers_long_after = signs.up and signs.line is not None and signs.line > _STALE_SECONDS
        return "serving" if answers_long_after else str(signs.logged)
    if signs.gone is not None and signs.gone >= GONE_SECONDS:
        return "dead"  # killed: nothing of it is in the log
    if signs.unresolved and signs.up and signs.healthy and _silent(signs):
        return "hung"
    if signs.logged == "serving":
        return "serving"
    if signs.up:
        return "serving"  # the port opens when start-up is over
    return "starting" if signs.logged == "starting" else "unknown"


def _silent(signs: Signs) -> bool:
    return all(ago is None or ago >= HUNG_SECONDS for ago in (signs.line, signs.token))
