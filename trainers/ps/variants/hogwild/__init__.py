"""HOGWILD: workers that update shared memory without a lock."""
