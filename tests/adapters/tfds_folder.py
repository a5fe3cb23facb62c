"""A TFDS data set by TFDS's own writer, TensorFlow-free."""

import numpy as np


def write_tfds(root, rows):
  """A data set "tiny" of array_record shards of three examples; ``rows``: split -> examples."""
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.sequential_writer import SequentialWriter

  data_dir = root / "tiny" / "1.0.0"
  data_dir.mkdir(parents=True)
  features = tfds.features.FeaturesDict(
    {
      "question": tfds.features.Text(),
      "answer": tfds.features.Text(),
      "level": tfds.features.Scalar(dtype=np.int64),
    }
  )
  identity = tfds.core.dataset_info.DatasetIdentity(
    name="tiny", version=tfds.core.Version("1.0.0"), data_dir=str(data_dir), module_name="tests"
  )
  info = tfds.core.DatasetInfo(builder=identity, features=features, description="made by a test")
  writer = SequentialWriter(info, max_examples_per_shard=3, file_format="array_record")
  writer.initialize_splits(list(rows))
  writer.add_examples(rows)
  writer.close_all()
