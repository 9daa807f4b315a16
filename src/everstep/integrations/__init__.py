"""Other libraries while they train, a module each, imported by who uses it; what they have saved:
everstep.interchange."""
