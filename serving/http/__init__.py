"""The HTTP side of serving: a FastAPI application over a registry of models. Imports neither Ray nor torch."""

from __future__ import annotations

from orchestray.serving.http.access_log import log_access_to
from orchestray.serving.http.app import make_app
from orchestray.serving.http.auth import Tokens
from orchestray.serving.http.monitor import Monitor
from orchestray.serving.http.problems import HttpProblem
from orchestray.serving.http.settings import HttpSettings

__all__ = ["HttpProblem", "HttpSettings", "Monitor", "Tokens", "log_access_to", "make_app"]
