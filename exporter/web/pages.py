"""The pages for people: one of all servers, one of each incident. HTML and a style, no script.

A page is whole in itself: the style is in it, nothing is fetched, so it can be saved and mailed. The
policy sent along allows that style, by its hash, and nothing else. Links are relative, so that the
pages also work below a path of a reverse proxy.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from aiohttp import hdrs, web
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from .. import __version__
from ..diagnosis.knowledge import FailureClass
from ..status import Status, TargetStatus
from . import api
from .views import Overview, Page, TargetView, incident, overview, summary, target_view

ROWS = 50
"""Incidents on the page of one server."""
FEW_ROWS = 10
"""Incidents of each server where there are several."""

Listed = Callable[[str, int, int], tuple[list[api.Document], int]]
"""Documents of a target, newest first: how many to skip, how many to give. Also how many there are."""

_HERE = Path(__file__).parent
_STYLE = _HERE.joinpath("static", "page.css").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
# "data:" is for the empty icon in the head: without it browsers ask for /favicon.ico, and complain
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _template(name: str) -> Template:
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    found.globals["style"] = Markup(_STYLE)  # noqa: S704 - ours, and its hash is in the policy
    return found


class Pages:
    """One method a path, each answers at once from the status and what is stored."""

    def __init__(
        self,
        status: Status,
        classes: Mapping[str, FailureClass],
        stored: api.Stored,
        listed: Listed,
        hide_excerpts: bool,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._status = status
        self._classes = classes
        self._stored = stored
        self._listed = listed
        self._hide_excerpts = hide_excerpts
        self._now = now
        for one in ("overview.html", "incident.html", "missing.html"):
            _template(one)  # compiled before anyone waits for it

    async def overview(self, request: web.Request) -> web.Response:
        """Every server, or the one that ``?target=`` names; ``?page=`` turns to older incidents."""
        wanted = request.query.get("target")
        targets = [one for one in self._status.targets if wanted is None or one.name == wanted]
        if wanted is not None and not targets:
            return self._missing("no target has this name", "./")
        alone = len(targets) == 1
        number = _page(request.query.get("page")) if alone else 1
        rows = ROWS if alone else FEW_ROWS
        view = self.view(targets, rows, number, wanted is not None)
        return _html(_template("overview.html").render(view=view))

    def view(self, targets: list[TargetStatus], rows: int, number: int, chosen: bool) -> Overview:
        """What the overview shows."""
        return overview(
            (self._target(one, rows, number) for one in targets), chosen, self._now(), __version__
        )

    def _target(self, target: TargetStatus, rows: int, number: int) -> TargetView:
        documents, total = self._rows(target, (number - 1) * rows, rows)
        pages = max(1, -(-total // rows))
        if number > pages:
            return self._target(target, rows, pages)
        page = Page(tuple(summary(one, target, self._classes) for one in documents), number, pages, total)
        newest = summary(target.incidents[0], target, self._classes) if target.incidents else None
        return target_view(target, page, newest)

    def _rows(self, target: TargetStatus, skip: int, most: int) -> tuple[list[api.Document], int]:
        """Incidents from memory as far as they go, also those that could not be saved; then from the state file."""
        newest = target.incidents
        stored, total = self._listed(target.name, skip, most if skip + most > len(newest) else 0)
        if total <= len(newest):
            return list(newest[skip : skip + most]), len(newest)
        return stored or list(newest[skip : skip + most]), total

    async def incident(self, request: web.Request) -> web.Response:
        """One incident, also one that is only in the state file."""
        wanted = request.match_info["id"]
        found = api.incident(self._status, wanted, self._stored, self._hide_excerpts)
        target = next(
            (one for one in self._status.targets if found and one.name == found.get("target")), None
        )
        if found is None or target is None:
            return self._missing("no incident has this id", "../")
        view = incident(found, target, self._classes, self._hide_excerpts)
        several = len(self._status.targets) > 1
        return _html(_template("incident.html").render(view=view, several=several, version=__version__))

    def _missing(self, what: str, home: str) -> web.Response:
        return _html(_template("missing.html").render(what=what, home=home), 404)


def _html(text: str, status: int = 200) -> web.Response:
    # a lone surrogate, as a file name may hold, can't be sent
    body = text.encode("utf-8", "replace")
    headers = {hdrs.CONTENT_TYPE: "text/html; charset=utf-8", "Content-Security-Policy": POLICY}
    return web.Response(status=status, body=body, headers=headers)


def _page(raw: str | None) -> int:
    """The number of a page; the first one for what is none."""
    if raw is None or not (raw.isascii() and raw.isdigit() and len(raw) <= 6):
        return 1
    return max(1, int(raw))
