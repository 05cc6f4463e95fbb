"""Patch: a plan and a module become a module that follows the plan, in memory or as an importable file."""
