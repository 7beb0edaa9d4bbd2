"""`python -m outloop.cli`, as the launcher starts parts."""

from outloop.cli import main

main()
