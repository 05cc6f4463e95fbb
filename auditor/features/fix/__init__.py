"""Fixes: from a finding to a verified change of the user's source."""
