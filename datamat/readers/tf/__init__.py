"""Reads shards as a `tf.data.Dataset`."""
