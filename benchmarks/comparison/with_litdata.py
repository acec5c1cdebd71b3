"""litdata: `optimize`, with the checkpoints that it offers. Its workers are spawned, so it needs a guard."""

import sys

import litdata
from task import files, sample

if __name__ == "__main__":
    source, output, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    litdata.optimize(
        fn=sample,
        inputs=files(source),
        output_dir=output,
        chunk_bytes="1MB",
        num_workers=workers,
        use_checkpoint=True,
    )
