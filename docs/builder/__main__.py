"""Build the site of the documentation into build/site, or into the folder `site` of another one: `make docs`.

It needs no network, and every warning is an error.

The pages are written to be read in the repository. Their copies in build/pages differ in two things: links to files
outside docs/ lead to copies in the site, and the name of a file stands above its block.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from builder.navigation import LINK, missing, navigation

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = "repository"
"""Folder of the site with the files of the repository that pages link to."""
_NAMED = re.compile(r"^<!-- file: ([^\n]*?) -->\n```(\w+)$", flags=re.MULTILINE)
_PUBLISHED = shutil.ignore_patterns("builder", "__pycache__")


def main() -> None:
    """Build the site; exit with a sentence if a page is in no index, or with the status of the build."""
    build = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "build"
    if left_out := missing(DOCS):
        sys.exit(f"no index.md links to {', '.join(left_out)}: the navigation has what its folder's index.md links to")
    pages = build / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(DOCS, pages, ignore=_PUBLISHED)
    (pages / "assets").mkdir()
    for asset in ("iframe-worker.js", "site.css"):
        shutil.copy(DOCS / "builder" / asset, pages / "assets")
    for page in sorted(DOCS.rglob("*.md")):
        write_page(page, pages)
    source = build / "python" / "orchestray"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "orchestray", source, ignore=_no_modules)
    (source / "platform" / "__init__.py").touch()  # else the reader of docstrings takes the folder for no package
    config = build / "zensical.yml"
    config.write_text(settings(), encoding="utf-8")
    command = [Path(sys.executable).parent / "zensical", "build", "--clean", "--strict", "--config-file", config]
    sys.exit(subprocess.run(command, check=False).returncode)


def _no_modules(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not name.endswith(".py") and not (Path(folder) / name).is_dir()]


def settings() -> str:
    """Return the config of the site: what stands in zensical.yml, with the folders and the navigation."""
    written = (DOCS / "builder" / "zensical.yml").read_text(encoding="utf-8")
    return written + yaml.safe_dump({"docs_dir": "pages", "site_dir": "site", "nav": navigation(DOCS)}, sort_keys=False)


def write_page(page: Path, pages: Path) -> None:
    """Write the copy of a page of docs/ into the folder `pages`, and the files that it links to beside it."""
    place = page.relative_to(DOCS)

    def inside(link: re.Match[str]) -> str:
        file = (page.parent / link[1]).resolve()
        if "://" in link[1] or file.is_relative_to(DOCS) or not file.is_relative_to(ROOT) or not file.exists():
            return link[1]  # the strict build says what is wrong with it
        copy = f"{SOURCES}/{file.relative_to(ROOT)}" + (".txt" if file.suffix == ".md" or file.is_dir() else "")
        (pages / copy).parent.mkdir(parents=True, exist_ok=True)
        (pages / copy).write_text(text_of(file), encoding="utf-8")
        return "../" * (len(place.parts) - 1) + copy

    text = LINK.sub(inside, page.read_text(encoding="utf-8"))
    (pages / place).write_text(_NAMED.sub(r'```\2 title="\1"', text), encoding="utf-8")


def text_of(file: Path) -> str:
    """Return the text of a file, or the names in a folder."""
    if file.is_dir():
        return "\n".join(sorted(entry.name for entry in file.iterdir() if entry.name != "__pycache__"))
    return file.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
