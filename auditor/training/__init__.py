"""Audits a training step: its loss, usable loss scales and formats, and recommendations."""
