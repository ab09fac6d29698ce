"""Data sets in shards, tars or Parquet, on this machine or behind a URL: index, order, and a bounded cache."""
