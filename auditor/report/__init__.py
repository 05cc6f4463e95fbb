"""Reports: the results of an audit as text, tables and charts; nothing here measures or decides."""

FORMATS = ("github", "html", "json", "md", "sarif", "text")
"""What `--format` may ask for; what makes them is in `reporters`, which needs torch."""
