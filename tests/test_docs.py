"""The documents point at what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    # A path in a text is from the top of the checkout, or from the folder that the text is about.
    places = (ROOT, document.parent, *(p for p in ROOT.iterdir() if p.is_dir()))
    missing += [
        path for path in PATH.findall(text)
        if not any((place / path).exists() for place in places) and "NAME" not in path
    ]  # fmt: skip
    assert missing == []


def test_the_documents_are_there() -> None:
    names = {d.name for d in DOCUMENTS}
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= names


def test_adding_a_probe_fits_on_a_page() -> None:
    assert len((ROOT / "docs/adding-a-probe.md").read_text().split()) <= 450
