"""Verification: runs `patched_model.py` or an exported program in a fresh process, as a user's script would."""
