"""Patch: a plan and a module become a module that follows the plan, live or as an importable file."""
