"""A plugin that fails to import, as real ones may."""

raise RuntimeError("libexample.so.3: cannot open shared object file")
