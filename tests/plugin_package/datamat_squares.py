"""A writer that another package brings: the squares of the first numbers."""

from datamat import DatasetWriter, Features, IndexRow, Scalar


class SquaresWriter(DatasetWriter):
    """Numbers and their squares; the source says how many."""

    name = "squares"
    features = Features({"square": Scalar("int64")})

    def index(self, source):
        return [IndexRow(f"{number:03d}", fields={"number": number}) for number in range(int(source))]

    def read(self, row):
        return {"square": row.fields["number"] ** 2}
