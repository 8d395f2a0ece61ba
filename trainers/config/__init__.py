"""The config of a training run: sections, rules between keys, reading and writing."""
