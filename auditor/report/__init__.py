"""Reporters: each takes an Audit alone and returns text; none of them measures or decides anything."""
