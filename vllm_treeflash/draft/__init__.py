"""Drafting: one block forward, two-stage transition tables, best-first tree selection."""
