"""The ledger: the dtypes of every weight and operation, as stored, loaded, requested, planned and executed."""
