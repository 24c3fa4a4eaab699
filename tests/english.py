"""Counts phrases that a native speaker would avoid, and fails if one becomes more frequent.

``english.yaml`` lists the patterns, what to write instead, and the maximum count in each corpus.
``--lower`` replaces the maxima with lower counts of today. It never raises them.
"""

import ast
import re
import sys
import tokenize
from collections import defaultdict
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
RULES = Path(__file__).with_suffix(".yaml")
DEVELOPER_PAGES = {"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "measurements.md"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def read_corpora() -> dict[str, list[str]]:
    """Return the texts of each corpus, without code blocks."""
    texts = defaultdict[str, list[str]](list)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        corpus = "developer pages" if path.name in DEVELOPER_PAGES else "pages"
        texts[corpus].append(re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8")))
    for folder in ("finetune", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            read_code(path, texts)
    return texts


def read_code(path: Path, texts: dict[str, list[str]]) -> None:
    with path.open("rb") as file:
        tokens = [*tokenize.tokenize(file.readline)]
    comments = (token.string[2:] for token in tokens if token.type == tokenize.COMMENT)
    texts["comments"].append("\n".join(comments))
    docstrings = set[str | None]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Documented):
            docstrings.add(ast.get_docstring(node, clean=False))
            texts["docstrings"].append(ast.get_docstring(node) or "")
            if getattr(node, "name", "").startswith("test_"):
                texts["test names"].append(node.name.removeprefix("test_"))
        elif isinstance(node, ast.Constant) and path.is_relative_to(ROOT / "finetune"):
            text = node.value if isinstance(node.value, str) else ""
            texts["messages"] += [text] if text not in docstrings else []


def main() -> None:
    """Compare the counts with the maxima."""
    texts, rules, failures = read_corpora(), yaml.safe_load(RULES.read_text()), list[str]()
    for rule in rules:
        pattern, maxima = re.compile(rule["pattern"]), rule["maxima"]
        for corpus, maximum in maxima.items():
            joined = [text.replace("\n", " ") for text in texts[corpus]]
            hits = [hit for text in joined for hit in pattern.finditer(text)]
            maxima[corpus] = min(len(hits), maximum)
            if len(hits) > maximum:
                failures.append(f"{corpus}: {len(hits)} > {maximum} hits. Write {rule['write']}:")
                failures += [f"    {hit.string[: hit.end() + 30][-80:]}" for hit in hits]
            elif len(hits) < maximum and "--lower" not in sys.argv:
                sys.stdout.write(
                    f"{corpus}: {len(hits)} < {maximum} hits. Run {sys.argv[0]} --lower.\n"
                )
    if "--lower" in sys.argv:
        RULES.write_text(yaml.safe_dump(rules, sort_keys=False, default_flow_style=None, width=120))
    sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
    main()
