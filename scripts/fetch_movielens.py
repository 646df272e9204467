"""Fetch MovieLens-100k to a directory: `python scripts/fetch_movielens.py [--to data/ml-100k]`.

GroupLens does not allow the data to be handed on, so it is not in this repository: it is taken out of the
package recbole 1.2.1 on PyPI, which carries it as an example. The three files are checked against their
known SHA-256 and put in place together or not at all. Read them with `--data movielens:data/ml-100k`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "recbole==1.2.1"
FOLDER = "recbole/dataset_example/ml-100k"
SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
}


class FetchError(Exception):
    """The data could not be fetched; the text says why."""


def download(folder: Path) -> Path:
    """Download the package's wheel into a folder.

    Raises:
        FetchError: if pip fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), PACKAGE], stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(f"pip could not download {PACKAGE}: {done.stderr.strip() or 'no wheel came'}")
    return wheels[0]


def unpack(wheel: Path, target: Path) -> None:
    """Take the data files out of a wheel, check them, and put them into `target`, all or none.

    Raises:
        FetchError: if a file is missing from the wheel or is not the one expected.
    """
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, zipfile.ZipFile(wheel) as archive:
        for name, expected in SHA256.items():
            try:
                content = archive.read(f"{FOLDER}/{name}")
            except KeyError as error:
                raise FetchError(f"{wheel.name} holds no {FOLDER}/{name}") from error
            found = hashlib.sha256(content).hexdigest()
            if found != expected:
                raise FetchError(f"{name} has SHA-256 {found}, expected {expected}")
            (Path(scratch) / name).write_bytes(content)
        for name in SHA256:
            (Path(scratch) / name).replace(target / name)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--to", type=Path, default=Path("data/ml-100k"), help="directory (default: data/ml-100k)"
    )
    target: Path = parser.parse_args(arguments).to
    try:
        with tempfile.TemporaryDirectory() as scratch:
            unpack(download(Path(scratch)), target)
    except (FetchError, OSError) as error:
        print(f"{error}\n\nhint: is the package index reachable?", file=sys.stderr)
        return 2
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
