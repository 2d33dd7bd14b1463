"""A fuzzer of every parser: valid files with seeded damage, accepted or refused with a message.

`targets` has the parsers with valid files for each, `damage` changes files, `runs` reads one under
limits of memory and time, and `python -m fuzz` runs for as long as asked. Files that once failed
are in `corpus`, by parser.
"""
