"""All pages that are made."""

from __future__ import annotations

from builder.reference import config
from builder.reference.cli import cli_page
from builder.reference.endings import exit_page
from builder.reference.http import http_page
from builder.reference.metrics import metrics_page
from builder.reference.policies import policies_page
from builder.reference.python_api import python_page
from builder.reference.run_directory import run_page
from builder.reference.systems import systems_page
from orchestray.search.config.load import search_schema
from orchestray.serving.config.schema import ServeConfig
from orchestray.trainers.config.schema import TrainConfig


def reference_pages() -> dict[str, str]:
    """Return the text of each page of docs/reference/ that is made, by its name without `.md`."""
    schemas = {
        "train": TrainConfig.model_json_schema(),
        "search": search_schema(),
        "serve": ServeConfig.model_json_schema(),
    }
    return {
        "cli": cli_page(),
        **config.pages(schemas),
        "policies": policies_page(),
        "http": http_page(),
        "metrics": metrics_page(),
        "exit-codes": exit_page(),
        "run-directory": run_page(),
        "python": python_page(),
        "systems-table": systems_page(),
    }
