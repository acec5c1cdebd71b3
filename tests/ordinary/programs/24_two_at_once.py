"""A cell is run again while its first run is still at work: one of the two writes, and nothing is mixed.

Prints: 1 wrote or found it there, the other was refused or did nothing / 60 records, 60 distinct
"""

# %% parameters
START_METHOD, NUM_WORKERS = None, None

# %%
import threading

from datamat import DatasetWriter, Features, IndexRow, Materializer, OutputLockedError, Scalar, WorkerOptions, load


class Numbers(DatasetWriter):
    name = "numbers"
    features = Features({"n": Scalar("int64")})

    def index(self, source):
        return [IndexRow(str(n), fields={"n": n}) for n in range(60)]

    def read(self, row):
        return {"n": row.fields["n"]}


reports, refused = [], []


def cell():
    workers = WorkerOptions(start_method=START_METHOD, num_workers=NUM_WORKERS)
    try:
        reports.append(Materializer(Numbers, None, "out").run(workers=workers))
    except OutputLockedError as error:
        refused.append(error)


# %%
threads = [threading.Thread(target=cell) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
idle = len(refused) + sum(report.did_nothing for report in reports)
assert idle in {1, 2}, (reports, refused)
assert all("process" in str(error) for error in refused), refused
print("1 wrote or found it there, the other was refused or did nothing")

# %%
found = [int(sample["n"]) for sample in load("out")]
print(f"{len(found)} records, {len(set(found))} distinct")
