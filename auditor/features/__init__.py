"""Capabilities beside the audit, each in a folder of its own: its records, its stages and its page."""
