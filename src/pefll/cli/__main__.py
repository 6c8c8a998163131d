"""`python -m pefll.cli`."""

from pefll.cli import main

main()
