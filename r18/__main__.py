"""`python -m r18` is the command `r18`."""

from r18.cli import main

if __name__ == "__main__":
    main()
