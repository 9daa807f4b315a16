"""Makes tests/ importable: stores.py and independent_reader.py are shared by all tests."""
