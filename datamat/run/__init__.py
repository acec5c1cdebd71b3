"""Execute a plan: workers, shards, commit; and the methods of `Materializer`."""
