"""What is an error, and what FP32 does by itself when it is run again. Importing this needs no torch."""

from __future__ import annotations

FLOOR = 3.0
"""How many times what runs in FP32 differ by an error has to be, to be called one."""
