"""`python -m benchmarks.tiers`: see measure."""

from benchmarks.tiers.measure import main

if __name__ == "__main__":
    main()
