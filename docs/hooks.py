"""What the site computes when it is built: predictions, messages, and roles of docstrings.

Nothing here imports torch; the site's environment has none.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_ERRORS = ("ValueError", "TypeError", "RuntimeError", "UserError", "ModuleNotFoundError")


def on_page_markdown(markdown: str, **_: Any) -> str:
    if "<!-- predicted -->" in markdown:
        made = subprocess.run(
            [sys.executable, "-m", "bench.model"], cwd=ROOT, capture_output=True, text=True
        )
        if made.returncode:
            raise RuntimeError(f"python -m bench.model failed:\n{made.stderr}")
        markdown = markdown.replace("<!-- predicted -->", made.stdout)
    if "<!-- messages -->" in markdown:
        markdown = markdown.replace("<!-- messages -->", "\n".join(_table()))
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name each other with roles of Sphinx, which MkDocs would print as they are."""
    html = re.sub(r":(?:func|class|mod|meth|data|attr):<code>~?", "<code>", html)
    return re.sub(r":(?:func|class|mod|meth|data|attr):(?=<)", "", html)


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
            yield f"\n### {module}\n\n| | |\n|---|---|"
            last = module
        plain = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
        yield f"| {kind} | {plain} |"
