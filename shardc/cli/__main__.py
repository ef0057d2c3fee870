"""`python -m shardc.cli` runs the command `shardc`."""

from shardc.cli import main

main()
