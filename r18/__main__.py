"""`python -m r18` is the command `r18`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:  # as with `r18`, the current folder hides nothing installed
        sys.path.append(sys.path.pop(0))
    from r18.cli import main

    main()
