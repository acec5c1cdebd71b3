"""Makes what a plan says: workers, shards, commit; the `Materializer` and what it offers."""
