"""Commit: make the accepted path look like an ordinary run of decoded tokens."""
