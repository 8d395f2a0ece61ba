"""The application: one page, its files, and what it asks for."""

from __future__ import annotations

import asyncio
import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from orchestray.platform.run.files import dump_json
from orchestray.search.dashboard.guard import Guard
from orchestray.search.dashboard.listing import Entry, Kind, Library, Overview
from orchestray.search.dashboard.live import Hub, Topic
from orchestray.search.dashboard.run_view import RunView
from orchestray.search.dashboard.search_view import SearchView
from orchestray.search.records.paths import SearchPaths

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_STYLE_MARK = re.compile(r'if\(!document\.getElementById\("([0-9a-f]{64})"\)\)')
"""Where Plotly's script asks whether the style of its maps is there, and else makes an element that the policy forbids.
No page here draws maps, so an empty element of that name answers."""

_REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; frame-ancestors 'none'"
)
"""A report brings its scripts along: they run as nobody's, and reach nothing."""

Name = Annotated[str, Query(max_length=500)]


class Strict(JSONResponse):
    """JSON without NaN, which is none."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return dump_json(content).encode()


def make_app(
    runs_dir: Path, *, host: str = "127.0.0.1", ray_dashboard: str | None = None, tensorboard: str | None = None
) -> tuple[Guard, Hub]:
    """The application and its hub.

    Args:
        runs_dir: where the runs and searches are.
        host: the address it will listen on; requests for other hosts are refused.
        ray_dashboard: URL of the Ray dashboard, to link to.
        tensorboard: URL of a TensorBoard that runs, to link to.
    """
    library, hub = Library(runs_dir), Hub()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    topics = Topics(library, hub)
    _add_assets(app)
    _add_data(app, topics)
    _add_live(app, topics, hub)
    _add_report(app, topics)

    @app.get("/api/about")
    def about() -> Response:
        return Strict({"runs_dir": str(runs_dir), "ray_dashboard": ray_dashboard, "tensorboard": tensorboard})

    @app.exception_handler(404)
    async def not_found(_: Request, error: Exception) -> Response:
        told = getattr(error, "detail", None)
        return Strict({"error": told if told not in (None, "Not Found") else "there is nothing at this address"}, 404)

    return Guard(app, host), hub


def _add_assets(app: FastAPI) -> None:
    """The page's files: they are looked up in what the packages hold."""
    own, shared = files("orchestray.search.dashboard") / "assets", files("orchestray.search.records") / "assets"
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
    """What pages look at, by the names of the runs and searches that there are."""

    def __init__(self, library: Library, hub: Hub) -> None:
        self._library = library
        self._hub = hub

    def entry(self, name: str, kind: Kind) -> Entry:
        """A run or search of the listing, else 404."""
        entry = self._library.find(name, kind)
        if entry is None:
            raise HTTPException(404, f"there is no {kind} '{name[:200]}' in {self._library.runs_dir}")
        return entry

    def overview(self) -> Topic[Overview]:
        """All of them."""
        return self._hub.topic("overview", "", lambda: Overview(self._library))

    def run(self, name: str) -> Topic[RunView]:
        """One run."""
        entry = self.entry(name, "run")
        return self._hub.topic("run", name, lambda: RunView(entry))

    def search(self, name: str) -> Topic[SearchView]:
        """One search."""
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
