"""Configs: typed and frozen at the edge, plain keyword arguments inside.

`schema` says what a config may hold, `load` makes one from YAML and overrides or names every problem at once, `checks`
holds the rules between keys, and `resume` what a resumed run may change.
"""
