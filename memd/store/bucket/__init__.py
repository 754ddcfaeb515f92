"""The continuous backup of a data directory to a bucket (S3-compatible object storage), and its restoration."""
