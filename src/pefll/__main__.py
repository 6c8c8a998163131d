"""`python -m pefll`."""

from pefll.cli import main

main()
