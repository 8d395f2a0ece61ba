"""The rules of English of docstrings and comments, as far as regular expressions can hold them."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

MOST_WORDS = 25
"""Words of a sentence of a docstring."""

_NO_START = re.compile(
    r"^(What|Of|Who|Whom|Whose|Whether|How|Where|When|Which|That|As|See|Be|So|Those|These|Says|From|By|To|In|On|At|For|With|"
    r"Nothing|Nobody|Everybody|Somebody|Whatever|Whoever|The|A|An|This|It|Its|All|Each|Every|No|Not|Any|Some|Both|Their)\b"
)
_NO_NOUN = re.compile(r"^(What|Of|Who|Whom|Whose|Whether|How|Where|When|Which|As|See|Be|So)\b")
_WORDS = {
    "anew": re.compile(r"\banew\b"),
    "told": re.compile(r"\btold\b"),
    "how-manieth": re.compile(r"how-manieth"),
    "be it that": re.compile(r"\bbe it that\b"),
    "who asks, whoever, whom": re.compile(r"\bwho asks\b|\bwhoever\b|\bwhom\b"),
    "in place of (instead of)": re.compile(r"\bin (the )?place of\b"),
    "is no (is not a)": re.compile(r"(?<!there )\b(is|are) no (?!longer\b|more\b|less\b)\w"),
    "so many": re.compile(r"\bso many\b"),
    "of the moment": re.compile(r"\bof the moment\b"),
}
_EMPTY = re.compile(r"^(See the module|See `\w+`\.?$|As `)")


def findings(file: Path) -> list[tuple[int, str]]:
    """Return the line and the rule of every docstring and comment of a file that breaks one."""
    text = file.read_text(encoding="utf-8")
    found = list(_of_docstrings(ast.parse(text)))
    # Tokens take ten times as long as these lines, of which every comment is the end of one.
    maybe = "\n".join(line[line.index("#") :] for line in text.splitlines() if "#" in line)
    suspicious = any(rule.search(maybe) for rule in _WORDS.values())
    for token in tokenize.generate_tokens(io.StringIO(text).readline) if suspicious else ():
        if token.type == tokenize.COMMENT:
            broken = [name for name, rule in _WORDS.items() if rule.search(token.string)]
            found += [(token.start[0], f"comment: {name}") for name in broken]
    return sorted(set(found))


def findings_of_page(text: str) -> list[str]:
    """Return what breaks a rule in the sentences of a page of Markdown; code, tables and headings are left out."""
    found = []
    for sentence in sentences_of_page(text):
        found += [f"{name}: {sentence[:60]}" for name, rule in _WORDS.items() if rule.search(sentence)]
        count = len(sentence.split())
        if count > MOST_WORDS:
            found.append(f"{count} words: {sentence[:60]}")
    return found


def sentences_of_page(text: str) -> list[str]:
    """Return the sentences of a page of Markdown, with their links as plain words and code as one word."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#|\||!!!|\?\?\?|:::|<).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"``?[^`]+``?", "X", text)
    paragraphs = re.split(r"\n\s*(?:[-*]|\d+\.)\s|\n\s*\n", "\n" + text)
    return [
        sentence
        for paragraph in paragraphs
        for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))
        if sentence
    ]


def _of_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in _blocks(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                line = node.body[0].lineno
                if _start_of(node).match(doc):
                    yield line, f"begins with {doc.split()[0]!r}"
                yield from ((line, rule) for rule in _of_text(doc))
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in itertools.pairwise(body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not (isinstance(before, ast.Assign | ast.AnnAssign) and is_text):
                continue
            doc = after.value.value  # type: ignore[union-attr]
            if isinstance(doc, str):
                if _NO_NOUN.match(doc):
                    yield after.lineno, f"begins with {doc.split()[0]!r}"
                yield from ((after.lineno, rule) for rule in _of_text(doc))


def _blocks(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what holds statements: no docstring is in an expression, of which a file has ten times as many nodes."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, name, ())
        for each in inner if isinstance(inner, list) else ():
            yield from _blocks(each)


def _start_of(node: ast.AST) -> re.Pattern[str]:
    """Return the words that the docstring of a node must not begin with: functions want a verb, the others a noun."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name == "__init__":
        return _NO_NOUN
    return _NO_NOUN if any("property" in ast.dump(decorator) for decorator in node.decorator_list) else _NO_START


def _of_text(doc: str) -> Iterator[str]:
    plain = re.sub(r"``?[^`]+``?", "X", doc)
    yield from (name for name, rule in _WORDS.items() if rule.search(plain))
    if _EMPTY.search(doc):
        yield "says nothing"
    for sentence in _sentences(plain):
        count = len(sentence.split())
        if count > MOST_WORDS:
            yield f"{count} words: {sentence[:60]}"


def _sentences(plain: str) -> Iterator[str]:
    """Yield the sentences of a docstring; lists, tables and what stands under Args, Returns or Raises are left out."""
    prose = re.split(r"\n\s*(?:Args|Returns|Raises|Yields|Attributes):", plain)[0]
    for paragraph in re.split(r"\n\s*\n", prose):
        if not re.match(r"\s*([-*|>]|\d+\.|::| {4})", paragraph):
            yield from re.split(r"(?<=[.!?:;])\s+", paragraph.replace("\n", " "))
