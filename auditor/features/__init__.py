"""Features: each is a folder with its records, its stages and its pages, beside the stages of an audit."""
