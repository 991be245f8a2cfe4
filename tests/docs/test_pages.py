"""The site's snippets and notebooks run; its tables are those of the committed measurements."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(page.relative_to(DOCS)): re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in sorted(DOCS.rglob("*.md"))
}
PAGES = {name: snippets for name, snippets in PAGES.items() if snippets}
BLOB = "https://github.com/fusedce/fusedce/blob/main"
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))


@pytest.mark.parametrize("name", PAGES)
def test_the_snippets_of_a_page_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "pasted"}
    for snippet in PAGES[name]:
        exec(compile(snippet, name, "exec"), session)


def test_pages_with_snippets_are_found():
    assert {"quickstart.md", "audit.md", "guides/packing.md"} <= PAGES.keys()


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


def test_other_words_and_other_numbers_are_seen():
    assert same("loss 1.000 over 9", "loss 1.001 over 9")
    assert not same("loss 1.000 over 9", "loss 1.100 over 9")
    assert not same("loss 1.000", "gain 1.000")


@pytest.mark.parametrize("page", ["benchmarks.md", "accuracy.md"])
def test_tables_are_those_of_the_committed_measurements(page, tmp_path, monkeypatch):
    """What `bench/report.py` would write is what stands there."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    import report

    copy = tmp_path / page
    copy.write_text(re.sub(r"(<!-- \w+ cpu -->\n).*?(?=<!-- end)", r"\1", (DOCS / page).read_text(),
                           flags=re.DOTALL))  # fmt: skip
    data = str(ROOT / "bench" / "results" / "loss-cpu.json")
    monkeypatch.setattr(sys, "argv", ["report.py", data, "--readme", str(copy)])
    assert report.main() == 0
    written, expected = copy.read_text(), (DOCS / page).read_text()
    if "<!-- options cpu -->" in expected:
        import options
        from lib.tables import put

        measured = json.loads((ROOT / "bench" / "results" / "options-cpu.json").read_text())
        put(copy, "options cpu", options.tables(measured))
        written = copy.read_text()
    assert written == expected


def test_the_table_of_real_weights_is_that_of_the_committed_measurement(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import finetune_smollm

    page = (DOCS / "denominator.md").read_text()
    copy = tmp_path / "denominator.md"
    copy.write_text(re.sub(r"(<!-- smollm cpu -->\n).*?(?=<!-- end)", r"\1", page,
                           flags=re.DOTALL))  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["finetune_smollm.py", "--table", "--readme", str(copy)])
    finetune_smollm.main()
    assert copy.read_text() == page
    runs = json.loads((ROOT / "bench/results/finetune-smollm-cpu.json").read_text())["runs"]
    assert 1000 * runs["fused 1x8"]["logged_gap"] < runs["naive 1x8"]["logged_gap"]


def test_the_site_lists_every_page():
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in [*DOCS.rglob("*.md"), *NOTEBOOKS]:
        assert f": {page.relative_to(DOCS)}\n" in nav, page


@pytest.mark.parametrize(
    ("home", "page", "link", "expected"),
    [
        ("docs/audit.md", "docs/audit.md", "../examples/audit.py", f"{BLOB}/examples/audit.py"),
        ("docs/guides/rl.md", "docs/guides/rl.md", "../api.md#recipes", "../api.md#recipes"),
        ("CHANGELOG.md", "docs/changelog.md", "docs/head.md", "head.md"),
        ("CHANGELOG.md", "docs/changelog.md", "Makefile#L3", f"{BLOB}/Makefile#L3"),
        ("README.md", "docs/guides/rl.md", "https://x.org/a", "https://x.org/a"),
        ("docs/audit.md", "docs/audit.md", "no/such.md", "no/such.md"),
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
