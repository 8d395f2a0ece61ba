"""Every command of `orchestray`, from what `--help` is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.reference.markdown import page, sentence, table
from orchestray.cli.app import COMMANDS, load_command


def cli_page() -> str:
    """Return the page of all commands."""
    lines = [f"- [`orchestray {name}`](#orchestray-{name}): {text}" for name, text in COMMANDS.items()] + [""]
    for name in COMMANDS:
        lines += _command(f"orchestray {name}", load_command(name), 2)
    introduction = "Every command, with all arguments and options. `orchestray COMMAND --help` shows the same."
    return page("Command line", introduction, lines)


def _command(path: str, command: Any, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {path}", "")
    yield from (sentence((command.help or "").partition("\n\nExamples:")[0]), "")
    if getattr(command, "commands", None):
        for name, each in command.commands.items():
            yield from _command(f"{path} {name}", each, level + 1)
        return
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    shown = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join([path, *(_usage(each) for each in arguments), "[OPTIONS]"])
    yield from ("```text", usage, "```", "")
    rows = [[f"`{_metavar(each)}`", "required" if each.required else "", each.help or ""] for each in arguments]
    rows += [[_option(each), _default(each), each.help or ""] for each in shown]
    yield from table(["argument or option", "default", "meaning"], rows)
    examples = (command.epilog or "").replace("Examples:", "").replace("Example:", "").strip()
    if examples:
        typed = [line.strip() for line in examples.splitlines() if line.strip()]
        yield from ("<!-- not run: examples -->", "```sh", *typed, "```", "")


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _usage(argument: Any) -> str:
    text = _metavar(argument) + ("..." if argument.nargs == -1 else "")
    return text if argument.required else f"[{text}]"


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} `{option.metavar or 'VALUE'}`"


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if value is None or value is False or value == () or callable(value):
        return ""
    return f"`{getattr(value, 'value', value.as_posix() if isinstance(value, Path) else value)}`"
