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

# A symptom, and the modules whose messages show it.
_SYMPTOMS = {
    "An argument of a loss is refused": ("contract.checks", "contract.divergence", "loss"),
    "Labels, shifts or documents do not fit": ("contract.labels",),
    "A LossSum is refused where a number or a loss is expected": ("contract.results",),
    "A derivative is refused": ("autograd", "head.gradient"),
    "A window, a step or clipping is refused": (
        "accumulate.accumulator", "accumulate.arguments", "accumulate.gradients",
        "accumulate.watch", "accumulate.window",
    ),
    "Ranks wait, fail or disagree": (
        "accumulate.exchange", "agreement", "backends.shards", "contract.groups", "ranks.agreement",
    ),
    "An engine (accelerate, DeepSpeed, a pipeline) is refused": ("accumulate.engines",),
    "Saved totals do not load": ("accumulate.sums",),
    "A sharded vocabulary is refused": ("ranks.door", "ranks.layout", "sharded"),
    "A backend cannot run, or is slower": ("backends.choose", "backends.triton"),
    "A head is not replaced, or a model's loss is not counted": ("head",),
    "A trainer is refused, or counts other tokens": ("trainer",),
    "A loss of RL or distillation is refused": ("recipes",),
    "A command, the audit or a test cannot run": ("auditing", "testing", "tools"),
}  # fmt: skip


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


def symptom(module: str) -> str:
    """The heading under which the messages of ``module`` stand."""
    for title, names in _SYMPTOMS.items():
        if any(f"{module}.".startswith(f"fusedce.{name}.") for name in names):
            return title
    raise KeyError(f"{module} has messages: name it in _SYMPTOMS")


def _table() -> Iterator[str]:
    found: dict[str, list[str]] = {title: [] for title in _SYMPTOMS}
    for module, kind, text in messages():
        plain = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
        found[symptom(module)].append(f"    | {kind} | {plain} |")
    for title, lines in found.items():
        yield f'\n??? note "{title}"\n\n    | | |\n    |---|---|'
        yield from lines
