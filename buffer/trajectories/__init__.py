"""Every ended episode of a run, kept in Parquet files that outlive Redis."""
