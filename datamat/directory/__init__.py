"""What a finished directory is on disk: files, keys, manifest, ledger, sidecars; and how it is verified."""
