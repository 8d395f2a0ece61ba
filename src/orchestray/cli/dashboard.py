"""`orchestray dashboard`: a web page over the runs and searches of a directory."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from orchestray.cli import options
from orchestray.platform.process.sockets import is_local

app = typer.Typer()

_EPILOG = """Examples:

orchestray dashboard

orchestray dashboard --runs-dir runs --port 9000
"""


@app.command(epilog=_EPILOG)
def dashboard(
    *,
    runs_dir: options.RunsDir = options.DEFAULT_RUNS_DIR,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on; 0: any that is free.")
    ] = 8266,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDR", help="Address to listen on. The page has no password.")
    ] = "127.0.0.1",
    ray_dashboard: Annotated[
        str | None,
        typer.Option(
            "--ray-dashboard",
            metavar="URL",
            envvar="RAY_API_SERVER_ADDRESS",
            help="The Ray dashboard of the cluster, to link to.",
            show_default=False,
        ),
    ] = None,
    tensorboard: Annotated[
        str | None,
        typer.Option("--tensorboard", metavar="URL", help="A TensorBoard that runs, to link to.", show_default=False),
    ] = None,
) -> None:
    """Show runs and searches in the browser, updated live; nothing is changed. Stop it with Ctrl-C."""
    # Imported here: it is slow to load.
    from orchestray.dashboard import serve as serving

    if not is_local(host):
        print(
            f"Warning: --host {host} lets other machines see every run in {runs_dir}, without a password.",
            file=sys.stderr,
        )

    def say(url: str) -> None:
        print(f"Dashboard of {runs_dir}: {url}", flush=True)
        print("Ctrl-C ends it.", file=sys.stderr, flush=True)

    try:
        serving.serve(
            runs_dir, host=host, port=port, ray_dashboard=ray_dashboard, tensorboard=tensorboard, on_ready=say
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
