"""Report: what an audit came to, in words, tables and pictures; nothing here measures or decides anything."""
