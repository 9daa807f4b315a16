"""What codecs save, and what they cost."""
