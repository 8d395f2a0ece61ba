"""Every key of the three kinds of config, from their JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from builder.reference.markdown import page, sentence, slug, table

Json = dict[str, Any]

PAGES = {
    "train.optimizer": "optimizers",
    "train.solver": "optimizers",
    "train.average": "optimizers",
    "train.lr_schedule": "optimizers",
    "train.batch_schedule": "optimizers",
    "strategy.exchange": "exchanges",
    "strategy.aggregation": "exchanges",
    "strategy.compression": "compressions",
    "train.quantize": "compressions",
    "task": "tasks",
    "search.method": "methods",
    "search.space": "methods",
}
"""Pages of their own for keys that have a `type`; the others stand on the page of their kind of config."""
KINDS = {"train": "config-train", "search": "config-search", "serve": "config-serve"}
"""Pages of the kinds of config."""
INTRODUCTIONS = {
    "config-train": (
        "Config of training",
        "Every key that `orchestray train` takes. `orchestray validate --schema train` prints the JSON schema.",
    ),
    "config-search": (
        "Config of a search",
        "Every key that `orchestray search` takes. `orchestray validate --schema search` prints the JSON schema.",
    ),
    "config-serve": (
        "Config of an endpoint",
        "Every key that `orchestray serve` takes. `orchestray validate --schema serve` prints the JSON schema.",
    ),
    "optimizers": (
        "Optimizers and schedules",
        "All optimizers, solvers, averages of the weights, and schedules of the learning rate and of the batch.",
    ),
    "exchanges": (
        "Exchanges and aggregations",
        "All ways in which replicas agree (data parallelism), and all rules that combine their gradients.",
    ),
    "compressions": (
        "Compressions and quantization",
        "Gradient compression on the wire, and networks that compute with few bits.",
    ),
    "tasks": ("Tasks", "The tasks that come along. A task of your own is a class, `type: file.py:Class`."),
    "methods": (
        "Search methods and spaces",
        "All methods of `orchestray search`, and all kinds of values that a key may take.",
    ),
}


@dataclass
class _Walk:
    """Sections of one config that are written, or are to be."""

    kind: str
    definitions: Json
    lines: dict[str, list[str]] = field(default_factory=dict)
    places: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict)
    """Maps the names of sections to the page and the anchor where they stand."""
    waiting: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)


def pages(schemas: dict[str, Json]) -> dict[str, str]:
    """Return the pages for the schemas of the three kinds of config, by their names."""
    lines: dict[str, list[str]] = {}
    for kind, schema in schemas.items():
        walk = _Walk(kind, schema["$defs"])
        if kind == "search":  # what a base may hold stands on its own page
            walk.places[("TrainConfig",)] = (KINDS["train"], "")
        walk.lines[KINDS[kind]] = ["## Top level", ""]
        walk.lines[KINDS[kind]] += _keys(walk, KINDS[kind], "", schema)
        while walk.waiting:
            where, path, names = walk.waiting.pop(0)
            walk.lines.setdefault(where, []).extend(_section(walk, where, path, names))
        for where, written in walk.lines.items():
            if where not in lines:
                lines[where] = written
    return {where: page(*INTRODUCTIONS[where], written) for where, written in lines.items()}


def _section(walk: _Walk, where: str, path: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a section, or of all types that it may have."""
    yield from (f"## `{path}`", "")
    for name in names:
        definition = walk.definitions[name]
        if len(names) > 1:
            yield from (f"### {_type_of(definition) or definition['title']}", "")
        if definition.get("description"):
            yield from (sentence(definition["description"].partition("\n\n")[0]).replace("\n", " "), "")
        yield from _keys(walk, where, path, definition)


def _type_of(definition: Json) -> str:
    kind = definition.get("properties", {}).get("type", {})
    return str(kind.get("const", kind.get("default", "")))


def _keys(walk: _Walk, where: str, path: str, definition: Json) -> list[str]:
    """Return the table of the keys of a section, and note the sections that they name."""
    required = definition.get("required", ())
    rows = []
    for key, schema in definition.get("properties", {}).items():
        if key == "type" and "const" in schema:
            continue
        default = "required" if key in required else f"`{_default(schema)}`"
        full = f"{path}.{key}".strip(".")
        meaning = schema.get("description") or _section_meaning(walk, schema)
        rows.append([f"`{key}`", _values(walk, where, full, schema), default, meaning])
    more = ["Other keys are arguments of the class.", ""] if definition.get("additionalProperties") is True else []
    return (table(["key", "value", "default", "meaning"], rows) if rows else []) + more


def _section_meaning(walk: _Walk, schema: Json) -> str:
    """Return what the section says of itself that a key holds."""
    names = _names(schema)
    text = str(walk.definitions[names[0]].get("description", "")) if len(names) == 1 else ""
    return text.partition("\n\n")[0]


def _default(schema: Json) -> str:
    default = schema.get("default")
    if isinstance(default, dict) and default:
        return f"{{type: {default['type']}}}" if "type" in default else "{...}"
    return json.dumps(default)


def _values(walk: _Walk, where: str, path: str, schema: Json) -> str:
    """Return what a key may hold, in words."""
    if "$ref" in schema or "oneOf" in schema:
        return _link(walk, where, path, _names(schema))
    if "anyOf" in schema:
        members = list(schema["anyOf"])
        sections = [each for each in members if "$ref" in each]
        words = [_values(walk, where, path, each) for each in members if each not in sections]
        if sections:
            words.insert(0, _link(walk, where, path, _names({"oneOf": sections})))
        return ", or ".join(dict.fromkeys(word for word in words if word != "null"))
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    return _plain(walk, where, path, schema)


def _plain(walk: _Walk, where: str, path: str, schema: Json) -> str:
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items") or {"anyOf": schema.get("prefixItems", [])}
        if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])}"
        return f"list: {_values(walk, where, path, items)}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"map: {_values(walk, where, path, values)}" if isinstance(values, dict) else "map"
    names = {"boolean": "`true`, `false`", "string": "text", "integer": "integer", "number": "number", "any": "any"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [(sign, schema[key]) for key, sign in bounds.items() if key in schema]
    limits = [f"{sign} {limit if isinstance(limit, int) else format(limit, 'g')}" for sign, limit in found]
    return " ".join([names.get(kind, kind), *([", ".join(limits)] if limits else [])])


def _names(schema: Json) -> tuple[str, ...]:
    """Return the names of the sections that a schema refers to."""
    refs = [each["$ref"] for each in schema.get("oneOf", [schema]) if "$ref" in each]
    return tuple(ref.rpartition("/")[2] for ref in refs)


def _link(walk: _Walk, where: str, path: str, names: tuple[str, ...]) -> str:
    """Return a link to sections, which are written later if they are not yet."""
    if names not in walk.places:
        on = PAGES.get(path, where)
        walk.places[names] = (on, slug(path))
        walk.waiting.append((on, path, names))
    on, anchor = walk.places[names]
    words = "section" if len(names) == 1 else "a `type`"
    target = ("" if on == where else f"{on}.md") + (f"#{anchor}" if anchor else "")
    return f"[{words}]({target})"
