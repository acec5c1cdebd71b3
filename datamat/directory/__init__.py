"""A finished directory on disk: files, keys, manifest, ledger, sidecars, and their verification."""
