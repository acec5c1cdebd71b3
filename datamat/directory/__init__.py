"""What a finished directory is on disk: files, rows, keys, manifest, ledger, sidecars; and how it is verified."""
