"""From text to batches on the device: shards, a manifest, one stream per split, a loader."""
