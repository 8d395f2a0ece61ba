"""The Python API: the public names of the package."""

from __future__ import annotations

from builder.reference.markdown import page

_HOMES = {"search": "orchestray.search.api.search"}
"""Where a name stands that is a module which can be called."""


def python_page() -> str:
    """Return the page of all public names; the site's build fills in their signatures and docstrings."""
    import orchestray

    lines: list[str] = []
    for name in sorted(orchestray.__all__, key=str.lower):
        if name != "__version__":
            home = _HOMES.get(name) or f"{orchestray._HOMES[name]}.{name}"
            options = ["    options:", "      show_root_heading: false"]
            lines += [f"## `orchestray.{name}`", "", f"::: {home}", *options, ""]
    return page("Python API", "The public names of `import orchestray`, as the site shows them.", lines)
