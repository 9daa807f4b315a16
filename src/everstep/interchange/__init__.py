"""From and to the formats of other libraries: docs/interchange.md."""
