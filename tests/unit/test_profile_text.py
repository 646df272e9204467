"""What `print(profile)` shows, and tables as rows."""

from __future__ import annotations

import artifact_examples

from loka.artifacts.profile import ErrorTable, SiteTable
from loka.vocab import Pass


def test_a_profile_prints_a_line_a_site() -> None:
    profile = artifact_examples.profile()
    text = str(profile)
    lines = text.splitlines()
    assert lines[0].startswith(f"profile of {len(profile.sites)} sites on {profile.device.name}: ")
    for site in profile.sites.sites():
        assert any(line.startswith(site.name) and f"{site.rows}x{site.n}x{site.k}" in line for line in lines)
    assert all(f"note: {note}" in lines for note in profile.notes)


def test_records_have_the_file_s_columns() -> None:
    columns = {field: ["x"] for field in ErrorTable.__struct_fields__}
    table = ErrorTable(**(columns | {"pass_": [Pass.FWD]}))  # type: ignore[arg-type]
    (row,) = table.records()
    assert row["pass"] is Pass.FWD
    assert list(row) == list(ErrorTable.__struct_encode_fields__)
    assert repr(table).startswith("<ErrorTable: 1 rows of site, pass, spec_a")
    assert SiteTable().records() == []
