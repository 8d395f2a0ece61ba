"""`orchestray serve`: an HTTP endpoint over trained models."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from orchestray.cli import options
from orchestray.cli.ending import leave_cluster
from orchestray.platform.errors import ConfigError, Interrupted
from orchestray.serving.config.load import load_serve_config
from orchestray.serving.config.schema import ServeConfig

app = typer.Typer()

_EPILOG = """Examples:

orchestray serve runs/digits

orchestray serve runs/digits --local

orchestray serve runs/digits --port 8080 batching.max_batch_size=64 replicas=2

orchestray serve configs/serve/digits.yaml --update

orchestray serve configs/serve/digits.yaml --manifest | kubectl apply -f -
"""


@app.command(epilog=_EPILOG)
def serve(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN_DIR|CONFIG", help="A run or search directory, or a YAML file.", show_default=False),
    ],
    overrides: options.Overrides = None,
    *,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", metavar="N", min=0, max=65535, help="Port to listen on; 0: any that is free.", show_default=False
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Apply the config to the endpoint of its name that runs.")
    ] = False,
    replace: Annotated[
        str | None,
        typer.Option(
            "--replace", metavar="REPLICA", help="Have another take the place of that replica of the one that runs."
        ),
    ] = None,
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Print Kubernetes objects for the endpoint, and do no more.")
    ] = False,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="Container image that --manifest names.")
    ] = "orchestray:latest",
    runs_dir: options.RunsDir = options.DEFAULT_RUNS_DIR,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the endpoint, in place of the config's.")
    ] = None,
    address: options.Address = None,
    local: Annotated[
        bool, typer.Option("--local", help="Answer in this process, without Ray; for models with one replica.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the URL alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say it as JSON, as the last line of stdout.")] = False,
) -> None:
    """Serve trained models over HTTP; print the URL when it answers. Ctrl-C ends it once all requests are answered."""
    asked = {"--manifest": manifest, "--update": update, "--replace": replace is not None}
    if len(given := [option for option, is_there in asked.items() if is_there]) > 1:
        raise ConfigError(f"{given[0]}: does something else than {given[1]}; give one of them at a time")
    changes = [*(overrides or ()), *([] if port is None else [f"http.port={port}"])]
    config = load_serve_config(source, changes, name=name, look_at_files=not manifest)  # before slow imports
    # Imported here: it is slow to load.
    if manifest:
        from orchestray.serving.lifecycle.manifest import assumptions, manifest_yaml

        print(manifest_yaml(config, image=image), end="")
        for assumption in assumptions(config):
            print(f"note: {assumption}.", file=sys.stderr)
        return
    from orchestray.serving import api

    if update or replace is not None:
        changed = (
            api.update(config, runs_dir=runs_dir)
            if replace is None
            else api.replace(config, replace, runs_dir=runs_dir)
        )
        print(json.dumps({"name": config.name, "changed": changed}) if as_json else f"{config.name}: {changed}.")
        return

    def say(url: str) -> None:
        if as_json:
            print(json.dumps({"name": config.name, "url": url, "pid": os.getpid()}), flush=True)
        else:
            print(url if quiet else f"Serving {_models(config)} at {url}", flush=True)
        if not quiet:
            print("Open it to try the model; /docs has the API. Ctrl-C ends it.", file=sys.stderr, flush=True)

    if not quiet:
        print(f"Loading {_models(config)}.", file=sys.stderr, flush=True)  # replicas and large models take a while
    try:
        api.serve(config, runs_dir=runs_dir, address=address, local=local, on_ready=say)
    except (KeyboardInterrupt, Interrupted):
        raise typer.Exit(130) from None
    finally:
        leave_cluster()


def _models(config: ServeConfig) -> str:
    names: dict[str, list[str]] = {}
    for model in config.models:
        names.setdefault(model.name, []).append(str(model.version))
    return ", ".join(
        name if len(versions) == 1 else f"{name} (versions {', '.join(versions)})" for name, versions in names.items()
    )
