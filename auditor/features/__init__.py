"""Features on top of audits, a folder each: record, stage and texts lie side by side."""
