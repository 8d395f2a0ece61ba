"""The config of an endpoint: what is served, where, and how requests become batches."""
