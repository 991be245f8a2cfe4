"""Text that the site computes when it is built: messages, examples, links, docstring roles.

Nothing here imports torch; the site's environment has none.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_REPOSITORY = "https://github.com/fusedce/fusedce/blob/main"
_ERRORS = ("ValueError", "TypeError", "RuntimeError", "UserError", "ModuleNotFoundError")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    at = f"docs/{page.file.src_uri}"
    markdown = linked(markdown, at, at)
    # A page that is a file of the repository, whose links hold there.
    markdown = re.sub(
        r'^--8<-- "(\w+\.md)"$',
        lambda found: linked((ROOT / found[1]).read_text(), found[1], at),
        markdown,
        flags=re.MULTILINE,
    )
    if "<!-- messages -->" in markdown:
        markdown = markdown.replace("<!-- messages -->", "\n".join(_table()))
    if "<!-- examples -->" in markdown:
        markdown = markdown.replace("<!-- examples -->", "\n".join(examples()))
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Render what docstrings take from Sphinx: roles, and the double colon before a block."""
    html = re.sub(r"::(?=\s*</p>)", ":", html)
    # A section that begins with a role has lost the role's first colon.
    html = re.sub(r"(?::|(?<=<p>))(?:func|class|mod|meth|data|attr):<code>~?", "<code>", html)
    return re.sub(r":(?:func|class|mod|meth|data|attr):(?=<)", "", html)


def linked(markdown: str, home: str, page: str) -> str:
    """Links of a text that lies at ``home`` in the repository, as the page at ``page`` needs them.

    Those to a page of the site stay on the site, those to another file go to the repository.
    """

    def link(found: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(home), found[1]))
        if not (ROOT / path).exists():
            return found[0]  # MkDocs names it
        if path.startswith("docs/"):
            return f"]({os.path.relpath(path, os.path.dirname(page))}{found[2] or ''})"
        return f"]({_REPOSITORY}/{path}{found[2] or ''})"

    return re.sub(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)", link, markdown)


def messages() -> Iterator[tuple[str, str, str]]:
    """``(module, kind, message)`` of every error and warning in the package, as written."""
    for file in sorted((ROOT / "fusedce").rglob("*.py")):
        if "kernels" in file.parts:
            continue
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func)
            kind = "warning" if name == "warnings.warn" else name
            text = _text(node.args[0])
            if (kind in _ERRORS or kind == "warning") and len(text) > 20:
                yield module, kind, text


def examples() -> Iterator[str]:
    """A table of the programs in `examples/`: the first line of each."""
    yield "| Program | What it shows |\n|---|---|"
    for file in sorted((ROOT / "examples").glob("*.py")):
        first = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0]
        yield f"| [`{file.name}`]({_REPOSITORY}/examples/{file.name}) | {first} |"


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _table() -> Iterator[str]:
    last = ""
    for module, kind, text in messages():
        if module != last:
            yield f'\n??? note "{module}"\n\n    | | |\n    |---|---|'
            last = module
        plain = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
        yield f"    | {kind} | {plain} |"
