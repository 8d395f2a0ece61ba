"""Tools for configs: typed, frozen sections, registries of choices, and readers of YAML and overrides.

The configs of runs, searches and endpoints are defined in `trainers`, `search` and `serving`.
"""
