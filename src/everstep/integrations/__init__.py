"""Thin modules for other libraries: each is imported by who uses that."""
