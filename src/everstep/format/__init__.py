"""The format as data: what docs/format.md says, in code. Pure: no files, no torch."""
