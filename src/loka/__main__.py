"""`python -m loka` is `loka`."""

from loka.cli.main import main

main()
