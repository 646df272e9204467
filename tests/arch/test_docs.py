"""The documentation builds without a warning and reaches for nothing outside."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from running import ROOT, run


def test_the_pages_build_and_load_nothing_from_elsewhere(tmp_path: Path) -> None:
    # Not with --quiet: it silences warnings before strict mode counts them.
    run("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site"))
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [url for url in loaded if "canonical" not in url], f"{page.name} loads {loaded}"


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = {page for entry in navigation for page in entry.values()}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages
