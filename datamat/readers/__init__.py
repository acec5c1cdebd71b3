"""Reads finished directories back: `load` is the entry point.

dataset      `load`; records by position, by key and in order; views of them         <- start reading here
views        which records of which directories a dataset has, and which of them filters keep
batches      batches of them for numpy and torch: their order, and how an iteration resumes
loader       makes batches in threads or processes, in reusable memory (`sharing`)
records      finds, reads and decodes one record, and handles damage; below it `cache` and `remote`
sequences    batches that are padded, bucketed by length, or packed into rows
tf           the same as a `tf.data.Dataset`
preview      draws samples as pictures with masks, boxes, labels and texts
view         shows a directory in a browser, as one page or from a server on this machine
"""
