"""Files, commands and options that the texts name exist; figures in prose are those of the data."""

import importlib
import json
import re
import statistics
from pathlib import Path

import pytest
from support.command_line import call

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "LOG.md"]
}
FILE = re.compile(r"(?<![\w/.-])(?:\.ci|bench|docs|examples|fusedce|kernels|tests)/[\w/.*-]+\.\w+")
CODE = re.compile(r"^```\w*\n(.*?)^```$|`([^`\n]+)`", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|[ (])(make|fusedce) ([a-z][\w.-]*)")
SCRIPT = re.compile(r"(bench/\w+\.py|tests/\w+\.py|examples/\w+\.py)((?: [^|&;\n#]+)?)")


def code_of(text):
    return [block or inline for block, inline in CODE.findall(text)]


def is_there(path):
    return bool(list(ROOT.glob(path))) or (ROOT / path).exists()


def missing(text):
    """What a text names and is not there: files, targets of make, commands, options of scripts."""
    found = [path for path in FILE.findall(text) if not is_there(path.rstrip("."))]
    makefile, cli = (ROOT / "Makefile").read_text(), (ROOT / "fusedce" / "cli.py").read_text()
    for code in code_of(text):
        for program, name in COMMAND.findall(code):
            known = rf"^(?:[\w .-]* )?{re.escape(name)}(?: [\w .-]*)?:" if program == "make" else (
                rf"^def {name}(?:_command)?\("
            )  # fmt: skip
            if not re.search(known, makefile if program == "make" else cli, re.MULTILINE):
                found.append(f"{program} {name}")
        for script, arguments in SCRIPT.findall(code):
            if (ROOT / script).exists():
                source = (ROOT / script).read_text()
                options = re.findall(r"(?<!\S)--[\w-]+", arguments)
                found += [f"{script} {option}" for option in options if option not in source]
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_what_a_text_names_is_there(name):
    assert missing(TEXTS[name]) == []


def test_what_is_not_there_is_seen():
    text = "bench/gone.py, `make nothing`, `fusedce guess MODEL`, `python bench/loss.py --gone`"
    assert missing(text) == [
        "bench/gone.py", "make nothing", "fusedce guess", "bench/loss.py --gone"
    ]  # fmt: skip
    assert missing("`bench/loss.py --suite time`, `make test-all`, `fusedce plan 8,9`") == []


# ---- figures ------------------------------------------------------------------------------------


def rows(name, **where):
    found = json.loads((RESULTS / name).read_text())["rows"]
    return {r["name"]: r for r in found if all(r.get(k) == v for k, v in where.items())}


def test_figures_of_the_readme():
    readme = " ".join(TEXTS["README.md"].split())
    data = json.loads((RESULTS / "gpu-h200.json").read_text())
    measured = importlib.import_module("gpu").over_products(data["rows"])
    llama = ("peers", [8192, 4096, 128256])
    gpu = {r["name"]: r for r in measured if (r["suite"], r["shape"]) == llama}
    seconds = {
        name: f"{statistics.median(row['seconds']):.2f} s"
        for name, row in rows("loss-cpu.json", suite="masked", ignored=0.0).items()
    }
    ratio = {name: f"{row['over_products']:.2f}" for name, row in gpu.items() if "ms" in row}
    gib = {name: f"{row['peak_mib'] / 1024:.1f} GiB" for name, row in gpu.items() if "ms" in row}
    mib = {name: f"{row['peak_mib']:.0f} MiB" for name, row in gpu.items() if "ms" in row}
    planned = call("plan", "4096x128256", "--tokens", "8192", "--device", "H200").output
    for sentence in (
        f"holds {mib['fused_ce']} on an H200 where eager holds {gib['eager']} and compiled eager "
        f"{gib['compiled eager']}; Liger-Kernel holds {mib['Liger-Kernel']} and cut-cross-entropy "
        f"{mib['cut-cross-entropy']}",
        f"goes down to {re.search(r'least memory_budget +(.*)', planned)[1]}",
        f"(bfloat16, commit {gpu['fused_ce']['commit']}); "
        f"ours within 64 MiB {ratio['fused_ce, 64 MiB']}",
        f"takes {ratio['fused_ce']} of the three bare matrix products; eager {ratio['eager']}, "
        f"compiled eager {ratio['compiled eager']}, Liger-Kernel {ratio['Liger-Kernel']}, "
        f"cut-cross-entropy {ratio['cut-cross-entropy']}",
        f"{seconds['fused_ce']} where eager takes {seconds['eager']}",
    ):
        assert sentence in readme
    size = {
        (row["stack"], row["model"]): row["gradient"]
        for row in json.loads((RESULTS / "stacks.json").read_text())["rows"]
        if row["micro-batches"] == 4
    }
    sentence = (
        "four times too large for T5 and BERT, eight times on two ranks, and 4 to 9% too small"
    )
    assert sentence in readme
    for stack, times in (("Trainer", 4), ("Trainer, 2 ranks", 8)):
        assert [round(size[stack, name]) for name in ("T5", "BERT")] == [times, times]
        assert round(100 * (1 - size[stack, "GPT-2"])) == 4
        assert size[stack, "Llama"] == pytest.approx(1)


def test_figures_of_the_pages():
    memory = " ".join(TEXTS["docs/guides/memory.md"].split())
    ratio = {}
    for mib in (16, 64):
        of = rows("loss-cpu.json", suite="budget", budget=mib)
        ours, bare = (sorted(of[name]["seconds"]) for name in ("fused_ce", "bare GEMMs"))
        ratio[mib] = f"{ours[len(ours) // 2] / bare[len(bare) // 2]:.2f}"
    assert f"took {ratio[16]} of the three bare products instead of {ratio[64]}" in memory
    shown = re.search(r"fused_ce holds.*?product\.", TEXTS["docs/guides/memory.md"], re.DOTALL)[0]
    assert shown in call("plan", "4096x128256", "--tokens", "8192", "--device", "H200").output


def test_tables_of_the_gpu_are_those_of_the_data(tmp_path):
    text, copy = TEXTS["docs/benchmarks.md"], tmp_path / "page.md"
    copy.write_text(re.sub(r"(<!-- gpu \w+ -->\n).*?(?=<!-- end)", r"\1", text, flags=re.DOTALL))
    data = json.loads((RESULTS / "gpu-h200.json").read_text())
    importlib.import_module("gpu").tables(data, copy)
    counts = r" \(\d+ files? of kernels and launchers changed since\)"
    assert re.sub(counts, "", copy.read_text()) == re.sub(counts, "", text)
    assert text.count("<!-- gpu ") == 7


def test_what_has_changed_since_a_gpu_measured_is_counted():
    """Where git has the commit; a clone without its history has not."""
    from lib.results import changed_since

    said = re.findall(r"commit (\w+) \((\d+) files?", TEXTS["docs/benchmarks.md"])
    assert said
    for of, count in set(said):
        assert changed_since(of) in (None, int(count)), "python bench/gpu.py table ... --page ..."


@pytest.mark.parametrize(
    ("script", "data", "page", "mark"),
    [
        ("stacks", "stacks.json", "docs/stacks.md", "stacks"),
        ("head", "head-cpu.json", "docs/head.md", "head cpu"),
        ("seeds", "seeds-cpu.json", "docs/denominator.md", "seeds small"),
    ],
)
def test_a_table_is_that_of_the_data(script, data, page, mark):
    measured = json.loads((RESULTS / data).read_text())["rows"]
    made = importlib.import_module(script).table(measured)
    assert f"<!-- {mark} -->\n{made}\n" in TEXTS[page]


def test_what_was_measured_names_its_commit():
    for path in RESULTS.glob("*.json"):
        data = json.loads(path.read_text())
        if "commit" in data or path.name in ("memory.json", "fuzz.json"):  # counted; a list of runs
            continue
        parts = data["packages"].values() if "packages" in data else data["rows"]
        assert parts, path.name
        assert all("commit" in part for part in parts), path.name


# A bound of accuracy.md in words of a test.
ELSEWHERE = {"3e-2"}


def test_a_decimal_in_prose_stands_in_the_data_the_log_or_a_test():
    """A figure may stand there for another reason; one that stands nowhere has no source."""
    files = [
        *(p for folder in ("tests", "bench", "fusedce") for p in (ROOT / folder).rglob("*.py")),
        ROOT / "bench" / "LOG.md", ROOT / "Makefile", *ROOT.glob("constraints*.txt"),
        *(ROOT / "docs" / "notebooks").glob("*.ipynb"),
    ]  # fmt: skip
    known = " ".join(p.read_text() for p in files)
    stacks = json.loads((RESULTS / "stacks.json").read_text())["rows"]
    known += " ".join(f"{row['direction']:.2f}" for row in stacks)
    table = r"<!-- [\w ]+ -->\n.*?<!-- end -->"
    for name, text in TEXTS.items():
        if not name.startswith("docs/"):
            continue
        prose = re.sub(rf"{table}|```.*?```|https?://\S+|`[^`]*`", "", text, flags=re.DOTALL)
        found = re.findall(r"(?<![\w.])(?:\d+\.\d+|\d+e-\d+)(?![\w.]*\.?\d)", prose)
        assert [x for x in found if x not in known and x not in ELSEWHERE] == [], name


def test_counted_memory_is_what_the_plan_counts():
    """`python bench/memory.py` draws it anew."""
    counted = importlib.import_module("memory").counted()
    assert counted == json.loads((RESULTS / "memory.json").read_text())


def test_badges_classifiers_and_citation_are_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    badges = importlib.import_module("badges")
    assert (ROOT / "docs" / "badges.svg").read_text() == badges.svg()
    project = (ROOT / "pyproject.toml").read_text()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    run = set(re.findall(r'python(?:-version)?: "(\d\.\d+)"', workflow))
    assert set(re.findall(r"Python :: (\d\.\d+)", project)) == run
    version = re.search(r'^version = "(.+)"', project, re.MULTILINE)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_actions_are_pinned():
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", file.read_text()):
            assert action.startswith("./") or re.search(r"@[0-9a-f]{40}$", action), action
