"""What carries a plan out: strategies, the runtime of a live module, and the importable file that has both."""
