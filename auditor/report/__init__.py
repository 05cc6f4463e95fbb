"""Reports: the results of an audit as text, tables and charts; nothing here measures or decides."""

FORMATS = ("github", "html", "json", "md", "sarif", "text")
"""Values of `--format`; their functions are in `reporters`, which needs torch."""
