"""`python -m shardc` runs the command `shardc`."""

from shardc.cli import main

main()
