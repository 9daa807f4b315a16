"""Media that hold bytes."""
