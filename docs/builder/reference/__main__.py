"""Write the pages of docs/reference/ that are made from the code: `make docs` does it before it builds the site."""

from __future__ import annotations

from pathlib import Path

from builder.reference.pages import reference_pages

DOCS = Path(__file__).resolve().parents[2]


def main() -> None:
    """Write every page whose text has changed."""
    for name, text in reference_pages().items():
        file = DOCS / "reference" / f"{name}.md"
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"written: {file.relative_to(DOCS)}")


if __name__ == "__main__":
    main()
