"""The viewer's pages. Answers on the loopback address, to its own name, from the index only.

* A request whose `Host` is not one of ours is refused: another site's name that was pointed at this
  address (DNS rebinding) gets nothing.
* No path of a request ever becomes a path on disk: rollouts are named by numbers of the index,
  style sheets and scripts by a table.
* Pages allow no inline script or style and nothing from elsewhere.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from evenhand.core.errors import ConfigError, DataError, EvenhandError, require
from evenhand.credit.evidence import silver_documents
from evenhand.pages.render import environment, source, well_formed
from evenhand.pages.runs import Alarm, Run, State, read_alarms, read_run
from evenhand.pages.tokens import decoder, load_decoder
from evenhand.pages.trajectory import (
    Decode,
    TrajectoryView,
    credit_strip,
    largest_advantage,
    trajectory_view,
)
from evenhand.pages.viewer.index import Index, Row
from evenhand.pages.viewer.query import PAGE, SORTS, Filter

PURPOSE = "the viewer"
REFRESH_SECONDS = 1.0
"""Files are looked at most this often."""

MAX_SHOWN = 64
"""Rollouts of a group that are shown beside one another."""

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_STATIC = Path(__file__).parent / "static"


def _assets() -> dict[str, tuple[str, str]]:
    """Return name -> content type and content of everything that pages load."""
    return {
        "style.css": ("text/css", source("style.css")),
        "page.js": ("text/javascript", source("page.js")),
        "viewer.css": ("text/css", (_STATIC / "viewer.css").read_text(encoding="utf-8")),
        "viewer.js": ("text/javascript", (_STATIC / "viewer.js").read_text(encoding="utf-8")),
    }


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of the group, shown as a card.

    Attributes:
        key: of the rollout.
        view: the rollout.
    """

    key: str
    view: TrajectoryView


class Viewer:
    """What the pages are made from.

    Attributes:
        index: of the rollouts.
    """

    def __init__(self, index: Index, tokenizer: str | None = None) -> None:
        """Prepare the pages of an index.

        Args:
            index: of the rollouts.
            tokenizer: model folder or `tokenizer.json`; default: that of the run's recipe.

        Raises:
            DataError: there is no tokenizer at `tokenizer`.
        """
        self.index = index
        self._templates = environment()
        self._lock = threading.Lock()
        self._looked = 0.0
        self._run: Run | None = None
        self._alarms: list[Alarm] = []
        self._read_run()
        self._decode = self._decoder(tokenizer)

    def _decoder(self, tokenizer: str | None) -> Decode | None:
        if tokenizer is not None:
            found = load_decoder(tokenizer)
            if found is None:
                raise DataError(
                    f"{tokenizer} holds no tokenizer that can be read; give a folder with a "
                    "tokenizer.json (needs the package 'tokenizers')"
                )
            return found
        return decoder(self._run.settings) if self._run is not None else None

    def _read_run(self) -> None:
        root = self.index.sources.root
        if self.index.sources.is_run:
            self._run = read_run(root)
            self._alarms = list(self._run.alarms)
        elif not self.index.sources.files:
            self._alarms = read_alarms(root, [])

    def look(self) -> None:
        """Take in what was written since, at most once a second."""
        with self._lock:
            if time.monotonic() - self._looked < REFRESH_SECONDS:
                return
            self._looked = time.monotonic()
        changed = self.index.refresh()
        # A run that ended leaves no new file: its state is read again as long as it runs.
        if changed or (self._run is not None and self._run.state is State.RUNNING):
            self._read_run()

    # --- pages ---

    def page(self, values: Mapping[str, str]) -> str:
        """Return the whole page, the first part of the list in it."""
        wanted = _filter(values)
        return self._render(
            "viewer.html.j2",
            wanted=wanted,
            choices=self.index.choices(),
            sorts=list(SORTS),
            alarm_names=list(dict.fromkeys(alarm.alarm for alarm in self._alarms)),
            state=self.state(),
            **self._list(wanted, 0),
        )

    def rows(self, values: Mapping[str, str]) -> str:
        """Return one part of the list."""
        offset = values.get("offset", "0")
        if not (offset.isascii() and offset.isdigit() and len(offset) < 10):
            raise ConfigError(f"offset {offset!r:.20} is no whole number")
        return self._render("viewer_list.html.j2", **self._list(_filter(values), int(offset)))

    def _list(self, wanted: Filter, offset: int) -> dict[str, Any]:
        steps = [a.step for a in self._alarms if wanted.alarm in ("any", a.alarm)]
        total, rows = self.index.rows(wanted, steps, offset)
        return {
            "total": total,
            "rows": [(row, _strip(row)) for row in rows],
            "next_offset": offset + PAGE if offset + PAGE < total else None,
            "alarm_steps": {alarm.step: alarm.alarm for alarm in self._alarms},
        }

    def group(self, key: str) -> str:
        """Return a rollout with the others of its group beside it.

        Raises:
            DataError: there is no such rollout, or it cannot be read.
        """
        keys, at = self.index.group(key)
        if len(keys) > MAX_SHOWN:
            first = max(0, min(at - MAX_SHOWN // 2, len(keys) - MAX_SHOWN))
            keys, at = keys[first : first + MAX_SHOWN], at - first
        rollouts = [self.index.trajectory(k) for k in keys]
        silver = silver_documents(rollouts)
        largest = largest_advantage(rollouts)
        views = [
            trajectory_view(
                t, silver=silver, largest=largest, decode=self._decode if i == at else None
            )
            for i, t in enumerate(rollouts)
        ]
        rewards = [t.reward for t in rollouts if t.reward is not None]
        return self._render(
            "viewer_group.html.j2",
            view=views[at],
            members=[Member(k, v) for k, v in zip(keys, views, strict=True)],
            key=key,
            at=at,
            previous=keys[at - 1] if at > 0 else None,
            next=keys[at + 1] if at + 1 < len(keys) else None,
            mean=sum(rewards) / len(rewards) if rewards else None,
            silver=len(silver),
            alarms=[a for a in self._alarms if a.step == views[at].trajectory.step],
        )

    def state(self) -> dict[str, Any]:
        """Return what is polled: a counter of changes, how many rollouts, how far the run is."""
        state = self.index.state()
        run = self._run
        return {
            **state,
            "title": self._title(),
            "status": "" if run is None else run.state.value,
            "progress": "" if run is None or run.steps is None
            else f"step {run.last_step} of {run.steps}",
            "alarms": [
                {"step": a.step, "alarm": a.alarm, "message": a.message} for a in self._alarms
            ],
        }  # fmt: skip

    def _title(self) -> str:
        sources = self.index.sources
        if len(sources.files) == 1:
            return sources.files[0].name
        return f"{len(sources.files)} files" if sources.files else sources.root.name or "/"

    def _render(self, template: str, **values: Any) -> str:
        return well_formed(self._templates.get_template(template).render(**values))


def _filter(values: Mapping[str, str]) -> Filter:
    known = {field.name for field in fields(Filter)}
    return Filter(**{name: value[:500] for name, value in values.items() if name in known})


def _strip(row: Row) -> list[tuple[float, float, str]]:
    pairs = []
    for part in row.columns["strip"].split():
        tokens, _, advantage = part.partition(":")
        pairs.append((int(tokens), float(advantage)))
    return credit_strip(pairs, max((abs(advantage) for _, advantage in pairs), default=0.0) or 1.0)


# --- the application -----------------------------------------------------------------------------


def create_app(viewer: Viewer, *, host: str = "127.0.0.1") -> Any:
    """Return the application.

    Args:
        viewer: what is shown.
        host: the address that is listened on; requests must name it, or the loopback address.

    Raises:
        MissingExtraError: Starlette (of FastAPI) is not installed.
    """
    # The core of FastAPI alone: nothing here is checked by its models, and it starts much faster.
    starlette = require("starlette.applications", "server", PURPOSE)
    routing = require("starlette.routing", "server", PURPOSE)
    responses = require("starlette.responses", "server", PURPOSE)
    assets = _assets()

    def page(request: Any) -> Any:
        viewer.look()
        return responses.HTMLResponse(viewer.page(request.query_params))

    def rows(request: Any) -> Any:
        return responses.HTMLResponse(viewer.rows(request.query_params))

    def group(request: Any) -> Any:
        return responses.HTMLResponse(viewer.group(request.path_params["key"]))

    def state(_: Any) -> Any:
        viewer.look()
        return responses.JSONResponse(viewer.state())

    def asset(request: Any) -> Any:
        name = request.path_params["name"]
        if name not in assets:
            raise DataError(f"there is no {name!r:.60}")
        kind, content = assets[name]
        return responses.Response(content, media_type=kind)

    def of_ours(_: Any, error: EvenhandError) -> Any:
        code = 404 if isinstance(error, DataError) else 400
        return responses.PlainTextResponse(well_formed(str(error)), status_code=code)

    paths = {"/": page, "/rows": rows, "/rollout/{key}": group, "/state": state,
             "/static/{name}": asset}  # fmt: skip
    app = starlette.Starlette(
        routes=[routing.Route(path, function, methods=["GET"]) for path, function in paths.items()],
        exception_handlers={EvenhandError: of_ours},
    )
    return _Guard(app, _names(host))


def _names(host: str) -> frozenset[str]:
    return frozenset({*_LOOPBACK, host.lower()})


class _Guard:
    """Refuses requests to another name and adds the headers that every answer has."""

    def __init__(self, app: Any, names: frozenset[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and self._is_ours(hosts[0].decode("latin-1")):
            await self._app(scope, receive, guarded)
            return
        body = b"this address answers to its own name only; open the one that evenhand printed"
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        await guarded({"type": "http.response.start", "status": 421, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        if name in self._names:
            return True
        # Bound to every address: any of them may be named, as a number. Names stay refused, since
        # only names can be pointed at this machine by others.
        return bool(self._names & {"0.0.0.0", "::"}) and _is_address(name)


def host_name(host: str) -> str:
    """Return the name of a `Host` header, without port and brackets, in lower case."""
    text = host.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    name, _, port = text.partition(":")
    return name if not port or port.isdigit() else text


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
