"""A plugin that cannot be imported, as they are found in the wild."""

raise RuntimeError("libexample.so.3: cannot open shared object file")
