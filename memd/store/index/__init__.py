"""What finds entries by vector or id: HNSW indexes, the columns' superseded set, uuids."""
