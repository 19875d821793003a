"""DCP storage on txstore: `StorageWriter` and `StorageReader`."""
