"""The web application: one page, its assets, and its data."""

from __future__ import annotations

import asyncio
import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from orchestray.dashboard.guard import Guard
from orchestray.dashboard.listing import Entry, Kind, Library, Overview
from orchestray.dashboard.live import Hub, Topic
from orchestray.dashboard.predictions import predictions
from orchestray.dashboard.run_view import RunView
from orchestray.dashboard.search_view import SearchView
from orchestray.platform.run.files import dump_json
from orchestray.search.results.paths import SearchPaths

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_STYLE_MARK = re.compile(r'if\(!document\.getElementById\("([0-9a-f]{64})"\)\)')
"""Pattern in Plotly's script that checks for the style of its maps, and else makes an element that the policy forbids.

No page here draws maps, so an empty element with that id is enough.
"""

_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; frame-ancestors 'none'"
)
"""Policy for reports, which contain their own scripts: these run without an origin, and can reach nothing."""

Name = Annotated[str, Query(max_length=500)]


class Strict(JSONResponse):
    """A JSON response without NaN, which JSON lacks."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return dump_json(content).encode()


def make_app(
    runs_dir: Path, *, host: str = "127.0.0.1", ray_dashboard: str | None = None, tensorboard: str | None = None
) -> tuple[Guard, Hub]:
    """Return the application and its hub.

    Args:
        runs_dir: directory of the runs and searches.
        host: the address it will listen on; requests for other hosts are refused.
        ray_dashboard: URL of the Ray dashboard, to link to.
        tensorboard: URL of a running TensorBoard, to link to.
    """
    library, hub = Library(runs_dir), Hub()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    topics = Topics(library, hub)
    _add_assets(app)
    _add_data(app, topics)
    _add_predictions(app, library)
    _add_live(app, topics, hub)
    _add_report(app, topics)

    @app.get("/api/about")
    def about() -> Response:
        return Strict({"runs_dir": str(runs_dir), "ray_dashboard": ray_dashboard, "tensorboard": tensorboard})

    @app.exception_handler(404)
    async def not_found(_: Request, error: Exception) -> Response:
        detail = getattr(error, "detail", None)
        return Strict(
            {"error": detail if detail not in (None, "Not Found") else "there is nothing at this address"}, 404
        )

    return Guard(app, host), hub


def _add_assets(app: FastAPI) -> None:
    """Add the routes of the page's files, which are part of the installed packages."""
    own, shared = files("orchestray.dashboard") / "assets", files("orchestray.search.results") / "assets"
    plotly = f"plotly-{version('plotly')}.js"
    places = {asset.name: asset for asset in own.iterdir()}
    places |= {name: shared / name for name in ("figures.js", "report.css")}
    places[plotly] = files("plotly") / "package_data" / "plotly.min.js"

    @app.get("/")
    def index() -> Response:
        marks = " ".join(
            f'<template id="{mark}"></template>' for mark in _STYLE_MARK.findall(places[plotly].read_text())
        )
        text = places["index.html"].read_text(encoding="utf-8")
        text = text.replace("$PLOTLY", plotly).replace("$MARKS", marks)
        return Response(text, media_type=_TYPES[".html"], headers={"cache-control": "no-store"})

    @app.get("/assets/{name}")
    def asset(name: str) -> Response:
        if name not in places or name == "index.html":
            raise HTTPException(404)
        lasting = "max-age=31536000, immutable" if name == plotly else "no-cache"
        return Response(
            places[name].read_bytes(),
            media_type=_TYPES.get(Path(name).suffix, "application/octet-stream"),
            headers={"cache-control": lasting},
        )


class Topics:
    """The topics of the pages, by the names of existing runs and searches."""

    def __init__(self, library: Library, hub: Hub) -> None:
        self._library = library
        self._hub = hub

    def entry(self, name: str, kind: Kind) -> Entry:
        """Return a run or search of the listing; raise a 404 error if it does not exist."""
        entry = self._library.find(name, kind)
        if entry is None:
            raise HTTPException(404, f"there is no {kind} '{name[:200]}' in {self._library.runs_dir}")
        return entry

    def overview(self) -> Topic[Overview]:
        """Return the topic of all runs and searches."""
        return self._hub.topic("overview", "", lambda: Overview(self._library))

    def run(self, name: str) -> Topic[RunView]:
        """Return the topic of one run."""
        entry = self.entry(name, "run")
        return self._hub.topic("run", name, lambda: RunView(entry))

    def search(self, name: str) -> Topic[SearchView]:
        """Return the topic of one search."""
        entry = self.entry(name, "search")
        return self._hub.topic("search", name, lambda: SearchView(entry))


def _add_data(app: FastAPI, topics: Topics) -> None:
    @app.get("/api/overview")
    async def overview() -> Response:
        return Strict(await topics.overview().ask(lambda view: view.snapshot()))

    @app.get("/api/run")
    async def run(name: Name) -> Response:
        return Strict(await topics.run(name).ask(lambda view: view.snapshot()))

    @app.get("/api/search")
    async def search(name: Name) -> Response:
        return Strict(await topics.search(name).ask(lambda view: view.snapshot()))

    @app.get("/api/search/figures")
    async def figures(name: Name) -> Response:
        return Strict(await topics.search(name).ask(lambda view: view.figures()))

    @app.get("/api/search/importance")
    async def importance(name: Name) -> Response:
        find = await topics.search(name).ask(lambda view: view.importance())
        return Strict(await asyncio.to_thread(find))

    @app.get("/api/search/trial")
    async def trial(name: Name, trial: int) -> Response:
        found = await topics.search(name).ask(lambda view: view.trial(trial))
        if found is None:
            raise HTTPException(404, f"the search '{name[:200]}' has no trial {trial} (yet)")
        return Strict(found)


def _add_predictions(app: FastAPI, library: Library) -> None:
    @app.get("/api/predictions")
    def of_all_runs() -> Response:
        return Strict(predictions(library))


def _add_live(app: FastAPI, topics: Topics, hub: Hub) -> None:
    @app.get("/api/live")
    async def live(run: Name | None = None, search: Name | None = None) -> Response:
        topic: Topic[Any] = topics.overview()
        if run is not None:
            topic = topics.run(run)
        elif search is not None:
            topic = topics.search(search)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(hub.follow(topic), media_type="text/event-stream", headers=headers)


def _add_report(app: FastAPI, topics: Topics) -> None:
    @app.get("/report")
    def report(name: Name) -> Response:
        try:
            text = SearchPaths(topics.entry(name, "search").path).report.read_bytes()
        except OSError:
            raise HTTPException(404, f"the search '{name[:200]}' has no report yet") from None
        headers = {"content-security-policy": _REPORT_POLICY, "cache-control": "no-store"}
        return Response(text, media_type=_TYPES[".html"], headers=headers)
