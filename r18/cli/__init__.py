"""The `r18` command. One file a subcommand; each calls the library function of the same name."""

from __future__ import annotations

from r18 import ends


def main() -> None:
    """Run the command line in a process of its own; the console script `r18` calls this.

    `r18.cli.app.main` is the same without the handling of signals and broken streams.
    """
    ends.run(_command)


def _command() -> None:
    # Its imports take a good part of a second, in which Ctrl-C may come.
    from r18.cli.app import main

    main()


__all__ = ["main"]
