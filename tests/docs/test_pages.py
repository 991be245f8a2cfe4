"""The site's snippets and notebooks run; its tables are those of the committed measurements."""

import contextlib
import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import fusedce

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
TEXTS = {str(page.relative_to(DOCS)): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Files of examples, which tests/examples runs. Their fence is one that ruff does not format.
INCLUDED = re.compile(r'^``` {\.python}\n--8<-- "(examples/\w+\.py)"\n```$', re.MULTILINE)
PAGES = {
    name: [code for tag, code in FENCE.findall(text) if tag == "python"]
    for name, text in TEXTS.items()
}
PAGES = {name: snippets for name, snippets in PAGES.items() if snippets}
BLOB = "https://github.com/fusedce/fusedce/blob/main"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("name", PAGES)
def test_the_snippets_of_a_page_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "pasted"}
    try:
        for snippet in PAGES[name]:
            exec(compile(snippet, name, "exec"), session)
    finally:
        if dist.is_initialized():  # a page on ranks makes a group of one process
            dist.destroy_process_group()


@pytest.mark.parametrize("name", TEXTS)
def test_every_block_says_its_language(name):
    """A block of Python without a tag would be neither coloured nor run."""
    tags = [tag for tag, _ in FENCE.findall(TEXTS[name])]
    assert set(tags) <= {"python", " {.python}", "bash", "text", "diff"}
    assert tags.count(" {.python}") == len(INCLUDED.findall(TEXTS[name]))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path):
    """Its own asserts hold; what it prints is what was committed, but for the last digits."""
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert len(cells) >= 4
    session = {"__name__": "__main__"}
    for cell in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), path.name, "exec"), session)
        shown = "".join("".join(out["text"]) for out in cell["outputs"])
        assert same(printed.getvalue(), shown), (printed.getvalue(), shown)


def same(a, b):
    """The same words, and numbers within a hundredth."""
    number = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"
    words = re.sub(number, "#", a) == re.sub(number, "#", b)
    pairs = zip(re.findall(number, a), re.findall(number, b), strict=False)
    return words and all(abs(float(x) - float(y)) <= 0.01 * abs(float(y)) for x, y in pairs)


@pytest.mark.parametrize(
    ("page", "tables", "script", "data"),
    [
        ("benchmarks.md", r"\w+ cpu[\w-]*", "report", "[le][oa]*-cpu*.json"),
        ("denominator.md", "smollm cpu", "accumulation", ""),
    ],
)
def test_tables_are_those_of_the_committed_measurements(
    tmp_path, monkeypatch, page, tables, script, data
):
    """The page holds the tables that a script of `bench` would write."""
    text, copy = TEXTS[page], tmp_path / page
    empty, count = re.subn(rf"(<!-- {tables} -->\n).*?(?=<!-- end)", r"\1", text, flags=re.DOTALL)
    copy.write_text(empty)
    files = sorted(map(str, RESULTS.glob(data))) if data else []
    monkeypatch.setattr(sys, "argv", [script, *files, "--readme", str(copy)])
    assert not importlib.import_module(script).main()
    assert count
    assert copy.read_text() == text


def test_what_is_said_of_the_measurements_holds():
    assert TEXTS["benchmarks.md"].count("| fused_ce") > 5
    runs = json.loads((RESULTS / "finetune-smollm-cpu.json").read_text())["runs"]
    assert 1000 * runs["fused 1x8"]["logged_gap"] < runs["naive 1x8"]["logged_gap"]


def test_the_site_lists_every_page():
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in [*DOCS.rglob("*.md"), *NOTEBOOKS]:
        assert f": {page.relative_to(DOCS)}\n" in nav, page


@pytest.mark.parametrize(
    ("home", "page", "link", "expected"),
    [
        ("docs/head.md", "docs/head.md", "../examples/plain.py", f"{BLOB}/examples/plain.py"),
        ("docs/guides/rl.md", "docs/guides/rl.md", "../api.md#recipes", "../api.md#recipes"),
        ("CHANGELOG.md", "docs/changelog.md", "docs/head.md", "head.md"),
        ("CHANGELOG.md", "docs/changelog.md", "Makefile#L3", f"{BLOB}/Makefile#L3"),
        ("README.md", "docs/guides/rl.md", "https://x.org/a", "https://x.org/a"),
        ("docs/head.md", "docs/head.md", "no/such.md", "no/such.md"),
    ],
)
def test_links_hold_in_the_repository_and_on_the_site(monkeypatch, home, page, link, expected):
    monkeypatch.syspath_prepend(DOCS)
    import hooks

    assert hooks.linked(f"see [it]({link}).", home, page) == f"see [it]({expected})."


def test_every_message_of_the_package_is_collected(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import hooks

    found = list(hooks.messages())
    assert len(found) > 100
    texts = " ".join(text for _, _, text in found)
    for words in ("weight must be", "is no folder, file, class or model type"):
        assert words in texts
    page = "\n".join(hooks._table())
    assert page.count("\n    | ") >= len(found)
    assert "fusedce." not in " ".join(re.findall(r'\?\?\? note "(.*)"', page))


def test_the_api_page_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, re.MULTILINE))
    assert set(fusedce.__all__) - shown == set()
    assert page.startswith("---\nsearch:\n  boost: ")  # before the pages that mention an option


def test_examples_in_docstrings_are_sections_that_render_as_code():
    """Prompts become code under the heading "Examples:" alone, in Google's style."""
    sources = [p for p in (ROOT / "fusedce").rglob("*.py") if "kernels" not in p.parts]
    lines = [line.strip() for p in sources for line in p.read_text().splitlines()]
    assert lines.count("Examples:") > 25
    assert "Example:" not in lines


def test_every_file_that_contributing_names_is_there():
    named = [x for x in re.findall(r"`([\w*./]+)`", CONTRIBUTING) if "/" in x or x.endswith(".py")]
    assert len(named) > 30
    places = (ROOT, ROOT / "fusedce", ROOT / "fusedce" / "backends", ROOT / "fusedce" / "autograd")
    bare = {file.name for file in (ROOT / "fusedce").rglob("*.py")}
    missing = [x for x in named if x not in bare and not any(list(p.glob(x)) for p in places)]
    assert missing == []


def test_contributing_stays_short():
    assert len(CONTRIBUTING.splitlines()) <= 100
