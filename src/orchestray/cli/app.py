"""The console script `orchestray`.

Nothing heavy is imported before the arguments are parsed: the list of commands is a table of texts, and the module of a
command is loaded when that command is called.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from orchestray.platform.errors import OrchestrayError

COMMANDS = {
    "train": "Train a model.",
    "search": "Search hyper-parameters or architectures.",
    "compress": "Make a trained model smaller.",
    "bench": "Measure the latency of an endpoint under load.",
    "serve": "Serve a trained model over HTTP.",
    "analyse": "Count what a step of a model costs: work, depth, bytes.",
    "plan": "Predict what each scheme would cost a config.",
    "simulate": "Simulate training by thousands of workers.",
    "advise": "Say whether to distribute a training, and how.",
    "exhibit": "Compute a bound, a rate or a published table.",
    "calibrate": "Measure this machine, for predictions of training times.",
    "lab": "Compare the survey's operators on this machine.",
    "validate": "Check configs without starting anything.",
    "runs": "The runs there are, and what came of them.",
    "submit": "Run a command as a job on a Ray cluster.",
    "jobs": "The submitted jobs: list them, read their logs, stop them.",
    "dashboard": "A web page over the runs and searches.",
    "systems": "The systems of the field that work here, and how to run them.",
}
"""Every command and its line in `orchestray --help`; the module is `orchestray.cli.<name>`."""

_PACKAGE = "orchestray.cli"


class LazyGroup(TyperGroup):
    """A command group that lists its commands from a table and loads only the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, line in COMMANDS.items():
            if find_spec(f"{_PACKAGE}.{name}") is not None:
                self.commands[name] = TyperCommand(name=name, help=line)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the called command and load it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = load_command(name)
        return name, command, rest


def load_command(name: str) -> Any:
    """Import the module of a command and convert its Typer app to a command."""
    command = typer.main.get_command(import_module(f"{_PACKAGE}.{name}").app)
    command.name = name
    # Every Typer app of its own would offer to install shell completion.
    command.params = [
        option for option in command.params if option.name not in {"install_completion", "show_completion"}
    ]
    for option in command.params:
        option.callback = option.callback or _finite
    _write_usage_plainly(command)
    return command


def _finite(_context: Any, _option: Any, value: Any) -> Any:
    """Return the value of an option; of numbers, a lower bound alone lets an infinite one through."""
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"it must be a finite number, got {value}")
    return value


def _write_usage_plainly(command: Any) -> None:
    """Show required arguments in the usage line as they are typed: Typer puts braces round them."""
    pieces = command.collect_usage_pieces
    command.collect_usage_pieces = lambda context: [
        piece.replace("{", "").replace("}", "") for piece in pieces(context)
    ]
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            _write_usage_plainly(each)


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from orchestray import __version__

        print(f"orchestray {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: orchestray train configs/train/digits.yaml train.epochs=3")
def orchestray(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Parallel and distributed training of PyTorch models on Ray."""


def main() -> None:
    """Run the command line; a user's mistake gives sentences on stderr and an exit status, never a traceback."""
    try:
        try:
            typer.main.get_command(app)(prog_name="orchestray")
        finally:
            sys.stdout.flush()
    except OrchestrayError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to print has no place
        sys.exit("could not print: the disk with the file of the output is full; free some space, or print elsewhere")


if __name__ == "__main__":
    main()
