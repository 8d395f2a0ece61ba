"""YAML with the scalars that people expect: those of YAML 1.2's core schema, and no key twice in a mapping.

PyYAML reads YAML 1.1, in which `1e-3` is text, `no` is false, `1:30` is 90 and `010` is 8. If a key occurs twice,
PyYAML silently keeps the last value.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_CORE = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), [*"~nN", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), [*"-+0123456789"]),
    ("tag:yaml.org,2002:float", _FLOAT, [*"-+.0123456789"]),
)


class YamlError(ValueError):
    """Raised for text that is not YAML; gives the position."""


class _Loader(yaml.SafeLoader):
    """The safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's interface; filled below

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} is there twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        return int(node.value)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text which either version of YAML would read as something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists under their key."""
        super().increase_indent(flow, False)

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escape characters that YAML folds or cannot show: line breaks (there are five kinds), control characters."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


for _tag, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole)


def read(text: str) -> Any:
    """Read one YAML document.

    Raises:
        YamlError: gives line, column and problem.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context or "is no YAML"
        if error.context and problem.startswith("but "):  # the second half of a sentence
            problem = f"{error.context}, {problem}"
        raise YamlError(f"{where}{problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(str(error).splitlines()[0]) from None


def scalar(text: str) -> Any:
    """Return the value of a text that is one scalar without quotes: null, true, false, a number, or the text itself."""
    return read(text) if any(pattern.match(text) for _, pattern, _ in _CORE) else text


def is_block(text: str) -> bool:
    """Return True if a text is a mapping or a list of YAML that is written without brackets."""
    node = _composed(text)
    return isinstance(node, yaml.CollectionNode) and not node.flow_style


def is_plain_text(text: str) -> bool:
    """Return True if a text is one scalar of YAML without quotes."""
    node = _composed(text)
    return isinstance(node, yaml.ScalarNode) and not node.style


def has_comment(text: str) -> bool:
    """Return True if YAML skips a comment in a text, or would if it could read the rest."""
    end = 0
    try:
        for token in yaml.scan(text, Loader=_Loader):
            if "#" in text[end : token.start_mark.index]:
                return True
            end = max(end, token.end_mark.index)
    except yaml.YAMLError:
        pass
    return "#" in text[end:]


def _composed(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return None


def write(data: Any) -> str:
    """Write plain data as YAML, which `read` (and any reader of YAML 1.1) restores unchanged."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    return text
