"""The `r18` command. One file a subcommand; each calls the library function of the same name."""

from __future__ import annotations

from r18.cli.app import main

__all__ = ["main"]
