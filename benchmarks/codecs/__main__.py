"""See measure.py."""

from benchmarks.codecs.measure import main

main()
