"""A dashboard through the types of grafana-foundation-sdk and back."""

from __future__ import annotations

import json
import warnings
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins

with warnings.catch_warnings():
    # It prefers the new schema, which only Grafana 12 and newer can read.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.models.dashboard import Dashboard

register_default_plugins()


def round_trip(dashboard: dict[str, Any]) -> dict[str, Any]:
    """What is left of ``dashboard``."""
    found: dict[str, Any] = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    return found
