"""Applies plans to models: strategies, the runtime that patches a live module, and the file `patched_model.py`."""
