"""Verification: where the tree's rows go, and which path the target accepted."""
