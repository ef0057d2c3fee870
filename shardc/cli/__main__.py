"""`python -m shardc.cli`: what the command `shardc` runs."""

from shardc.cli import main

main()
